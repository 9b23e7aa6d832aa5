"""How long a disk tier takes to have its index and its accounting back, however the last one has ended.

    python tests/_plugins/disk_reopen.py --blobs 100000       about half a minute, most of it to make the files

Files are one block long: how long they are makes no difference to how long it takes to find them.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lmcache.core.tier import KEY_DIGITS, TierLocation, TierUsage
from lmcache.plugins.storage.disk import DiskTier

LENGTH = 4096


def key(text):
    """Of the blob of that name."""
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


def opened(folder):
    """A tier that has room for all."""
    return DiskTier(TierLocation("disk", path=str(folder), options={"size_gb": "100"}))


def make_files(folder, count):
    """As a tier leaves them that stored `count` blobs."""
    for number in range(256):
        Path(folder, f"{number:02x}").mkdir()
    for number in range(count):
        name = key(str(number))
        fd = os.open(f"{folder}/{name[:2]}/{name}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(fd, LENGTH)
        os.close(fd)


def reopened(folder):
    """Open and close a tier; returns seconds of wall time and of processor time until it was open, and what it held."""
    wall, cpu = time.perf_counter(), time.process_time()
    tier = opened(folder)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    usage = tier.usage()
    tier.close()
    return *seconds, usage


STORES = """
import sys, time
sys.path[:0] = sys.argv[3:]
from disk_reopen import LENGTH, key, opened
tier = opened(sys.argv[1])
for number in range(int(sys.argv[2])):
    tier.store(key(f"more {number}"), [bytes(LENGTH)], time.monotonic() + 60)
print("stored", flush=True)
time.sleep(60)
"""


def kill_one(folder, count):
    """Have a process open it, store so many more, and die."""
    command = [sys.executable, "-c", STORES, str(folder), str(count), *sys.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "stored\n"
        finally:
            process.kill()


def measure(folder, count):
    """Open it as after a crash of the host, after a kill, after a clean end; the seconds of each, if all was there."""
    make_files(folder, count)
    more = count // 10  # about as many as the log of what has happened since comes to hold
    for how, expected in (
        ("after a crash of the host", count),
        ("after a kill", count + more),
        ("after a clean end", count + more),
    ):
        if how == "after a kill":
            kill_one(folder, more)
        wall, cpu, usage = reopened(folder)
        assert usage == TierUsage(expected, expected * LENGTH, 100 * 2**30), usage
        yield how, wall, cpu


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blobs", type=int, default=100_000)
    count = parser.parse_args().blobs
    with tempfile.TemporaryDirectory() as folder:
        for how, wall, cpu in measure(folder, count):
            print(f"{count} blobs {how}: {wall:.2f} s, of which {cpu:.2f} s on the processor")


if __name__ == "__main__":
    main()
