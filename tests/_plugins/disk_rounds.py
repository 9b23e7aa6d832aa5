"""Rounds of kill -9: a process stores blobs in a disk tier until it is killed; then every blob is whole or absent.

    python tests/_plugins/disk_rounds.py --rounds 100 --seed 1       about a minute

The moment of each kill comes from the seed: so many blobs after the start, and so many microseconds. The next process
opens the same folder, as the next server would: what it counts must be what the files take, no file but blobs may be
there, and every blob that it says it has must be read back whole, with the bytes of one of its stores.
"""

import argparse
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from lmcache.core.blob import BlobIdentity, BlobStore, Loaded
from lmcache.core.tier import TierLocation
from lmcache.plugins.storage import disk_catalogue
from lmcache.plugins.storage.disk import DiskTier

IDENTITIES = 60
LIMIT = 24 << 20
THREADS = 3
BLOCK = 4096


def open_tier(folder, **options):
    options = {"size_gb": str(LIMIT / 2**30), **options}
    return DiskTier(TierLocation("disk", path=str(folder), options=options))


def identity(number):
    return BlobIdentity(b"n" * 16, {"model": "rounds"}, number.to_bytes(16, "big"), 0, 0, "", 256)


def length_of(number):
    """From a few bytes to 2 MiB; most are whole pages, some are not."""
    pages = 1 << number % 10
    return pages * BLOCK - (number % 3 == 0) * 17


def payload(number, version):
    """Its version in clear, then what follows from both: cheap to make, and no two are alike anywhere."""
    return version.to_bytes(8, "little") + random.Random(f"{number} {version}").randbytes(length_of(number) - 8)


def store_for_ever(folder, seed):
    """What the killed process does: prints a line for each blob that it has stored."""
    disk_catalogue.FEWEST_RECORDS = 12  # so that kills meet new indexes, too
    blobs = BlobStore(open_tier(folder))
    print("open", flush=True)

    def work(thread):
        source = random.Random(f"{seed} {thread}")
        while True:
            number, version = source.randrange(IDENTITIES), source.randrange(1 << 60)
            arena = memoryview(mmap.mmap(-1, 2 << 20))[: length_of(number)]
            arena[:] = payload(number, version)
            blobs.store(identity(number), [arena], time.monotonic() + 60)
            os.write(1, b"stored\n")

    for thread in range(THREADS):
        threading.Thread(target=work, args=(thread,)).start()


def kill_one(folder, seed, round_number):
    """Start a process that stores, and kill it."""
    source = random.Random(f"{seed} {round_number}")
    command = [sys.executable, __file__, "--store", str(folder), "--seed", str(source.random())]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            for _ in range(source.randrange(1, 60)):
                process.stdout.readline()
            time.sleep(source.random() * 0.01)
        finally:
            process.kill()


def check(folder, **options):
    """Open the folder as the next server does; what is wrong with it raises AssertionError. Returns what was there."""
    tier = open_tier(folder, **options)
    try:
        blobs, found = BlobStore(tier), Counter()
        files = [path for path in Path(folder).rglob("*") if path.is_file() and path.parent != Path(folder)]
        assert sorted(path.name for path in files) == sorted(key for key, _ in tier.keys()), "files that are no blobs"
        assert sum(-(-path.stat().st_size // BLOCK) * BLOCK for path in files) == tier.usage().bytes <= LIMIT
        for number in range(IDENTITIES):
            into = memoryview(bytearray(length_of(number)))
            answer = blobs.load(identity(number), [into], time.monotonic() + 60)
            assert answer in (Loaded.LOADED, Loaded.ABSENT), f"blob {number} is {answer}"
            if answer is Loaded.LOADED:
                assert into == payload(number, int.from_bytes(into[:8], "little")), f"blob {number} has wrong bytes"
            found[answer.value] += 1
        return found
    finally:
        tier.close()


def run_rounds(folder, rounds, seed):
    """Kill and check; returns what was found over all rounds."""
    found = Counter()
    for number in range(rounds):
        kill_one(folder, seed, number)
        found["leavings"] += len(list(Path(folder).glob("??/*.part")))
        found += check(folder, direct="auto" if number % 2 else "off")
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--store", metavar="FOLDER", help="be the process that is killed")
    arguments = parser.parse_args()
    if arguments.store:
        store_for_ever(arguments.store, arguments.seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(arguments.rounds, "rounds:", dict(run_rounds(folder, arguments.rounds, arguments.seed)))


if __name__ == "__main__":
    main()
