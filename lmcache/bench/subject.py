"""What is measured, and from where: a server process watched from outside, and its clients on one core."""

import contextlib
import ctypes
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from lmcache.core.client import Client, ClientSettings, Engine, ServerAddress
from lmcache.core.link import Link
from lmcache.core.protocol import Role
from lmcache.errors import ServerUnavailable
from lmcache.geometry.groups import Geometry

READY_SECONDS = 60.0

PATIENCE = ClientSettings(deadline=30.0)
"""A bench may be starved by whatever else runs here; a broken link would only hide that."""

_libc = ctypes.CDLL(None, use_errno=True)


class ServerUnderTest:
    """`lmcache server` on a free port. A context manager: the process is gone after it."""

    def __init__(self, *arguments: str) -> None:
        """Start it; returns when it says that it is ready. Raises ServerUnavailable with the server's last words."""
        # a file, not a pipe: nobody reads it while the server is measured
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `close`
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lmcache", "server", "--port", "0", "--log-level", "warning", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            self.address = self._wait_until_ready()
            self.wall_until_ready = time.monotonic() - self._began
            """Seconds."""
            self.cpu_until_ready = self.cpu_seconds()
            """Seconds of CPU, all threads, from the interpreter's start on."""
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def _wait_until_ready(self) -> ServerAddress:
        output = self._process.stdout
        if output is None or not select.select([output], [], [], READY_SECONDS)[0]:
            raise ServerUnavailable(f"the server did not get ready within {READY_SECONDS:g} s")
        words = output.readline().split()
        if words[:4] != ["lmcache", "server", "ready", "on"]:
            self._process.wait(READY_SECONDS)
            self._errors.seek(0)
            raise ServerUnavailable(f"the server did not start: {self._errors.read().strip() or 'it said nothing'}")
        return ServerAddress.parse(words[4].rstrip(":"))

    def cpu_seconds(self) -> float:
        """CPU that all its threads have used so far, to the nanosecond (clock_getcpuclockid(3))."""
        return process_cpu_seconds(self.pid)

    def anonymous_bytes(self) -> int:
        """Memory that is the process's own. The arena is not in it: a memory file counts as shared memory."""
        return _kilobytes(Path(f"/proc/{self.pid}/smaps_rollup"), "Anonymous") << 10

    def shared_bytes(self) -> int:
        """Memory of memory files that it has mapped and touched: the arena as far as it is backed."""
        return _kilobytes(Path(f"/proc/{self.pid}/status"), "RssShmem") << 10

    def close(self) -> None:
        """Stop the process; kill it if it does not stop by itself."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def process_cpu_seconds(pid: int) -> float:
    """CPU that all threads of a process have used so far. Raises ServerUnavailable where nobody may know."""
    clock = ctypes.c_int()
    error = _libc.clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise ServerUnavailable(f"the CPU clock of process {pid} cannot be read: {os.strerror(error)}")
    return time.clock_gettime(clock.value)


def _kilobytes(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{path} has no {name}")


@contextlib.contextmanager
def links(address: ServerAddress, geometry: Geometry) -> Iterator[tuple[Link, Link]]:
    """A scheduler's and a worker's link of one engine. Raises ServerUnavailable when either is refused."""
    with contextlib.ExitStack() as opened:
        found = []
        for role in (Role.SCHEDULER, Role.WORKER):
            client = Client(address, Engine({"model": "lmcache bench"}, geometry, role), PATIENCE)
            opened.callback(client.close)
            client.start(wait=PATIENCE.deadline)
            found.append(client.link())
        yield found[0], found[1]


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread on one core: what is compared must not run on different ones."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
