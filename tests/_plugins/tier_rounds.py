"""Rounds of kill -9: engines store and load through a server with a disk tier until it is killed, and start over.

    python tests/_plugins/tier_rounds.py --rounds 100 --seed 7       about five minutes on a quiet machine

The moment of each kill comes from the seed: so many prompts after the start, and so many microseconds. The next server
opens the same folder. What it counts must be what the files take, no file but blobs may be there, each under a key that
an engine could ask for; every prompt must hit exactly as far as the files reach, and every byte of every hit is
compared. L1 and the folder are too small for all prompts, so that kills meet evictions and promotions, too.
"""

import argparse
import logging
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from core_stand import CELL, CHUNK, PATIENCE_S, ServerProcess, prompt, wait_until
from tier_stand import TinyEngine

from lmcache.core.blob import BlobIdentity
from lmcache.core.control import Control
from lmcache.core.keys import ChainHash, namespace_digest
from lmcache.errors import LMCacheError
from lmcache.geometry.fingerprint import geometry_facts
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.geometry.hits import longest_hit

HYBRID = Geometry(
    (
        KVGroup(GroupKind.FULL, CHUNK, (CELL, 100), shards=2),
        KVGroup(GroupKind.SLIDING_WINDOW, CHUNK // 2, (1000, 1000), window=CHUNK + 3, shards=1),
        KVGroup(GroupKind.SCRATCH, 0, ()),
    ),
    ranks=2,
)
LARGE = Geometry((KVGroup(GroupKind.FULL, CHUNK, (32 * CELL,)),))
"""A blob takes so long to write that kills meet it."""
PROMPTS = 32
LIMIT = 12 << 20
L1_GB = "0.006"
"""1,572 cells; the longest prompt takes 640 of them."""
BLOCK = 4096
CELL_BYTES = 4 << 10
VARIANTS = ("", "&direct=off", "&store=on-evict", "&direct=off&threads=1")
"""Of the tier, in turns."""


def hashes_of(number: int) -> list[ChainHash]:
    """From one chunk to 20; those of a prompt and of the next one have half of them in common."""
    own = prompt(number, 1 + number * 7 % 20)
    common = prompt(number - number % 2, 8)
    return [*common[: len(own) // 2], *own[len(own) // 2 :]]


class Site:
    """A folder, the server over it that is alive now, and engines that find each of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: Counter[str] = Counter()
        self.server = self._start("", 0)
        self.engines = [TinyEngine(self.server.address, LARGE, "large"), TinyEngine(self.server.address, HYBRID)]
        self._keys = {
            (engine.model, chain_hash, group, shard): self._key(engine, chain_hash, group, shard)
            for engine in self.engines
            for number in range(PROMPTS)
            for chain_hash in hashes_of(number)
            for group in engine.geometry.cached_groups
            for shard in range(engine.geometry.groups[group].shards)
        }

    def _start(self, variant: str, port: int) -> ServerProcess:
        # patient: a machine that stands still for seconds must not look like a disk that does
        tier = f"disk://{self.folder}?size_gb={LIMIT / 2**30:.9f}&timeout_s=60{variant}"
        return ServerProcess(port, "--l1-size-gb", L1_GB, "--l2", tier)

    def _key(self, engine: TinyEngine, chain_hash: ChainHash, group: int, shard: int) -> str:
        facts = {"model": engine.model, **geometry_facts(engine.geometry, CHUNK), "cell_bytes": str(CELL_BYTES)}
        return BlobIdentity(namespace_digest(facts), facts, chain_hash, group, shard, "", CHUNK).key

    def work_until_killed(self, source: random.Random) -> None:
        """Store and load from one thread an engine, and kill the server meanwhile."""
        done, faults = threading.Semaphore(0), []
        seeds = [source.random() for _ in self.engines]
        threads = [
            threading.Thread(target=self._work, args=(engine, seed, done, faults))
            for engine, seed in zip(self.engines, seeds, strict=True)
        ]
        for engine in self.engines:
            engine.patient = False  # the next server comes when all have noticed that this one has gone
        for thread in threads:
            thread.start()
        for _ in range(source.randrange(1, 40)):
            done.acquire(timeout=1)
        time.sleep(source.random() * 0.01)
        self.server.kill()
        for thread in threads:
            thread.join()
        for engine in self.engines:
            engine.patient = True
        assert not faults, faults

    def _work(self, engine: TinyEngine, seed: float, done: threading.Semaphore, faults: list[BaseException]) -> None:
        source = random.Random(seed)
        try:
            while True:
                hashes = hashes_of(source.randrange(PROMPTS))
                if engine.hit(hashes) < len(hashes):
                    engine.store(hashes)
                done.release()
        except LMCacheError:
            pass  # the server is dead
        except BaseException as error:  # noqa: BLE001 - whatever it is, the round is told
            faults.append(error)

    def restart(self, variant: str) -> None:
        """Put the next server in place of the dead one."""
        self.found["leavings"] += len(list(self.folder.glob("??/*.part")))
        port = self.server.port
        self.server.close()
        self.server = self._start(variant, port)
        for engine in self.engines:
            wait_until(lambda engine=engine: epochs(engine) == {self.server.epoch})

    def check(self) -> None:
        """AssertionError if anything in the folder, in the tier's accounts, or in a hit is not as it should be."""
        files = {path.name: path for path in self.folder.rglob("*") if path.is_file() and path.parent != self.folder}
        assert set(files) <= set(self._keys.values()), "files that nobody could ask for"
        tier = self.tier()
        taken = sum(-(-path.stat().st_size // BLOCK) * BLOCK for path in files.values())
        assert (tier["blobs"], tier["bytes"]) == (len(files), taken)
        assert taken <= LIMIT
        for engine in self.engines:
            for number in range(PROMPTS):
                hashes = hashes_of(number)
                hit = engine.hit(hashes)
                assert hit == self._reach(engine, hashes, files), f"{engine.model} {number}"
                self.found["chunks hit"] += hit
        with Control(self.server.address, PATIENCE_S) as control:
            control.wait_idle()
        gauges = self.server.status()["gauges"]
        assert [gauges[name] for name in ("tickets", "reservations", "cells_reserved", "pinned_nodes")] == [0] * 4
        counters = self.tier()["counters"]
        assert [counters[name] for name in ("damaged", "foreign", "absent", "errors", "timeouts")] == [0] * 5
        self.found["blobs"] += len(files)
        self.found["full folders"] += taken > 0.95 * LIMIT
        self.found["loaded"] += counters["loaded"]

    def _reach(self, engine: TinyEngine, hashes: Sequence[ChainHash], files: dict[str, Path]) -> int:
        """Chunks that a hit covers with these files."""
        geometry = engine.geometry
        sealed = [
            sum(
                1 << group
                for group in geometry.cached_groups
                if all(
                    self._keys[engine.model, chain_hash, group, shard] in files
                    for shard in range(geometry.groups[group].shards)
                )
            )
            for chain_hash in hashes
        ]
        return longest_hit(geometry, CHUNK, sealed, CHUNK * len(hashes)).tokens // CHUNK

    def tier(self) -> dict[str, object]:
        [report] = self.server.status()["tiers"]
        return report

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.server.close()


def epochs(engine: TinyEngine) -> set[str]:
    """Of the servers that the engine's clients are registered at."""
    try:
        return {engine.link().epoch, *(engine.worker(rank).epoch for rank in range(engine.geometry.ranks))}
    except LMCacheError:
        return set()


def run_rounds(folder: Path, rounds: int, seed: int) -> Counter[str]:
    """Kill and check; returns what was found over all rounds."""
    site = Site(folder)
    try:
        for number in range(rounds):
            site.work_until_killed(random.Random(f"{seed} {number}"))
            site.restart(VARIANTS[number % len(VARIANTS)])
            site.check()
        return site.found
    finally:
        site.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    logging.getLogger("lmcache").setLevel(logging.ERROR)  # that servers go is what this is about
    with tempfile.TemporaryDirectory() as folder:
        found = run_rounds(Path(folder), arguments.rounds, arguments.seed)
    print(f"{arguments.rounds} rounds, seed {arguments.seed}: {dict(found)}")


if __name__ == "__main__":
    main()
