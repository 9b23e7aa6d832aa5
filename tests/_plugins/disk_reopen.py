"""How long a disk tier takes to have its index and its accounting back, after a clean end and after a kill.

    python tests/_plugins/disk_reopen.py --blobs 100000       about half a minute, most of it to make the files

Files are one block long: how long they are makes no difference to how long it takes to find them.
"""

import argparse
import hashlib
import os
import tempfile
import time
from pathlib import Path

from lmcache.core.tier import KEY_DIGITS, TierLocation, TierUsage
from lmcache.plugins.storage.disk import DiskTier

LENGTH = 4096


def make_files(folder, count):
    """As a tier leaves them that stored `count` blobs."""
    for number in range(256):
        Path(folder, f"{number:02x}").mkdir()
    for number in range(count):
        key = hashlib.sha256(str(number).encode()).hexdigest()[:KEY_DIGITS]
        fd = os.open(f"{folder}/{key[:2]}/{key}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(fd, LENGTH)
        os.close(fd)


def reopened(folder):
    """Open and close a tier; returns seconds of wall time and of processor time until it was open, and what it held."""
    wall, cpu = time.perf_counter(), time.process_time()
    tier = DiskTier(TierLocation("disk", path=str(folder), options={"size_gb": "100"}))
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    usage = tier.usage()
    tier.close()
    return *seconds, usage


def measure(folder, count):
    """Open it as after a kill, then as after a clean end; the seconds of each, and whether all was there."""
    make_files(folder, count)
    right = TierUsage(count, count * LENGTH, 100 * 2**30)
    for how in ("after a kill", "after a clean end"):
        wall, cpu, usage = reopened(folder)
        assert usage == right, usage
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
