"""Row 9: lookups of prompts that are in L1, on a server whose tier hangs, and on one that has no tier, in turns.

All that is stored is on its way to the tier and never gets there, and a lookup of something unknown waits for it.
"""

import contextlib
import os
import time
from statistics import median

from lmcache.bench.figures import Figure, Step, figure, percentile
from lmcache.bench.lookups import CELL_KIB, CHUNK_SIZE, store_prompt
from lmcache.bench.subject import ServerUnderTest, links, one_core
from lmcache.core.keys import HASH_BYTES
from lmcache.core.link import Link
from lmcache.errors import LMCacheError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

CHUNKS = 128
PROMPTS = 4
HANGS = ("--plugin", "lmcache.bench.hanging", "--l2", "hanging://?timeout_s=3600", "--l2-deadline-s", "3600")


def measure_lookups_beside_hanging(lookups: int, step: Step) -> list[Figure]:
    """Look up `lookups` times on either server. Raises LMCacheError when one does not hit all."""
    step("lookups beside a tier that hangs")
    geometry = Geometry((KVGroup(GroupKind.FULL, 64, (1024,)),))
    memory = ("--l1-size-gb", f"{2 * PROMPTS * CHUNKS * CELL_KIB / (1 << 20):.6f}", "--l1-cell-kb", str(CELL_KIB))
    waits: tuple[list[float], list[float]] = [], []
    with contextlib.ExitStack() as stack:
        sides = []
        for flags in (HANGS, ()):
            server = stack.enter_context(ServerUnderTest(*memory, "--chunk-size", str(CHUNK_SIZE), *flags))
            scheduler, worker = stack.enter_context(links(server.address, geometry))
            sides.append((scheduler, [store_prompt(worker, CHUNKS) for _ in range(PROMPTS)]))
        hanging = sides[0][0]
        unknown = hanging.lookup("bench", os.urandom(HASH_BYTES * CHUNKS), CHUNKS * CHUNK_SIZE)
        with one_core():
            for number in range(lookups):
                for (scheduler, prompts), taken in zip(sides, waits, strict=True):
                    taken.append(_look_up(scheduler, prompts[number % PROMPTS]))
        if unknown.poll() is not None:
            raise LMCacheError("a lookup that waits for a hanging tier was answered: nothing hung, so no figure")
    beside, alone = waits
    return [
        figure(
            9,
            "wait for the answer",
            f"{CHUNKS} chunks, all hit",
            beside,
            "ms",
            beside={"p99": percentile(beside, 99), "without a tier": median(alone), "its p99": percentile(alone, 99)},
            counts={"lookups": lookups, "chunks_hit": CHUNKS},
        )
    ]


def _look_up(scheduler: Link, hashes: bytes) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    found = scheduler.lookup("bench", hashes, CHUNKS * CHUNK_SIZE).wait()
    taken = (time.perf_counter() - started) * 1e3
    scheduler.drop(found.ticket)
    if found.tokens != CHUNKS * CHUNK_SIZE:
        raise LMCacheError(f"a lookup of {CHUNKS} stored chunks hit {found.tokens} tokens: that is a bug, not a figure")
    return taken
