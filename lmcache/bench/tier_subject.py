"""What a tier is measured with: a place of its own in what the user named, and the same bytes moved plainly."""

import contextlib
import mmap
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import attrs
import numpy as np

from lmcache.bench.memory import Bytes
from lmcache.core.blob import BlobStore
from lmcache.core.blob_format import ALIGNMENT
from lmcache.core.codec import Codec
from lmcache.core.tier import KEY_DIGITS, StorageTier
from lmcache.core.tier_url import TierSettings, TierURL
from lmcache.errors import ConfigError
from lmcache.plugins.manager import PluginManager
from lmcache.plugins.storage import disk_file

CALL_SECONDS = 60.0
"""A plain call gets this long."""


class PlainStore(Protocol):
    """Something that keeps bytes under names, without a server, a codec or a checksum."""

    @property
    def what(self) -> str:
        """What a user would call it."""

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        """Keep `parts` joined."""

    def read(self, name: str, into: Sequence[memoryview]) -> None:
        """Fill `into` with what was written."""

    def remove(self, names: Sequence[str]) -> None:
        """Forget these."""


@attrs.frozen
class PlainFiles:
    """A file a blob, with the flags that the disk tier uses."""

    folder: Path
    direct: bool
    sync: bool

    @property
    def what(self) -> str:
        """What a user would call it."""
        return f"files, {'O_DIRECT' if self.direct else 'page cache'}{', fsync' if self.sync else ''}"

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        """A new file."""
        fd = disk_file.open_new(str(self.folder / name), parts, self.direct)
        try:
            left, offset = list(parts), 0
            while left:
                written = os.pwritev(fd, left, offset)
                offset += written
                left = _behind(left, written)
            if self.sync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, name: str, into: Sequence[memoryview]) -> None:
        """All of it."""
        fd = disk_file.open_old(str(self.folder / name), into, self.direct)
        try:
            left, offset = list(into), 0
            while left and (count := os.preadv(fd, left, offset)):
                offset += count
                left = _behind(left, count)
        finally:
            os.close(fd)

    def remove(self, names: Sequence[str]) -> None:
        """Unlink."""
        for name in names:
            (self.folder / name).unlink()


@attrs.frozen
class PlainTier:
    """The tier itself, called by nobody but us."""

    tier: StorageTier
    what: str = "calls of the tier itself"

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        """One call."""
        self.tier.store(name, parts, time.monotonic() + CALL_SECONDS)

    def read(self, name: str, into: Sequence[memoryview]) -> None:
        """One call."""
        self.tier.load(name, into, time.monotonic() + CALL_SECONDS)

    def remove(self, names: Sequence[str]) -> None:
        """One call."""
        self.tier.delete(names, time.monotonic() + CALL_SECONDS)


@attrs.frozen
class TierSubject:
    """A tier to be measured."""

    url: str
    """What the server is started with."""
    settings: TierSettings
    codec: Codec | None
    plain: PlainStore
    shared: BlobStore | None
    """Open here, too, where the tier allows it: what the bench has left there is deleted through it."""

    def __str__(self) -> str:
        codec = f", codec {self.settings.codec}" if self.settings.codec else ""
        return f"{self.settings.location.scheme}{codec}"


@contextlib.contextmanager
def tier_subject(url: str, plugins: PluginManager, most_bytes: int) -> Iterator[TierSubject]:
    """Open it. A disk's folder gets a folder in it for as long as this lasts; ConfigError if it has no `most_bytes`."""
    parsed = TierURL.parse(url)
    with contextlib.ExitStack() as stack:
        if parsed.scheme == "disk":
            own = stack.enter_context(_own_folder(Path(parsed.path), most_bytes))
            url = _rewritten(parsed, str(own / "tier"), {"size_gb": f"{most_bytes / 2**30:.6f}"})
            opened = plugins.open_tier(url)
            opened.blobs.tier.close()  # its folder is the server's
            options = opened.settings.location.options
            direct = opened.blobs.tier.alignment > 1
            plain: PlainStore = PlainFiles(own / "plain", direct, options.get("sync") == "on")
            yield TierSubject(url, opened.settings, opened.blobs.codec, plain, None)
        else:
            url = _rewritten(parsed, parsed.path, {})
            opened = plugins.open_tier(url)
            stack.callback(opened.blobs.tier.close)
            if opened.blobs.tier.store_of_chunks() is not None:
                raise ConfigError(
                    f"--l2 {opened.settings.location} keeps chunks of engines, no blobs: there is nothing to measure",
                    remedy="ask it what it holds with lmcache status",
                )
            plain = PlainTier(opened.blobs.tier)
            yield TierSubject(url, opened.settings, opened.blobs.codec, plain, opened.blobs)


@contextlib.contextmanager
def _own_folder(parent: Path, most_bytes: int) -> Iterator[Path]:
    if not parent.is_dir():
        raise ConfigError(f"--l2 disk://{parent}: there is no such folder", remedy="make it, on the drive to measure")
    free = shutil.disk_usage(parent).free
    if free < 2 * most_bytes:
        raise ConfigError(
            f"bench needs {2 * most_bytes / 2**30:.1f} GB in {parent}, which has {free / 2**30:.1f} GB",
            remedy="free some, or use --quick",
        )
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-", dir=parent) as folder:
        for name in ("tier", "plain"):
            (Path(folder) / name).mkdir()
        yield Path(folder)


def _rewritten(parsed: TierURL, path: str, more: dict[str, str]) -> str:
    """The URL with another path. Written through, whatever was asked: what is measured is not when, but how fast."""
    port = f":{parsed.port}" if parsed.port else ""
    options = {**parsed.query, **more, "store": "write-through"}
    query = "&".join(f"{name}={quote(value)}" for name, value in options.items())
    return f"{parsed.scheme}://{parsed.host}{port}{quote(path)}?{query}"


class PlainRun:
    """As many plain blobs as a prompt has, written and read by as many threads as the tier has."""

    def __init__(self, subject: TierSubject) -> None:
        self._store, threads = subject.plain, subject.settings.threads
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(threads)
        self._written: list[list[str]] = []

    def write(self, blobs: Sequence[Sequence[memoryview]]) -> float:
        """Write a prompt's blobs, which lie in these buffers; returns seconds."""
        names = [secrets.token_hex(KEY_DIGITS // 2) for _ in blobs]
        self._written.append(names)
        return self._timed(self._store.write, names, blobs)

    def read(self, age: int, into: Sequence[Sequence[memoryview]]) -> float:
        """Read the blobs that were written `age` writes before the last; older ones are forgotten. Returns seconds."""
        while len(self._written) > age + 1:
            self._store.remove(self._written.pop(0))
        return self._timed(self._store.read, self._written[0], into)

    def _timed(
        self,
        call: Callable[[str, Sequence[memoryview]], None],
        names: Sequence[str],
        blobs: Sequence[Sequence[memoryview]],
    ) -> float:
        started = time.perf_counter()
        for _ in self._pool.map(lambda name, blob: call(name, [self._header(), *blob]), names, blobs):
            pass
        return time.perf_counter() - started

    def _header(self) -> memoryview:
        """A blob has one; each thread has its own."""
        if not hasattr(self._own, "header"):
            self._own.header = memoryview(mmap.mmap(-1, ALIGNMENT))
        header: memoryview = self._own.header
        return header

    def close(self) -> None:
        """Remove what was written."""
        self._pool.shutdown()
        for names in self._written:
            self._store.remove(names)


def kv_like(size: int) -> Bytes:
    """Bytes as a KV cache in bfloat16 has them, as far as a codec can tell: normally distributed values."""
    values = np.random.default_rng(0).standard_normal(size // 2, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def page_aligned(data: Bytes) -> Bytes:
    """The same bytes where direct I/O can take them from."""
    memory = np.frombuffer(mmap.mmap(-1, len(data)), np.uint8)
    memory[:] = data
    return memory


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    return [views[0][count:], *views[1:]] if views else []
