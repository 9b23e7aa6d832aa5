"""The file of a recording and the part before it: FILE, and FILE.1 once FILE has been full. Bounded, private, whole.

Lines are written together or not at all: when the disk refuses, what it took of them is cut off again.
"""

import contextlib
import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

from lmcache.errors import ConfigError

MODE = 0o600
"""Whoever may read a recording can find out whether a prompt that he knows was asked."""


class RecordFile:
    """Owned by one recorder. The constructor raises ConfigError, every other method OSError."""

    def __init__(self, path: Path, part_bytes: int, form: int) -> None:
        """Create `path`, or go on with it if it is a recording of format `form`. Each part has `part_bytes` at most."""
        self.path = path
        self._part_bytes = part_bytes
        self._form = form
        self._buffer = bytearray()
        try:
            self._descriptor = _open(path, os.O_CREAT)
        except OSError as error:
            reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or error
            raise ConfigError(
                f"--record {path} cannot be written: {reason}",
                remedy="name a file in a folder of the server's user, on a disk with room",
            ) from error
        try:
            self._size = os.fstat(self._descriptor).st_size
            self._recording, self._part = self._continued() if self._size else (os.urandom(8).hex(), 1)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def header(self) -> dict[str, Any]:
        """What tells this part from others."""
        return {"format": self._form, "recording": self._recording, "part": self._part}

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more belong in this part. A part has one line at least, whatever its size."""
        used = self._size + len(self._buffer)
        return not used or used + size <= self._part_bytes

    def append(self, lines: bytes) -> None:
        """Write whole lines with the next `flush`."""
        self._buffer += lines

    def flush(self) -> None:
        """Write what was appended. When it raises, the file is as it was, and what was appended is forgotten."""
        waiting, self._buffer = memoryview(bytes(self._buffer)), bytearray()
        written = 0
        try:
            while written < len(waiting):
                written += os.write(self._descriptor, waiting[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += written

    def forget(self) -> None:
        """Drop what was appended and not flushed."""
        self._buffer.clear()

    def rotate(self) -> None:
        """Begin the next part: FILE becomes FILE.1, and what FILE.1 was is gone."""
        self.flush()
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.unlink(missing_ok=True)
        descriptor = _open(fresh, os.O_CREAT | os.O_EXCL)
        try:
            with contextlib.suppress(FileNotFoundError):  # somebody took FILE away
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            fresh.replace(self.path)
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self._size, self._part = descriptor, 0, self._part + 1

    def close(self) -> None:
        """Call once."""
        os.close(self._descriptor)

    def _continued(self) -> tuple[str, int]:
        """Which part of which recording the file is, that somebody has begun."""
        first = os.pread(self._descriptor, 4096, 0).partition(b"\n")[0]
        try:
            header = json.loads(first)
            if header["event"] == "recording" and header["format"] == self._form:
                return str(header["recording"]), int(header["part"])
        except (ValueError, KeyError, TypeError):
            pass
        raise ConfigError(
            f"--record {self.path} is there already, and is no recording of this lmcache",
            remedy="name another file, or take that one away",
        )


def _open(path: Path, flags: int) -> int:
    """Open for appending, and keep others from recording to the same file."""
    # no links: a recording goes where its name says. Not blocking: a pipe is refused below, not waited for
    flags |= os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, MODE)
    try:
        _check_plain(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise OSError("another server records to it") from error
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_plain(descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError("it is not a plain file")
