"""Tiers that are made bad under a running server, each on the real thing: file systems, redis, HTTP."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from file_systems import ext4_on_image, tmpfs
from redis_stand import RedisServer
from s3_stand import CREDENTIALS, WaywardServer

from lmcache.core.tier import KEY_DIGITS

SMALL = 4 << 20
"""Bytes of a file system on which prompts of these tests have room, and little more."""


class BadTier:
    """What a server is started with, and how it is made bad and good again."""

    def url(self, **options: str) -> str:
        """For `--l2`."""
        raise NotImplementedError

    def harm(self) -> None:
        """Make it bad."""

    def heal(self) -> None:
        """Make it good; what is lost stays lost."""


class Folder(BadTier):
    """A folder as `disk://`."""

    def __init__(self, path: Path, size_gb: str = "1") -> None:
        self.path = path
        self._size_gb = size_gb

    def url(self, **options: str) -> str:
        return f"disk://{self.path}?" + _query({"size_gb": self._size_gb, **options})

    def blobs(self) -> list[Path]:
        """Files that are blobs."""
        return sorted(path for path in self.path.rglob("*") if len(path.name) == KEY_DIGITS)

    def taken(self) -> int:
        """Bytes that blobs take, as the file system counts them, those that are being written included."""
        files = [path for path in self.path.rglob("*") if path.is_file() and path.parent != self.path]
        return sum(path.stat().st_blocks * 512 for path in files)


class FlippedFiles(Folder):
    """A bit of every blob is another."""

    def harm(self) -> None:
        for path in self.blobs():
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 4]))


class FlippedHeaders(Folder):
    """A bit of every blob's header is another."""

    def harm(self) -> None:
        for path in self.blobs():
            data = bytearray(path.read_bytes())
            data[60] ^= 1
            path.write_bytes(data)


class TruncatedFiles(Folder):
    """Every blob ends too early."""

    def harm(self) -> None:
        for path in self.blobs():
            os.truncate(path, path.stat().st_size - 1)


class EmptyFiles(Folder):
    """Nothing is left of any blob."""

    def harm(self) -> None:
        for path in self.blobs():
            os.truncate(path, 0)


class RenamedFiles(Folder):
    """Every blob has the name of another one."""

    def harm(self) -> None:
        names = self.blobs()
        contents = [path.read_bytes() for path in names]
        for path, content in zip(names, [*contents[1:], contents[0]], strict=True):
            path.write_bytes(content)


class ForeignFiles(Folder):
    """In place of every blob is something that somebody else wrote, as long as it was."""

    def harm(self) -> None:
        for path in self.blobs():
            path.write_bytes(b"not a blob but a letter " * (path.stat().st_size // 24))


class UnlinkedFiles(Folder):
    """Somebody has cleaned up."""

    def harm(self) -> None:
        for path in self.blobs():
            path.unlink()


class FullFileSystem(Folder):
    """Others fill the file system, and there is nothing left of it."""

    def harm(self) -> None:
        with (self.path / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def heal(self) -> None:
        (self.path / "others").unlink()


class ReadOnlyFileSystem(Folder):
    """The file system is read-only."""

    def harm(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", self.path], check=True)

    def heal(self) -> None:
        subprocess.run(["mount", "-o", "remount,rw", self.path], check=True)


class FrozenFileSystem(Folder):
    """Whoever writes waits."""

    def harm(self) -> None:
        subprocess.run(["fsfreeze", "-f", self.path], check=True)

    def heal(self) -> None:
        subprocess.run(["fsfreeze", "-u", self.path], check=False)  # it may have been before


class Redis(BadTier):
    """A redis server."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def url(self, **options: str) -> str:
        return f"redis://127.0.0.1:{self.server.port}?" + _query(options)


class KilledRedis(Redis):
    """It is down."""

    def harm(self) -> None:
        self.server.kill()

    def heal(self) -> None:
        self.server.start()


class PausedRedis(Redis):
    """Its process is stopped: connections are accepted, and nobody answers."""

    def harm(self) -> None:
        self.server.pause()

    def heal(self) -> None:
        self.server.resume()


class RestartedRedis(Redis):
    """It was restarted, and is empty."""

    def harm(self) -> None:
        self.server.kill()
        self.server.start()


class FlushedRedis(Redis):
    """Somebody has flushed it."""

    def harm(self) -> None:
        with self.server.talking() as client:
            client.flushall()


class ForeignRedis(Redis):
    """Somebody else has written to every key."""

    def harm(self) -> None:
        with self.server.talking() as client:
            for key in client.keys("lmcache:*"):
                client.set(key, b"what somebody else wrote")


class OtherTypesInRedis(Redis):
    """Every key holds something that is no string."""

    def harm(self) -> None:
        with self.server.talking() as client:
            for key in client.keys("lmcache:*"):
                client.delete(key)
                client.rpush(key, b"a", b"list")


class FullRedis(Redis):
    """It takes nothing any more."""

    def harm(self) -> None:
        with self.server.talking() as client:
            client.config_set("maxmemory", "1")

    def heal(self) -> None:
        with self.server.talking() as client:
            client.config_set("maxmemory", "0")


class ObjectStore(BadTier):
    """A server that speaks S3, and answers as it likes."""

    def __init__(self, server: WaywardServer, secrets: Path, mood: str | int) -> None:
        self.server = server
        self._mood = mood
        self._files = {f"{name}_file": str(secrets / name) for name in CREDENTIALS}
        for name, secret in CREDENTIALS.items():
            (secrets / name).write_text(secret)

    def url(self, **options: str) -> str:
        known = {"endpoint": self.server.endpoint, "allow_http": "on", "region": "us-east-1", **self._files}
        return "s3://test/kv?" + _query({**known, **options})

    def harm(self) -> None:
        self.server.mood = self._mood

    def heal(self) -> None:
        self.server.mood = "good"
        self.server.released.set()
        self.server.released.clear()


@contextlib.contextmanager
def opened(kind: type[BadTier], folder: Path, mood: str | int = "good") -> Iterator[BadTier]:
    """A tier of that kind; a test that needs a file system of its own is skipped for others than root."""
    with contextlib.ExitStack() as stack:
        if issubclass(kind, Redis):
            server = RedisServer(folder / "redis")
            stack.callback(server.close)
            yield kind(server)
        elif issubclass(kind, ObjectStore):
            wayward = WaywardServer()
            stack.callback(wayward.close)
            yield kind(wayward, folder, mood)
        elif issubclass(kind, FullFileSystem | ReadOnlyFileSystem):
            yield kind(stack.enter_context(tmpfs(folder / "mounted", SMALL)))
        elif issubclass(kind, FrozenFileSystem):
            tier = kind(stack.enter_context(ext4_on_image(folder / "image", folder / "mounted", 64 << 20)))
            stack.callback(tier.heal)
            yield tier
        elif issubclass(kind, Folder):
            (folder / "blobs").mkdir()
            yield kind(folder / "blobs")
        else:
            raise TypeError(kind)


def _query(options: dict[str, str]) -> str:
    return "&".join(f"{name}={value}" for name, value in options.items())
