"""Row 7: blobs between arena and storage tiers, through a live server, against the same bytes moved plainly.

One sample is a prompt. Stored: committed, until the tier has all of it. Restored: a lookup of a prompt that L1 has
evicted, until the final answer is there; every byte of it was verified by then, and is compared here once more. Beside
each, as many bytes are written and read plainly: the same sizes, threads and flags, on the same device, and from and
into the same memory, for on virtual machines a device may be three times as fast with some of it as with other
(docs/decisions/0031).
"""

import itertools
import os
import time
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from statistics import median

import attrs
import numpy as np

from lmcache.bench.figures import Figure, Step, Target, at_least, figure
from lmcache.bench.memory import Bytes
from lmcache.bench.shapes import PageShape
from lmcache.bench.subject import ServerUnderTest, links
from lmcache.bench.tier_subject import PlainRun, TierSubject, kv_like, page_aligned
from lmcache.core.blob import BlobIdentity
from lmcache.core.blob_format import ALIGNMENT
from lmcache.core.cells import unpack_cells
from lmcache.core.control import Control
from lmcache.core.keys import HASH_BYTES, namespace_digest
from lmcache.core.link import Link
from lmcache.core.protocol import Reserved
from lmcache.errors import LMCacheError
from lmcache.geometry.fingerprint import geometry_facts

TARGET = at_least(0.9)
"""Of a restore from a disk."""

CELL_BYTES = 1 << 20
AGE = 2
"""So many prompts are stored, and as many restored, between the store of a prompt and its restore."""
L1_PROMPTS = AGE
"""So that a prompt is gone from L1 by then. A hit may be half of L1."""
LOOK_SECONDS = 0.005
"""Between two looks at how far a store has come: each look takes the server's time."""
MOST_SECONDS = 120.0
"""A prompt that is not stored by then never will be."""


@attrs.define
class Samples:
    """Of one direction. Seconds for each prompt."""

    server: list[float] = attrs.Factory(list)
    """Until it is done, as the client sees it."""
    calls: list[float] = attrs.Factory(list)
    """In calls of the tier, over all of its threads, headers and checksums included: what the server counts."""
    plain: list[float] = attrs.Factory(list)


def prompt_bytes(quick: bool) -> int:
    """Of a prompt that is stored or restored, about."""
    return (64 if quick else 256) << 20


def most_bytes(quick: bool) -> int:
    """What a tier may come to hold of the bench's."""
    return (AGE + 3) * prompt_bytes(quick) * 9 // 8


def measure_tier(
    subject: TierSubject, plugins: Sequence[str], shape: PageShape, prompts: int, size: int, step: Step
) -> list[Figure]:
    """Store and restore `prompts` prompts of about `size` bytes. Raises LMCacheError when a byte comes back changed."""
    chunks = size // shape.object_bytes
    cells = chunks * -(-shape.object_bytes // CELL_BYTES)
    arguments = (
        *(
            "--l1-size-gb",
            f"{(cells * L1_PROMPTS + 0.5) * CELL_BYTES / (1 << 30):.6f}",
            "--chunk-size",
            str(shape.chunk_size),
        ),
        *("--eviction-policy", "LRU", "--l2", subject.url, "--l2-deadline-s", str(MOST_SECONDS)),
        *(word for name in plugins for word in ("--plugin", name)),
    )
    step(f"{subject}, {shape}: preparing")
    payload = page_aligned(kv_like(shape.object_bytes))
    plain = PlainRun(subject)
    try:
        with (
            ServerUnderTest(*arguments) as server,
            links(server.address, shape.geometry) as (scheduler, worker),
            Control(server.address) as control,
        ):
            run = _TierRun(subject, shape, chunks, payload, scheduler, worker, control)
            try:
                for number in range(-AGE - 1, prompts):
                    step(f"{subject}, {shape}: prompt {max(0, number + 1)} of {prompts}")
                    run.round(plain, counts=number >= 0)
            finally:
                run.clean()
            return list(run.figures())
    finally:
        plain.close()


class _TierRun:
    def __init__(
        self,
        subject: TierSubject,
        shape: PageShape,
        chunks: int,
        payload: Bytes,
        scheduler: Link,
        worker: Link,
        control: Control,
    ) -> None:
        self._subject, self._shape, self._chunks, self._payload = subject, shape, chunks, payload
        self._scheduler, self._worker, self._control = scheduler, worker, control
        self._object_cells = -(-len(payload) // worker.cell_bytes)
        self._prompts: list[bytes] = []
        self._samples = {"store": Samples(), "restore": Samples()}
        self._verified = 0
        self._same_memory = 0

    def round(self, plain: PlainRun, *, counts: bool) -> None:
        """Store one prompt and restore an older one, each with its yardstick."""
        hashes = os.urandom(HASH_BYTES * self._chunks)
        self._prompts.append(hashes)
        reserved = self._fill(hashes)
        store, plain_write = partial(self._store, reserved.reservation), partial(self._plainly, plain.write, reserved)
        self._sample("store", store, plain_write, counts=counts)
        if len(self._prompts) > AGE:
            # what is given back is what L1 hands out next
            room = self._reserve(os.urandom(HASH_BYTES * self._chunks))
            own = self._plainly(partial(plain.read, AGE), room)
            self._worker.abort(room.reservation)
            restore = partial(self._restore, self._prompts[-1 - AGE], set(unpack_cells(room.cells)))
            self._sample("restore", restore, lambda: own, counts=counts)

    def _plainly(self, move: Callable[[Sequence[Sequence[memoryview]]], float], reserved: Reserved) -> float:
        """Seconds that plain calls take for the same memory."""
        size, objects = self._worker.cell_bytes, list(self._cells(reserved.cells))
        lengths = [min(size, len(self._payload) - at) for at in range(0, len(self._payload), size)]
        with self._worker.copying() as memory:
            views = [
                [memory[cell * size : cell * size + length] for cell, length in zip(cells, lengths, strict=True)]
                for cells in objects
            ]
            try:
                return move(views)
            finally:  # one that outlives the block would keep the mapping
                for view in itertools.chain.from_iterable(views):
                    view.release()

    def _sample(self, what: str, served: Callable[[], float], plain: Callable[[], float], *, counts: bool) -> None:
        before = self._counters()
        seconds = served()
        after = self._counters()
        own = plain()
        if counts:
            name = "write_seconds" if what == "store" else "read_seconds"
            samples = self._samples[what]
            samples.server.append(seconds)
            samples.calls.append(after[name] - before[name])
            samples.plain.append(own)

    def _counters(self) -> dict[str, float]:
        [tier] = self._control.status()["tiers"]
        counters: dict[str, float] = tier["counters"]
        return counters

    # ---------------------------------------------------------------------------------------------------- what is timed

    def _store(self, reservation: int) -> float:
        """Seconds from the commit until the tier has it."""
        aim = self._counters()["stored"] + self._chunks
        started = time.perf_counter()
        self._worker.commit(reservation)
        while (counters := self._counters())["stored"] < aim:
            if counters["lost"] or time.perf_counter() - started > MOST_SECONDS:
                raise LMCacheError(f"the tier {self._subject.settings.location} did not take what it was given")
            time.sleep(LOOK_SECONDS)
        return time.perf_counter() - started

    def _restore(self, hashes: bytes, room: Container[int]) -> float:
        """Seconds from the question until the final answer. `room`: the cells that plain calls have used."""
        tokens, loaded = self._chunks * self._shape.chunk_size, self._counters()["loaded"]
        started = time.perf_counter()
        found = self._scheduler.lookup("bench", hashes, tokens).wait()
        seconds = time.perf_counter() - started
        if found.tokens != tokens or self._counters()["loaded"] - loaded != self._chunks:
            raise LMCacheError(f"a restore of {tokens} stored tokens hit {found.tokens}: no figure comes of that")
        self._compare(found.ticket, hashes, room)
        return seconds

    # ------------------------------------------------------------------------------------------------------ around that

    def _fill(self, hashes: bytes) -> Reserved:
        reserved = self._reserve(hashes)
        with self._worker.copying() as memory:
            for number, cells in enumerate(self._cells(reserved.cells)):
                self._stamp(hashes, number)
                self._copy(memory, cells, into_arena=True)
        return reserved

    def _reserve(self, hashes: bytes) -> Reserved:
        until = time.monotonic() + MOST_SECONDS
        while True:
            reserved = self._worker.reserve("bench", b"", hashes, self._shape.number, 0)
            if len(reserved.placed) == self._chunks:
                return reserved
            # memory is put behind a new arena by and by
            if reserved.reservation:
                self._worker.abort(reserved.reservation)
            if time.monotonic() > until:
                raise LMCacheError("the server got no memory for its arena", remedy="free some, or use --quick")
            time.sleep(0.1)

    def _compare(self, ticket: int, hashes: bytes, room: Container[int]) -> None:
        opened = self._worker.open(ticket)
        with self._worker.copying() as memory:
            for number, cells in enumerate(self._cells(opened.cells[self._shape.number])):
                self._stamp(hashes, number)
                if not self._copy(memory, cells, into_arena=False):
                    raise LMCacheError("a blob came back changed: that is a bug, not a figure")
                self._verified += 1
                self._same_memory += sum(cell in room for cell in cells)
        if not self._worker.confirm(ticket):
            raise LMCacheError("a ticket did not hold, though nobody else uses the server: that is a bug")

    def _stamp(self, hashes: bytes, number: int) -> None:
        """No two blobs are the same."""
        own = np.frombuffer(hashes, np.uint8, HASH_BYTES, number * HASH_BYTES)
        self._payload[:HASH_BYTES] = self._payload[-HASH_BYTES:] = own

    def _copy(self, memory: memoryview, cells: Sequence[int], *, into_arena: bool) -> bool:
        size, same = self._worker.cell_bytes, True
        for place, cell in enumerate(cells):
            part = self._payload[place * size : (place + 1) * size]
            view = np.frombuffer(memory, np.uint8, len(part), cell * size)
            if into_arena:
                view[:] = part
            else:
                same = same and bool(np.array_equal(view, part))
            del view  # one that outlives the block would keep the mapping
        return same

    def _cells(self, packed: bytes) -> Iterator[tuple[int, ...]]:
        cells = unpack_cells(packed)
        return (cells[at : at + self._object_cells] for at in range(0, len(cells), self._object_cells))

    def clean(self) -> None:
        """Delete what was stored, where it would stay."""
        if self._subject.shared is None:
            return
        shape, link = self._shape, self._worker
        facts = {"model": "lmcache bench", **geometry_facts(shape.geometry, shape.chunk_size)}
        facts["cell_bytes"] = str(link.cell_bytes)
        space = namespace_digest(facts)
        names = [
            BlobIdentity(space, facts, hashes[at : at + HASH_BYTES], shape.number, 0, "", shape.chunk_size)
            for hashes in self._prompts
            for at in range(0, len(hashes), HASH_BYTES)
        ]
        self._subject.shared.delete(names, time.monotonic() + MOST_SECONDS)

    # ------------------------------------------------------------------------------------------------------- afterwards

    def figures(self) -> Iterator[Figure]:
        """What the samples amount to."""
        size = self._chunks * self._shape.object_bytes
        # threads that have something to do
        busy = min(self._chunks, self._subject.settings.threads)
        where = f"{self._subject}: {self._chunks} × {self._shape.object_bytes / (1 << 20):.3g} MiB"
        for what, plain in (("store", "write"), ("restore", "read")):
            samples = self._samples[what]
            target: Target | None = TARGET if what == "restore" and self._on_disk else None
            yield figure(
                7,
                what,
                where,
                _ratios(samples.plain, samples.server),
                f"× plain {plain}",
                target=target,
                beside={"calls alone": median(_ratios(samples.plain, [each / busy for each in samples.calls]))},
                counts={
                    "prompts": len(samples.server),
                    "blobs": len(samples.server) * self._chunks,
                    "blob_bytes": self._shape.object_bytes + ALIGNMENT,
                    "blobs_compared": self._verified,
                    "cells_in_the_same_memory": self._same_memory,
                },
            )
            yield figure(7, f"{what}, speed", where, [size / each / 2**30 for each in samples.server], "GiB/s")
            speeds = [size / each / 2**30 for each in samples.plain]
            yield figure(0, f"plain {plain}", f"{where}, {self._subject.plain.what}", speeds, "GiB/s")

    @property
    def _on_disk(self) -> bool:
        return self._subject.settings.location.scheme == "disk" and not self._subject.settings.codec


def _ratios(plain: Sequence[float], served: Sequence[float]) -> list[float]:
    """Speeds, relative to plain ones."""
    return [a / b for a, b in zip(plain, served, strict=True)]
