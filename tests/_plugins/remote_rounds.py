"""Rounds of kill -9: a process stores blobs in a tier that it shares, until it is killed; then each is whole or absent.

    python tests/_plugins/remote_rounds.py --tier redis --rounds 100 --seed 1       about a minute; also: s3, file

The moment of each kill comes from the seed: so many blobs after the start, and so many microseconds. Another server
then opens the same tier: every blob that was acknowledged must be there, every blob that is there must be read back
whole, with the bytes of one of its stores, and the tier must list blobs of ours only.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from redis_stand import RedisServer
from s3_stand import CREDENTIALS, S3Server

from lmcache.core.blob import BlobIdentity, BlobStore, Loaded
from lmcache.plugins.manager import PluginManager

IDENTITIES = 24
THREADS = 3
TIERS = ("redis", "s3", "file")


@contextmanager
def tier_url(kind: str, folder: Path) -> Iterator[str]:
    """Where blobs go: a real server, or a folder."""
    if kind == "file":
        (folder / "blobs").mkdir()
        yield f"file://{folder}/blobs"
        return
    if kind == "redis":
        server: RedisServer | S3Server = RedisServer(folder)
        url = f"redis://127.0.0.1:{server.port}"
    else:
        server = S3Server(folder)
        for name, secret in CREDENTIALS.items():
            (folder / name).write_text(secret)
        files = "&".join(f"{name}_file={folder / name}" for name in CREDENTIALS)
        url = f"s3://test/rounds?endpoint=http://127.0.0.1:{server.port}&allow_http=on&region=us-east-1&{files}"
    try:
        yield url
    finally:
        server.close()


def opened(url: str) -> BlobStore:
    """The tier as a server opens it."""
    return PluginManager().open_tier(url).blobs


def identity(number: int) -> BlobIdentity:
    return BlobIdentity(b"n" * 16, {"model": "rounds"}, number.to_bytes(16, "big"), 0, 0, "", 256)


def length_of(number: int) -> int:
    """From a page to 2 MiB, some of them no whole pages."""
    return (4096 << number % 10) - (number % 3 == 0) * 17


def payload(number: int, version: int) -> bytes:
    """Its version in clear, then what follows from both."""
    return version.to_bytes(8, "little") + random.Random(f"{number} {version}").randbytes(length_of(number) - 8)


def store_for_ever(url: str, seed: str) -> None:
    """What the process that is killed does: prints a line for each blob that it has stored."""
    blobs = opened(url)
    print("open", flush=True)

    def work(thread: int) -> None:
        source = random.Random(f"{seed} {thread}")
        while True:
            number, version = source.randrange(IDENTITIES), source.randrange(1 << 60)
            blob = memoryview(payload(number, version))
            cut = source.randrange(1, len(blob))
            blobs.store(identity(number), [blob[:cut], blob[cut:]], time.monotonic() + 60)
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()

    for thread in range(THREADS):
        threading.Thread(target=work, args=(thread,)).start()


def round_of(url: str, seed: str) -> Counter[str]:
    """One kill, and what is there afterwards."""
    source = random.Random(seed)
    command = [sys.executable, __file__, "--store", url, "--seed", seed]
    acknowledged: set[int] = set()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "open\n"
        for _ in range(source.randrange(30)):
            line = process.stdout.readline().strip()
            acknowledged.update([int(line)] if line.isdigit() else [])
        time.sleep(source.random() * 0.01)
        process.kill()
        acknowledged.update(int(line) for line in process.stdout.read().split() if line.isdigit())
    return verify(url, acknowledged)


def verify(url: str, acknowledged: set[int]) -> Counter[str]:
    """Read everything back; raises AssertionError for what must not be."""
    blobs = opened(url)
    seen: Counter[str] = Counter()
    try:
        for number in range(IDENTITIES):
            buffer = bytearray(length_of(number))
            answer = blobs.load(identity(number), [memoryview(buffer)], time.monotonic() + 60)
            seen[answer.name] += 1
            assert answer in (Loaded.LOADED, Loaded.ABSENT), f"blob {number} is {answer}"
            assert answer is Loaded.LOADED or number not in acknowledged, f"blob {number} was acknowledged and is lost"
            if answer is Loaded.LOADED:
                assert buffer == payload(number, int.from_bytes(buffer[:8], "little")), f"blob {number} is mixed"
        ours = {blobs.key(identity(number)) for number in range(IDENTITIES)}
        assert {key for key, _ in blobs.tier.keys()} <= ours
    finally:
        blobs.tier.close()
    return seen


def run(kind: str, rounds: int, seed: int, folder: Path, told: Callable[[str], None]) -> None:
    """All rounds, on one server."""
    total: Counter[str] = Counter()
    with tier_url(kind, folder) as url:
        for number in range(rounds):
            total += round_of(url, f"{seed} {number}")
    told(f"{kind}: {rounds} kills, nothing damaged, mixed or lost; blobs read back: {dict(total)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tier", choices=TIERS, default="redis")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--store")
    options = parser.parse_args()
    if options.store:
        store_for_ever(options.store, options.seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(options.tier, options.rounds, int(options.seed), Path(folder), print)


if __name__ == "__main__":
    main()
