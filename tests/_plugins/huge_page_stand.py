"""Huge pages of this host, set aside for a test and given back after it."""

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache.core.huge_pages import huge_page_pool
from lmcache.errors import ConfigError

NR = Path("/proc/sys/vm/nr_hugepages")


@contextlib.contextmanager
def huge_pages(size: int) -> Iterator[int]:
    """Memory of `size` bytes free in the pool, and no more; gives the page size. Skips where that cannot be had."""
    with (Path(tempfile.gettempdir()) / "lmcache-test-huge-pages").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run of these tests on this host
        try:
            pool = huge_page_pool()
            before = int(NR.read_text())
        except (ConfigError, OSError) as error:
            pytest.skip(f"this host offers no huge pages: {error}")
        try:
            try:
                NR.write_text(str(before - pool.free + size // pool.page_bytes))
            except OSError as error:
                pytest.skip(f"huge pages can be set aside by root alone: {error}")
            if huge_page_pool().free != size // pool.page_bytes:
                pytest.skip(f"this host has no {size >> 20} MiB in huge pages")
            yield pool.page_bytes
        finally:
            with contextlib.suppress(OSError):
                NR.write_text(str(before))
