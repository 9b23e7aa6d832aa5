"""Row 1: pages between engine memory and arena, through a live server, against a memcpy of the same bytes.

One sample is a prompt: reserve, copy every object, commit; then look up, open, copy back, confirm. After each object
the same number of bytes is copied by a memcpy a page between memories of the same kinds, so that both meet the same
noise. The CPU's caches are cold for both: a prompt is larger than they are.

What counts is CPU time, of this thread and of the server together, because a wall clock would count whoever else wants
the cores. On an idle machine the two differ by the time that messages take to wake somebody up: the wall clock's ratio
stands beside.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import TypeVar

import attrs
import numpy as np

from lmcache.bench.figures import Figure, Step, at_least, figure
from lmcache.bench.memory import Bytes, EngineMemory, Integers, PlainCopy
from lmcache.bench.shapes import PageShape
from lmcache.bench.subject import ServerUnderTest, links, one_core
from lmcache.core.keys import HASH_BYTES
from lmcache.core.link import Link
from lmcache.core.protocol import Reserved
from lmcache.engines.copy import Copier
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.geometry.hits import load_spans
from lmcache.geometry.layout import object_layout

T = TypeVar("T")

TARGET = at_least(0.9)

CELL_BYTES = 1 << 20
"""The server's default."""

MEMORY_SECONDS = 120.0
"""The server gets this long to put memory behind its arena."""


@attrs.frozen
class Seconds:
    """Time taken, by two clocks."""

    cpu: float
    wall: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.cpu + other.cpu, self.wall + other.wall)


@attrs.define
class Samples:
    """Times of one direction."""

    objects: list[Seconds] = attrs.Factory(list)
    """Each object, through the copier."""
    plain_objects: list[Seconds] = attrs.Factory(list)
    """The same, by a memcpy a page right after."""
    prompts: list[Seconds] = attrs.Factory(list)
    """Each prompt: its objects, and the messages before and after them, with what those cost the server."""
    plain_prompts: list[Seconds] = attrs.Factory(list)
    """The memcpys of each prompt."""

    def ratios(self) -> list[float]:
        """Speed of each prompt, relative to memcpy."""
        return [plain.cpu / prompt.cpu for plain, prompt in zip(self.plain_prompts, self.prompts, strict=True)]

    def wall_ratios(self) -> list[float]:
        """The same by the wall clock."""
        return [plain.wall / prompt.wall for plain, prompt in zip(self.plain_prompts, self.prompts, strict=True)]

    def copy_ratios(self) -> list[float]:
        """Speed of each object's copy, without messages."""
        return [plain.cpu / copy.cpu for plain, copy in zip(self.plain_objects, self.objects, strict=True)]


class _Watch:
    """Takes the times of one prompt."""

    def __init__(self, server: ServerUnderTest, samples: Samples) -> None:
        self._server, self._samples = server, samples
        self._server_cpu = server.cpu_seconds()
        self._prompt = self._plain = Seconds(0.0, 0.0)

    def messages(self, talk: Callable[[], T]) -> T:
        """Time what is said to the server."""
        cpu, wall = time.thread_time(), time.perf_counter()
        answer = talk()
        self._prompt += Seconds(time.thread_time() - cpu, time.perf_counter() - wall)
        return answer

    def copies(self, copy: Callable[[], None], plain: Callable[[], None]) -> None:
        """Time the copy of one object, then its yardstick."""
        cpu = [time.thread_time()]
        wall = [time.perf_counter()]
        for run in (copy, plain):
            run()
            cpu.append(time.thread_time())
            wall.append(time.perf_counter())
        first, second = (Seconds(cpu[i + 1] - cpu[i], wall[i + 1] - wall[i]) for i in range(2))
        self._samples.objects.append(first)
        self._samples.plain_objects.append(second)
        self._prompt += first
        self._plain += second

    def end(self) -> None:
        """The prompt is done."""
        self._samples.prompts.append(self._prompt + Seconds(self._server.cpu_seconds() - self._server_cpu, 0.0))
        self._samples.plain_prompts.append(self._plain)


def measure_copying(shape: PageShape, prompts: int, prompt_bytes: int, step: Step) -> list[Figure]:
    """Store and load `prompts` prompts of about `prompt_bytes`, and as many with scattered blocks.

    Raises LMCacheError when a byte comes back changed.
    """
    chunks = max(2, prompt_bytes // shape.object_bytes)
    cells = object_layout(shape.group, shape.chunk_size, CELL_BYTES).cells
    # cells of two prompts, one being read while the other goes, and as many for the yardstick
    arena_gib = (4 * chunks * cells + 1) * CELL_BYTES / (1 << 30)
    step(f"{shape}: preparing memory")
    memory = EngineMemory(shape, chunks)
    arguments = ("--l1-size-gb", f"{arena_gib:.6f}", "--chunk-size", str(shape.chunk_size))
    with ServerUnderTest(*arguments) as server, links(server.address, shape.geometry) as (scheduler, worker):
        bench = _Prompts(memory, server, scheduler, worker)
        with one_core():
            step(f"{shape}: warming up")
            bench.warm_up()
            for number in range(prompts):
                step(f"{shape}: prompt {number + 1} of {prompts}")
                bench.run(scattered=False)
                bench.run(scattered=True)
    return [*bench.figures("store"), *bench.figures("load")]


class _Prompts:
    """Stores and loads one prompt after another, and keeps the times."""

    def __init__(self, memory: EngineMemory, server: ServerUnderTest, scheduler: Link, worker: Link) -> None:
        self._memory, self._server, self._scheduler, self._worker = memory, server, scheduler, worker
        self._shape = memory.shape
        layout = object_layout(self._shape.group, self._shape.chunk_size, worker.cell_bytes)
        self._cells_an_object = layout.cells
        self._copier = Copier(memory.pages, layout, worker.cell_bytes)
        # never committed: these cells are the yardstick's until the link ends
        yardstick = [self._cells(self._reserve(self._new_hashes()).cells) for _ in range(2)]
        self._plain = PlainCopy(self._shape, yardstick, worker.cell_bytes)
        self._forget()

    def _forget(self) -> None:
        self._samples = {(what, scattered): Samples() for what in ("store", "load") for scattered in (False, True)}
        self._pages_verified = 0

    def warm_up(self) -> None:
        """Go once around the arena, so that every page of it exists in the server and here; nothing of it counts."""
        for _ in range(2):
            self.run(scattered=True)
        self._forget()

    def run(self, *, scattered: bool) -> None:
        """Store a new prompt, load it, and compare what came back."""
        self._memory.new_prompt(scattered=scattered)
        self._plain.new_prompt()
        hashes = self._new_hashes()
        with self._worker.copying() as mapped:
            arena = np.frombuffer(mapped, np.uint8)
            try:
                self._store(arena, hashes, self._samples["store", scattered])
                self._load(arena, hashes, self._samples["load", scattered])
            finally:
                del arena  # a view that outlives the block would keep the mapping
        pages, verified = self._memory.chunks * self._shape.pages, self._memory.verified_pages()
        if verified != pages:
            raise LMCacheError(f"{pages - verified} of {pages} pages came back changed: that is a bug, not a figure")
        self._pages_verified += verified

    def figures(self, what: str) -> Iterator[Figure]:
        """What the samples of stores or loads amount to."""
        shape = self._shape
        samples, scattered = self._samples[what, False], self._samples[what, True]
        moved = len(samples.objects) + len(scattered.objects)
        yield figure(
            1,
            what,
            str(shape),
            samples.ratios(),
            "× memcpy",
            target=TARGET,
            beside={
                "scattered blocks": median(scattered.ratios()),
                "copying alone": median(samples.copy_ratios()),
                "by the wall clock": median(samples.wall_ratios()),
            },
            counts={
                "objects_moved": moved,
                "object_bytes": shape.object_bytes,
                "bytes_moved": moved * shape.object_bytes,
                "pages_verified": self._pages_verified,
            },
        )
        speeds = [shape.object_bytes / plain.cpu / (1 << 30) for plain in samples.plain_objects]
        yield figure(0, f"memcpy a page, as in {what}", str(shape), speeds, "GiB/s")

    def _store(self, arena: Bytes, hashes: bytes, samples: Samples) -> None:
        watch = _Watch(self._server, samples)
        reserved = watch.messages(lambda: self._reserve(hashes))
        for chunk, cells in enumerate(self._cells(reserved.cells).tolist()):
            copy = partial(self._copier.store, arena, cells, self._memory.stored(chunk))
            watch.copies(copy, partial(self._plain.store, arena, chunk))
        watch.messages(lambda: self._worker.commit(reserved.reservation))
        watch.end()

    def _load(self, arena: Bytes, hashes: bytes, samples: Samples) -> None:
        watch, shape = _Watch(self._server, samples), self._shape
        tokens = self._memory.chunks * shape.chunk_size
        found = watch.messages(lambda: self._scheduler.lookup("bench", hashes, tokens).wait())
        opened = watch.messages(lambda: self._worker.open(found.ticket))
        cells = self._cells(opened.cells[shape.number]).tolist()
        for span in load_spans(shape.group, shape.chunk_size, found.tokens, 0):
            copy = partial(self._copier.load, arena, cells[span.chunk], self._memory.loaded(span.chunk), span.first)
            watch.copies(copy, partial(self._plain.load, arena, span.chunk))
        held = watch.messages(lambda: self._worker.confirm(found.ticket))
        watch.end()
        if not held:
            raise LMCacheError("a ticket did not hold, though nobody else uses the server: that is a bug")

    def _new_hashes(self) -> bytes:
        return os.urandom(HASH_BYTES * self._memory.chunks)

    def _cells(self, packed: bytes) -> Integers:
        """Cells, a row an object."""
        return np.frombuffer(packed, "<u4").astype(np.int64).reshape(-1, self._cells_an_object)

    def _reserve(self, hashes: bytes) -> Reserved:
        """Cells for a whole prompt; memory is put behind a new arena by and by, so at first they may come late."""
        until = time.monotonic() + MEMORY_SECONDS
        while True:
            reserved = self._worker.reserve("bench", b"", hashes, self._shape.number, 0)
            if len(reserved.placed) == self._memory.chunks:
                return reserved
            if reserved.reservation:
                self._worker.abort(reserved.reservation)
            if time.monotonic() > until:
                raise ServerUnavailable("the server got no memory for its arena", remedy="free some, or use --quick")
            time.sleep(0.1)
