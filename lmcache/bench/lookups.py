"""Row 2: what a lookup of a long prompt costs the server, and how long a scheduler waits for the answer.

The prompts are really stored, through a live server; only their pages are small, because a lookup never touches them.
The server's CPU clock is read before and after each lookup, so the figure holds all that the message costs there:
waking up, reading, deciding, answering.
"""

import os
import random
import time
from statistics import median

import attrs

from lmcache.bench.figures import Figure, Step, at_most, figure, percentile
from lmcache.bench.subject import ServerUnderTest, links, one_core
from lmcache.core.keys import HASH_BYTES
from lmcache.core.link import Link
from lmcache.errors import LMCacheError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

TARGET = at_most(1.0)
"""ms"""

CHUNK_SIZE = 256
CELL_KIB = 4

SETTLE_SECONDS = 0.0005
"""After an answer the server still goes round its loop once: that belongs to the lookup, too."""


@attrs.define
class Samples:
    """Milliseconds."""

    server: list[float] = attrs.Factory(list)
    """CPU of the server, each lookup."""
    waiting: list[float] = attrs.Factory(list)
    """From sending to having the answer, in the client."""
    ending: list[float] = attrs.Factory(list)
    """CPU of the server to end the ticket."""
    smallest: list[float] = attrs.Factory(list)
    """Round trip of a lookup of nothing, on the same link: what a wait cannot be shorter than."""


def measure_lookups(prompts: int, chunks: int, lookups: int, step: Step) -> list[Figure]:
    """Store `prompts` prompts of `chunks` chunks, then look them up in random order, `lookups` times in all."""
    step(f"storing {prompts} prompts of {chunks} chunks")
    # GLM-5.3's groups, with pages so small that an object fits the smallest cell
    geometry = Geometry((KVGroup(GroupKind.FULL, 64, (1024,)), KVGroup(GroupKind.SCRATCH, 0, ())))
    cells = 2 * prompts * chunks  # one for each object, and twice that because tickets may pin half
    memory = ("--l1-size-gb", f"{cells * CELL_KIB / (1 << 20):.6f}", "--l1-cell-kb", str(CELL_KIB))
    with (
        ServerUnderTest(*memory, "--chunk-size", str(CHUNK_SIZE)) as server,
        links(server.address, geometry) as (scheduler, worker),
    ):
        stored = [store_prompt(worker, chunks) for _ in range(prompts)]
        samples = Samples()
        with one_core():
            for number in range(lookups):
                if number % 100 == 0:
                    step(f"lookup {number + 1} of {lookups}")
                _look_up(server, scheduler, random.choice(stored), chunks, samples)  # noqa: S311 - nothing secret
    return _figures(samples, chunks, prompts)


def store_prompt(worker: Link, chunks: int) -> bytes:
    """Have a prompt of so many chunks, of the size of a cell, in L1; returns its hashes."""
    hashes = os.urandom(HASH_BYTES * chunks)
    until = time.monotonic() + 60
    while True:
        reserved = worker.reserve("bench", b"", hashes, 0, 0)
        if reserved.reservation:
            worker.commit(reserved.reservation)
        if len(reserved.placed) == chunks:
            return hashes
        if time.monotonic() > until:
            raise LMCacheError(f"the server placed {len(reserved.placed)} of {chunks} chunks: it gets no memory")
        time.sleep(0.05)


def _look_up(server: ServerUnderTest, scheduler: Link, hashes: bytes, chunks: int, samples: Samples) -> None:
    tokens = chunks * CHUNK_SIZE
    before = server.cpu_seconds()
    started = time.perf_counter()
    found = scheduler.lookup("bench", hashes, tokens).wait()
    samples.waiting.append((time.perf_counter() - started) * 1e3)
    time.sleep(SETTLE_SECONDS)
    between = server.cpu_seconds()
    if found.tokens != tokens:
        raise LMCacheError(f"a lookup of {tokens} stored tokens hit {found.tokens}: that is a bug, not a figure")
    scheduler.drop(found.ticket)
    time.sleep(SETTLE_SECONDS)
    samples.server.append((between - before) * 1e3)
    samples.ending.append((server.cpu_seconds() - between) * 1e3)
    started = time.perf_counter()
    scheduler.lookup("bench", b"", 0).wait()
    samples.smallest.append((time.perf_counter() - started) * 1e3)


def _figures(samples: Samples, chunks: int, prompts: int) -> list[Figure]:
    subject = f"{chunks * CHUNK_SIZE // 1024}k tokens: {chunks} chunks, all hit"
    counts = {"lookups": len(samples.server), "chunks_hit": chunks, "chunks_held": prompts * chunks}
    return [
        figure(
            2,
            "server work",
            subject,
            samples.server,
            "ms",
            target=TARGET,
            beside={"p99": percentile(samples.server, 99), "to end the ticket": median(samples.ending)},
            counts=counts,
        ),
        figure(
            2,
            "wait for the answer",
            subject,
            samples.waiting,
            "ms",
            beside={
                "p99": percentile(samples.waiting, 99),
                "an empty message": median(samples.smallest),
                "its p99": percentile(samples.smallest, 99),
            },
            counts=counts,
        ),
    ]
