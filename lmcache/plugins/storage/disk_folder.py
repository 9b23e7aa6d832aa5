"""The folder of a disk tier: names, the lock that keeps a second server out, and what an earlier one left.

    lmcache.lock                     held (flock) by the server whose folder it is; holds its process id
    00/ … ff/                        sub-folders, made when first needed: the first two digits of a key
    ab/ab12…(40 digits)              a blob
    ab/ab12….NUMBER.part             a blob that is being written; removed by the next start

Anything else is somebody else's, and is left alone.
"""

import contextlib
import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

from lmcache.core.tier import KEY_DIGITS
from lmcache.errors import ConfigError
from lmcache.plugins.storage.disk_index import Entry

LOCK = "lmcache.lock"
_PROBE = "lmcache.probe"
_BLOB = re.compile(rf"[0-9a-f]{{{KEY_DIGITS}}}")
_PART = re.compile(rf"[0-9a-f]{{{KEY_DIGITS}}}\.\d+\.part")
_SUB_FOLDERS = tuple(f"{number:02x}" for number in range(256))


class DiskFolder:
    """A folder that exists; ConfigError otherwise."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock_fd = -1
        if not Path(path).is_dir():
            raise ConfigError(f"--l2 disk://{path}: there is no such folder", remedy=f"make it: mkdir -p {path}")

    def lock(self) -> None:
        """Keep others out until `close`. ConfigError when a process holds it, or it cannot be written to."""
        try:
            self._lock_fd = os.open(f"{self.path}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, b"%d\n" % os.getpid(), 0)
        except BlockingIOError as error:
            holder = os.pread(self._lock_fd, 20, 0).decode("ascii", "replace").strip()
            self.close()
            raise ConfigError(
                f"--l2 disk://{self.path}: the server with process id {holder or 'unknown'} has this folder",
                remedy="give each server a folder of its own, or end the other first",
            ) from error
        except OSError as error:
            self.close()
            raise ConfigError(
                f"--l2 disk://{self.path}: the folder cannot be written to: {error.strerror}",
                remedy="give the server's user the right to write there, or choose another folder",
            ) from error

    def close(self) -> None:
        """Let others in. The lock file stays: removing it would let two in at once."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def blob_path(self, key: str) -> str:
        """Where the blob of that key is."""
        return f"{self.path}/{key[:2]}/{key}"

    def part_path(self, key: str, number: int) -> str:
        """Where it is while it is written."""
        return f"{self.path}/{key[:2]}/{key}.{number}.part"

    def scan(self, clean: bool) -> Iterator[Entry]:
        """Every blob. With `clean`, leavings of a server that was killed are removed on the way."""
        for name in _SUB_FOLDERS:
            try:
                entries = os.scandir(f"{self.path}/{name}")
            except (FileNotFoundError, NotADirectoryError):
                continue
            with entries:
                yield from self._scan_one(name, entries, clean)

    @staticmethod
    def _scan_one(name: str, entries: Iterator["os.DirEntry[str]"], clean: bool) -> Iterator[Entry]:
        for each in entries:
            part = not _BLOB.fullmatch(each.name)
            if part and not _PART.fullmatch(each.name):
                continue
            if not each.name.startswith(name) or not each.is_file(follow_symlinks=False):
                continue
            try:
                facts = each.stat(follow_symlinks=False)
            except FileNotFoundError:  # another server's, which has just evicted it
                continue
            # an empty file is what a crash of the host leaves of a blob whose bytes were not yet on the device
            if not part and facts.st_size:
                yield Entry(each.name, facts.st_size, facts.st_mtime)
            elif clean:
                with contextlib.suppress(OSError):
                    os.unlink(each.path)

    def direct_io(self) -> OSError | None:
        """Whether the filesystem lets one write without its page cache; None if it does, else what it says."""
        path = f"{self.path}/{_PROBE}"
        fd = -1
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.pwrite(fd, page, 0)
        except OSError as error:
            return error
        finally:
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
        return None
