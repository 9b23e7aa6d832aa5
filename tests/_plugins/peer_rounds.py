"""Rounds of kill -9 around `peer://`: the other server dies while chunks go there and come from there, or we do.

    python tests/_plugins/peer_rounds.py --rounds 100 --seed 3       about two minutes on a quiet machine

The victim and the moment come from the seed. What is read at any time must be the bytes of that very chunk. After the
death of the other server it is started again on its port, and is found again by the store that has lost it. After ours,
the other server holds nothing for the dead any more, and whatever it says it has can be read back whole.
"""

import argparse
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

from core_stand import CHUNK, ServerProcess, prompt, wait_until
from false_peer import store_at

from lmcache.core.blob import BlobIdentity, BlobStore, Loaded
from lmcache.core.keys import namespace_digest
from lmcache.errors import LMCacheError
from lmcache.geometry.fingerprint import geometry_facts
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

CELL_BYTES = 256 << 10
OBJECT_BYTES = 3 * CELL_BYTES - 4096
GEOMETRY = Geometry((KVGroup(GroupKind.FULL, CHUNK, (OBJECT_BYTES,)),))
"""Three cells a chunk, the last one not full: a kill meets a chunk in the middle."""
FACTS = {"model": "rounds", **geometry_facts(GEOMETRY, CHUNK), "cell_bytes": str(CELL_BYTES)}
PROMPTS, CHUNKS = 12, 6
THREADS = 2
L1 = ("--l1-size-gb", "0.03", "--l1-cell-kb", str(CELL_BYTES >> 10), "--insecure", "--bulk-port", "0")
"""40 chunks of the 72 that there are: stores meet evictions."""


def identities(number: int) -> list[BlobIdentity]:
    """A prompt's chunks, each after the one before."""
    hashes = prompt(number, CHUNKS)
    space = namespace_digest(FACTS)
    return [
        BlobIdentity(space, FACTS, each, 0, 0, "", CHUNK, before, GEOMETRY)
        for each, before in zip(hashes, [b"", *hashes], strict=False)
    ]


def payload(identity: BlobIdentity) -> bytes:
    """The only bytes that this chunk may ever have."""
    return random.Random(identity.chain_hash).randbytes(OBJECT_BYTES)


def use(store: BlobStore, source: random.Random, seen: Counter[str]) -> None:
    """Store one prompt and read another back. Raises AssertionError for bytes that are not what was stored."""
    for each in identities(source.randrange(PROMPTS)):
        written = store.store(each, [memoryview(payload(each))], time.monotonic() + 5)
        seen["stored"] += bool(written)
        if written is None:
            break
    for each in identities(source.randrange(PROMPTS)):
        into = bytearray(OBJECT_BYTES)
        if store.load(each, [memoryview(into)], time.monotonic() + 5) is not Loaded.LOADED:
            break
        assert into == payload(each), f"chunk {each.chain_hash.hex()} is not what was stored"
        seen["loaded"] += 1


def use_until_lost(store: BlobStore, seed: str, seen: Counter[str], steps: threading.Semaphore, faults: Any) -> None:
    source = random.Random(seed)
    try:
        while True:
            use(store, source, seen)
            steps.release()
    except (LMCacheError, OSError):
        seen["calls that were lost"] += 1
    except BaseException as error:  # noqa: BLE001 - whatever it is, the round is told
        faults.append(error)


class Site:
    """The other server, and our store for it, which outlives it."""

    def __init__(self, store: BlobStore, there: ServerProcess) -> None:
        self._store = store
        self.there = there
        self.seen: Counter[str] = Counter()

    def there_dies(self, source: random.Random) -> None:
        """Kill the other server under several threads, start it again, and have it found again."""
        steps, faults = threading.Semaphore(0), []
        threads = [
            threading.Thread(target=use_until_lost, args=(self._store, str(seed), self.seen, steps, faults))
            for seed in [source.random() for _ in range(THREADS)]
        ]
        for thread in threads:
            thread.start()
        for _ in range(source.randrange(1, 6)):
            steps.acquire(timeout=5)
        time.sleep(source.random() * 0.02)
        port = self.there.port
        self.there.kill()
        for thread in threads:
            thread.join()
        assert not faults, faults
        self.there.close()
        self.there = ServerProcess(port, *L1)
        wait_until(self._works)

    def _works(self) -> bool:
        before = self.seen["stored"]
        try:
            use(self._store, random.Random(before), self.seen)
        except (LMCacheError, OSError):
            return False
        return self.seen["stored"] > before

    def we_die(self, source: random.Random) -> None:
        """Kill a process that stores there; the other server drops what it held, and shows nothing torn."""
        command = [sys.executable, __file__, "--use", str(self.there.address), "--seed", str(source.random())]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            for _ in range(source.randrange(1, 6)):
                process.stdout.readline()
            time.sleep(source.random() * 0.02)
            process.kill()
        self.check()

    def check(self) -> None:
        """Nobody but our store is there, it holds nothing, and every chunk that is there is right."""
        names = ("reservations", "tickets", "pinned_nodes", "cells_reserved")
        wait_until(lambda: not any(self.there.status()["gauges"][name] for name in names))
        wait_until(lambda: self.there.status()["gauges"]["clients"] <= 1)
        assert self.there.status()["counters"]["internal_errors"] == 0
        blobs = [each for number in range(PROMPTS) for each in identities(number)]
        there = self._store.contains(blobs, time.monotonic() + 30)
        for each in [blob for blob, found in zip(blobs, there, strict=True) if found]:
            into = bytearray(OBJECT_BYTES)
            assert self._store.load(each, [memoryview(into)], time.monotonic() + 30) is Loaded.LOADED
            assert into == payload(each), f"chunk {each.chain_hash.hex()} is torn"
            self.seen["read back"] += 1


def run_rounds(rounds: int, seed: int) -> Counter[str]:
    """Kill and check; returns what was seen over all rounds."""
    there = ServerProcess(0, *L1)
    with store_at(str(there.address)) as store:
        site = Site(store, there)
        try:
            for number in range(rounds):
                source = random.Random(f"{seed} {number}")
                (site.there_dies, site.we_die)[number % 2](source)
                site.check()
            return site.seen
        finally:
            site.there.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", default="3")
    parser.add_argument("--use")
    options = parser.parse_args()
    if options.use:
        with store_at(options.use) as store:
            source = random.Random(options.seed)
            while True:
                use(store, source, Counter())
                print("used", flush=True)
    print(f"{options.rounds} rounds, seed {options.seed}: {dict(run_rounds(options.rounds, int(options.seed)))}")


if __name__ == "__main__":
    main()
