"""One blob in one file: written and read straight between device and caller's memory where that is possible.

Direct I/O (O_DIRECT) wants addresses, lengths and offsets that are multiples of 4096. A blob's last bytes need not be:
they go through the page cache when written, and through a block of their own when read. Buffers that lie otherwise are
written and read through the page cache as a whole.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence

from lmcache.core.tier import Buffer
from lmcache.errors import TierError

ALIGNMENT = 4096
_MOST_WRITTEN = 64 << 20
"""Bytes of one call: between calls the deadline is looked at."""
_MOST_READ = 4 << 20
"""Bytes of one call: what has been read is verified while it is still in the processor's caches."""
_MOST_BUFFERS = 1024
"""Of one call: IOV_MAX."""


def open_new(path: str, parts: Sequence[Buffer], direct: bool) -> int:
    """Create a file for `parts`; whoever gets the descriptor closes it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(path, flags | (os.O_DIRECT if direct and _aligned(parts) else 0), 0o600)


def write(fd: int, parts: Sequence[Buffer], deadline: float) -> None:
    """Write all of `parts` into a new file that `open_new` opened for them."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    tail = []
    if len(views[-1]) % ALIGNMENT and _is_direct(fd):
        cut = len(views[-1]) // ALIGNMENT * ALIGNMENT
        views[-1:], tail = [views[-1][:cut]] if cut else [], [views[-1][cut:]]
    offset = _write_at(fd, views, 0, deadline)
    if tail:
        _leave_direct(fd)
        _write_at(fd, tail, offset, deadline)


def open_old(path: str, into: Sequence[memoryview], direct: bool) -> int:
    """Open a file to be read into `into`; whoever gets the descriptor closes it."""
    # whatever somebody has put in its place: a link is not followed, and a pipe is not waited for
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags | (os.O_DIRECT if direct and _aligned(into) else 0))


def read(fd: int, into: Sequence[memoryview], deadline: float) -> Iterator[int]:
    """Fill `into` from the file's start, piece by piece.

    Gives the number of bytes that are there by then after each piece but the last, and in the end the file's length,
    which may be more or less than fits.
    """
    length = os.fstat(fd).st_size
    wanted = min(length, sum(map(len, into)))
    views, last, end = [], memoryview(bytearray()), memoryview(b"")
    room = -(-wanted // ALIGNMENT) * ALIGNMENT  # the kernel pins what it is given, and need not pin more
    for buffer in into:
        view = buffer[:room]
        room -= len(view)
        if len(view):
            views.append(view)
    if views and len(views[-1]) % ALIGNMENT and _is_direct(fd):
        cut = len(views[-1]) // ALIGNMENT * ALIGNMENT
        last, end = views[-1][cut:], memoryview(mmap.mmap(-1, ALIGNMENT))
        views[-1:] = [view for view in (views[-1][:cut], end) if len(view)]
    got = 0
    for got in _read_from(fd, views, wanted, deadline):
        if got < wanted - len(last):
            yield got
    last[:] = end[: len(last)]
    yield length if got >= wanted else got


def _write_at(fd: int, views: list[memoryview], offset: int, deadline: float) -> int:
    """Write at `offset`; returns the offset behind."""
    while views:
        _check(deadline)
        written = _direct_first(fd, os.pwritev, _batch(views, _MOST_WRITTEN), offset)
        if not written:
            raise OSError(f"the filesystem took nothing at byte {offset}")
        offset += written
        views = _behind(views, written)
    return offset


def _read_from(fd: int, views: list[memoryview], wanted: int, deadline: float) -> Iterator[int]:
    """Read from the file's start until `wanted` bytes are there or the file ends; gives how many have come by then."""
    got = 0
    while got < wanted:
        _check(deadline)
        read = _direct_first(fd, os.preadv, _batch(views, _MOST_READ), got)
        if not read:  # the file was cut meanwhile
            break
        got += read
        yield got
        views = _behind(views, read)


def _direct_first(fd: int, call: Callable[[int, list[memoryview], int], int], views: list[memoryview], at: int) -> int:
    """Call; should it be direct I/O that is the matter, call again without.

    After a call that was cut short the rest no longer lies as direct I/O wants it. The page cache takes it, or says why
    not.
    """
    try:
        return call(fd, views, at)
    except OSError as error:
        if error.errno != errno.EINVAL or not _is_direct(fd):
            raise
    _leave_direct(fd)
    return call(fd, views, at)


def _leave_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _batch(views: list[memoryview], most: int) -> list[memoryview]:
    """As much of the first views as one call takes, and no more than `most` bytes."""
    batch: list[memoryview] = []
    for view in views[:_MOST_BUFFERS]:
        if not most:
            break
        batch.append(view[:most])
        most -= len(batch[-1])
    return batch


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` behind their first `count` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def _check(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise TierError("the deadline has passed")


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def _aligned(buffers: Sequence[Buffer]) -> bool:
    """Whether all of them can be given to direct I/O, but for the last bytes of the last."""
    for number, buffer in enumerate(buffers):
        if len(buffer) % ALIGNMENT and number < len(buffers) - 1:
            return False
        if isinstance(buffer, bytes) or not len(buffer) or memoryview(buffer).readonly:  # no way to ask for its address
            return False
        if ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % ALIGNMENT:
            return False
    return True
