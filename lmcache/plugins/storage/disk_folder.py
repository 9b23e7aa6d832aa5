"""The folder of a disk tier: names, the lock that keeps a second server out, and what an earlier one left.

    lmcache.lock                     held (flock) by the server whose folder it is; holds its process id
    00/ … ff/                        sub-folders, made when first needed: the first two digits of a key
    ab/ab12…(40 digits)              a blob
    ab/ab12….NUMBER.part             a blob that is being written; removed by the next start
    lmcache.index, lmcache.log-…     what there is, for the next start; see `disk_catalogue`

Anything else is somebody else's, and is left alone.
"""

import contextlib
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from lmcache.core.tier import KEY_DIGITS
from lmcache.errors import ConfigError
from lmcache.plugins.storage.disk_catalogue import Catalogue, Remembered
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
        self.catalogue = Catalogue(path)
        self._lock_fd = -1
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError as error:
            raise ConfigError(
                f"--l2 disk://{path}: the folder cannot be opened: {error.strerror}",
                remedy="name a folder"
                if isinstance(error, NotADirectoryError)
                else f"make it (mkdir -p {path}), or give the server's user the right to it",
            ) from error

    def lock(self) -> None:
        """Keep others out until `close`. ConfigError when a process holds it, or it cannot be written to."""
        try:
            # held open to read only, so that an administrator can still make the file system read-only
            self._lock_fd = os.open(f"{self.path}/{LOCK}", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(self.path, LOCK).write_text(f"{os.getpid()}\n")
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

    def scan(self, mine: bool) -> list[Entry]:
        """Every blob, the one to evict first coming first. If the folder is `mine`, what others left is removed.

        What the last one has left word of is believed; other files are looked at. From then on the catalogue is kept.
        """
        remembered = self.catalogue.read() if mine else Remembered()
        entries = self._there(remembered, mine)
        if mine:
            self.catalogue.begin(remembered, entries)
        return entries

    def _there(self, remembered: Remembered, mine: bool) -> list[Entry]:
        known, unsure = remembered.entries, remembered.unsure
        there: set[str] = set()
        new: list[Entry] = []
        for sub_folder in _SUB_FOLDERS:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), _opened(self.path, sub_folder) as fd:
                names = os.listdir(fd)
                there.update(names)
                for name in names:
                    if (name not in known or name in unsure) and name[:2] == sub_folder:
                        _look_at(fd, name, mine, new)
        entries = [entry for entry in known.values() if entry.key in there and entry.key not in unsure]
        return entries + sorted(new, key=lambda entry: entry.used_at)

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


@contextlib.contextmanager
def _opened(path: str, sub_folder: str) -> Iterator[int]:
    """A sub-folder's descriptor: names are looked up from there, not from the root each time."""
    fd = os.open(f"{path}/{sub_folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _look_at(fd: int, name: str, mine: bool, found: list[Entry]) -> None:
    blob = _BLOB.fullmatch(name)
    if not (blob or _PART.fullmatch(name)):
        return
    try:
        facts = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:  # another server's, which has just evicted it
        return
    if not stat.S_ISREG(facts.st_mode):
        return
    # an empty file is what a crash of the host leaves of a blob whose bytes were not yet on the device
    if blob and facts.st_size:
        found.append(Entry(name, facts.st_size, facts.st_mtime))
    elif mine:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=fd)
