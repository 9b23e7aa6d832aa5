"""Row 11: an engine on another host, beside a plain TCP copy of as many bytes, in turns; with keys and without.

The other host is this one: the client simply does not take the Unix socket. So both go over loopback, which is faster
than any network, and what is left is what the two cost.
"""

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import attrs
import xxhash

from lmcache.bench.figures import Figure, Step, figure
from lmcache.bench.plain_tcp import PlainTCP
from lmcache.bench.subject import PATIENCE, ServerUnderTest, process_cpu_seconds
from lmcache.core.cells import unpack_cells
from lmcache.core.client import Engine, ServerAddress
from lmcache.core.control import Control
from lmcache.core.curve import ClientKeys, new_keys, read_client_keys
from lmcache.core.keys import HASH_BYTES
from lmcache.core.protocol import Role
from lmcache.core.remote_link import RemoteLink
from lmcache.errors import LMCacheError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

CHUNK_SIZE = 256
CELL = 1 << 20
OBJECT_CELLS = 2
GEOMETRY = Geometry((KVGroup(GroupKind.FULL, 64, (OBJECT_CELLS * CELL // 32,) * 8),))
WARM_UP = 2
"""Samples that do not count: memory is touched for the first time in them."""


@attrs.define
class _Sample:
    """One prompt, moved once over the bulk channel and once plainly."""

    seconds: float
    cpu: float
    """Of both ends."""
    plain_seconds: float
    plain_cpu: float


def measure_bulk(samples: int, chunks: int, step: Step) -> list[Figure]:
    """Store and load `samples` prompts of `chunks` chunks of 2 MiB, with keys and without.

    Raises LMCacheError when a byte comes back that was not stored.
    """
    figures: list[Figure] = []
    for locked in (False, True):
        name = "with keys" if locked else "without keys"
        step(f"the bulk channel {name}")
        with _site(chunks, locked=locked) as site:
            for _ in range(WARM_UP):
                site.prompt()
            moved = [site.prompt() for _ in range(samples)]
        for what, pick in (("store", 0), ("load", 1)):
            figures += _figures(what, name, [each[pick] for each in moved], site.prompt_bytes)
    return figures


def _figures(what: str, name: str, samples: list[_Sample], size: int) -> Iterator[Figure]:
    subject = f"prompts of {size >> 20} MiB, {name}"
    counts = {"prompts": len(samples), "bytes_moved": len(samples) * size, "bytes_verified": len(samples) * size}
    yield figure(
        11,
        what,
        subject,
        [each.plain_seconds / each.seconds for each in samples],
        "× plain TCP",
        beside={"by CPU time": median(each.plain_cpu / each.cpu for each in samples)},
        counts=counts,
    )
    yield figure(
        11,
        f"{what}, CPU of a GB at both ends",
        subject,
        [each.cpu / size * 1e9 for each in samples],
        "s",
        beside={"plain TCP": median(each.plain_cpu / size * 1e9 for each in samples)},
        counts=counts,
    )


class _Site:
    """A server, a worker that does not share its memory, and the other end of a plain copy."""

    def __init__(self, server: ServerUnderTest, link: RemoteLink, plain: PlainTCP, chunks: int) -> None:
        self._server = server
        self._link = link
        self._plain = plain
        self._chunks = chunks
        self.prompt_bytes = chunks * OBJECT_CELLS * CELL
        self._source = memoryview(mmap.mmap(-1, self.prompt_bytes))
        self._source[:] = os.urandom(CELL) * (self.prompt_bytes // CELL)
        self._checksum = xxhash.xxh3_64_intdigest(self._source[:CELL])

    def prompt(self) -> tuple[_Sample, _Sample]:
        """Store a new prompt and load it back, each beside a plain copy."""
        hashes = os.urandom(HASH_BYTES * self._chunks)
        stored = self._beside(lambda: self._store(hashes), lambda: self._plain.send(self._source))
        found = self._link.lookup("bench", hashes, self._chunks * CHUNK_SIZE).wait()
        if found.tokens != self._chunks * CHUNK_SIZE:
            raise LMCacheError(f"a prompt of {self._chunks} stored chunks hit {found.tokens} tokens: that is a bug")
        loaded = self._beside(lambda: self._load(found.ticket), lambda: self._plain.receive(self._source))
        self._source[:] = bytes(self._source[:CELL]) * (self.prompt_bytes // CELL)
        self._checksum = xxhash.xxh3_64_intdigest(self._source[:CELL])
        return stored, loaded

    def _beside(self, served: Callable[[], float], plain: Callable[[], float]) -> _Sample:
        before = time.process_time() + self._server.cpu_seconds()
        seconds = served()
        cpu = time.process_time() + self._server.cpu_seconds() - before
        before = time.process_time() + process_cpu_seconds(self._plain.pid)
        plain_seconds = plain()
        return _Sample(seconds, cpu, plain_seconds, time.process_time() + process_cpu_seconds(self._plain.pid) - before)

    def _store(self, hashes: bytes) -> float:
        """Seconds from the first reservation until the server has published all."""
        started = time.perf_counter()
        done, parent, copied = 0, b"", 0
        while done < self._chunks:
            reserved = self._link.reserve("bench", parent, hashes[done * HASH_BYTES :], 0, 0)
            if not reserved.reservation:
                time.sleep(0.001)  # too much waits to be sent
                continue
            with self._link.copying() as mirror:
                for place in unpack_cells(reserved.cells):
                    mirror[place * CELL : (place + 1) * CELL] = self._source[copied : copied + CELL]
                    copied += CELL
            self._link.commit(reserved.reservation)
            done += len(reserved.placed)
            parent = hashes[(done - 1) * HASH_BYTES : done * HASH_BYTES]
        self._link.drain(PATIENCE.deadline)
        return time.perf_counter() - started

    def _load(self, ticket: int) -> float:
        """Seconds until all is in the engine's process."""
        started = time.perf_counter()
        opened = self._link.open(ticket)
        seconds = time.perf_counter() - started
        with self._link.copying() as mirror:
            for place in unpack_cells(opened.cells[0]):
                if xxhash.xxh3_64_intdigest(mirror[place * CELL : (place + 1) * CELL]) != self._checksum:
                    raise LMCacheError("bytes came back that were not stored: that is a bug, not a figure")
        if not self._link.confirm(ticket):
            raise LMCacheError("a ticket did not hold: that is a bug, not a figure")
        return seconds


@contextlib.contextmanager
def _site(chunks: int, *, locked: bool) -> Iterator[_Site]:
    size = 4 * chunks * OBJECT_CELLS * CELL / (1 << 30)
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        keys: ClientKeys | None = None
        flags = ["--insecure"]
        if locked:
            new_keys(folder / "keys")
            keys, flags = read_client_keys(str(folder / "keys")), ["--keys", str(folder / "keys")]
        memory = ("--l1-size-gb", f"{size:.6f}", "--l1-cell-kb", str(CELL >> 10), "--chunk-size", str(CHUNK_SIZE))
        server = opened.enter_context(ServerUnderTest(*memory, "--bulk-port", "0", *flags))
        with Control(server.address, PATIENCE.deadline, keys) as control:
            where = ServerAddress(server.address.host, control.hello().bulk_port)
            _wait_for_memory(control)
        engine = Engine({"model": "lmcache bench"}, GEOMETRY, Role.WORKER)
        link = RemoteLink.register_at(where, keys, engine, PATIENCE.deadline)
        opened.callback(link.close)
        yield _Site(server, link, opened.enter_context(PlainTCP()), chunks)


def _wait_for_memory(control: Control) -> None:
    """Until all of L1 has memory: putting it there is measured elsewhere."""
    until = time.monotonic() + PATIENCE.deadline
    while time.monotonic() < until:
        report = control.status()
        if report["gauges"]["cells_backed"] * report["cell_bytes"] >= report["l1_bytes"]:
            return
        time.sleep(0.02)
