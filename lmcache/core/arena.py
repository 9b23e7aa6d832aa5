"""The segment that holds L1: an anonymous memory file that server and engines map, backed slab by slab.

The file has no name: it is passed as a descriptor over the Unix socket, cannot be opened by anybody else, and is gone
with the last process that maps it, `kill -9` included. Its size is sealed. Sources: memfd_create(2), madvise(2).
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from lmcache.core.memory import available_memory
from lmcache.core.numa import Placement

SLAB_BYTES = 64 << 20
"""Backed at a time: large enough to amortise the call, small enough that a start waits 0.1 s for its first."""

_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW: a peer's ftruncate would be everybody's SIGBUS
_F_ADD_SEALS = 1033
_MAP_NORESERVE = 0x4000
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


def create_segment(size: int, huge_page_bytes: int = 0) -> int:
    """A sealed memory file of `size` bytes, none of them backed yet. The caller closes the descriptor.

    With `huge_page_bytes` it is made of the host's huge pages of that size, of which `size` is a multiple.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_page_bytes:
        flags |= os.MFD_HUGETLB | (huge_page_bytes.bit_length() - 1) << os.MFD_HUGE_SHIFT
    descriptor = os.memfd_create("lmcache-l1", flags)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Mapping:
    """One process's view of the segment. `memory` may be written only where the server has backed it."""

    def __init__(self, descriptor: int, size: int, *, reserve: bool = False) -> None:
        """With `reserve`, huge pages for all of it are set aside now, if there are as many; `reserved` tells.

        Else, and in other processes, pages are taken from the pool as they are backed. Ordinary memory is never
        reserved.
        """
        self.size = size
        self.reserved = False
        """Whether backing the segment cannot fail for want of huge pages."""
        self._map: mmap.mmap | None = None
        if reserve:
            with contextlib.suppress(OSError):
                self._map = mmap.mmap(descriptor, size)
                self.reserved = True
        if self._map is None:
            self._map = mmap.mmap(descriptor, size, mmap.MAP_SHARED | _MAP_NORESERVE)
        anchor = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping from being closed
        # a child of an engine must neither write here nor keep the pages alive
        _libc.madvise(ctypes.c_void_p(self._address), ctypes.c_size_t(size), _MADV_DONTFORK)
        # only advice, for ordinary memory: most hosts offer it no huge pages, and nothing depends on them
        _libc.madvise(ctypes.c_void_p(self._address), ctypes.c_size_t(size), _MADV_HUGEPAGE)

    @property
    def address(self) -> int:
        """Where this process has the segment."""
        return self._address

    @property
    def memory(self) -> memoryview:
        """The whole segment, writable, as bytes."""
        if self._map is None:
            raise ValueError("the mapping is closed")
        return memoryview(self._map)

    def pieces(self, cell_bytes: int, cells: Sequence[int], length: int) -> list[memoryview]:
        """The first `length` bytes of these cells, cells that are neighbours in one piece."""
        memory = self.memory
        pieces: list[memoryview] = []
        start = stop = -1
        for cell in cells:
            if cell * cell_bytes != stop:
                if stop > start:
                    pieces.append(memory[start:stop])
                start = stop = cell * cell_bytes
            taken = min(length, cell_bytes)
            stop, length = stop + taken, length - taken
        return [*pieces, memory[start:stop]] if stop > start else pieces

    def populate(self, start: int, stop: int) -> None:
        """Map every page of [start, stop) now, allocating what has none. Releases the GIL. Raises OSError."""
        # ctypes and not mmap.madvise, which holds the GIL for a second a gigabyte
        if _libc.madvise(ctypes.c_void_p(self._address + start), ctypes.c_size_t(stop - start), _MADV_POPULATE_WRITE):
            error = ctypes.get_errno()
            raise OSError(error, f"cannot back arena bytes {start} to {stop}: {os.strerror(error)}")

    def close(self) -> None:
        """Unmap; where a view still exists, when the last one goes. No copy may be in flight."""
        mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a view exists: the mapping goes with the last reference
                mapping.close()


class ArenaAttendant(Protocol):
    """Who is told which bytes of a worker's mapping exist: an accelerator that wants them locked. Raises nothing."""

    def mapped(self, address: int, stop: int, size: int) -> None:
        """Bytes 0 to `stop` of the arena of `size` bytes at `address` exist. In a background thread, slab by slab."""

    def unmapping(self, address: int) -> None:
        """The arena at `address` is about to go; no copy is in flight. In the same thread, which then ends."""


class MappedArena:
    """A worker's mapping, and the thread that maps in the background what the server has backed.

    Without it every first copy into a page would fault, at an eighth of the speed.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._mapping = Mapping(descriptor, size)
        self._wanted = self._done = self._told = 0
        self._attendant: ArenaAttendant | None = None
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lmcache-prefault", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads for this process
            self._mapping.close()
            raise

    @property
    def memory(self) -> memoryview:
        """The whole arena, as bytes; only what the server has backed may be touched."""
        return self._mapping.memory

    def prefault(self, backed_bytes: int) -> None:
        """The server has backed the first `backed_bytes` bytes. Never blocks for long."""
        if backed_bytes > self._wanted:
            with self._wake:
                self._wanted = min(backed_bytes, self._mapping.size)
                self._wake.notify()

    def attend(self, attendant: ArenaAttendant) -> None:
        """Tell `attendant` what exists, from the first byte on, and of the end. Others are ignored."""
        with self._wake:
            if self._attendant is None:
                self._attendant = attendant
                self._wake.notify()

    def close(self) -> None:
        """Stop, at the end of the slab in progress, and unmap. No copy may be in flight."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._mapping.close()

    def forget(self) -> None:
        """In a forked child, where neither the thread nor the pages exist: let go of the addresses."""
        self._mapping.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._wanted > self._done or self._untold)
                if self._closing:
                    break
                stop = min(self._wanted, self._done + SLAB_BYTES)
            if self._untold:
                self._tell()
            else:
                # a failure costs speed only: the pages exist, and a copy faults them in
                with contextlib.suppress(OSError):
                    self._mapping.populate(self._done, stop)
                self._done = stop
        if self._attendant is not None:
            self._attendant.unmapping(self._mapping.address)

    @property
    def _untold(self) -> bool:
        return self._attendant is not None and self._told < self._done

    def _tell(self) -> None:
        if self._attendant is not None:
            self._told = min(self._done, self._told + SLAB_BYTES)
            self._attendant.mapped(self._mapping.address, self._told, self._mapping.size)


class Backer:
    """Puts memory behind the segment ahead of need, in I/O threads of the server; the only one that ever does.

    `on_progress` is called in a thread whenever more is backed or backing has stopped; the owner then calls `collect`.
    """

    def __init__(
        self,
        mapping: Mapping,
        workers: int,
        on_progress: Callable[[], None],
        *,
        available: Callable[[], int] | None = None,
        slab_bytes: int | None = None,
        placement: Placement | None = None,
    ) -> None:
        """`available` says how many bytes may be taken now: by default what the host and the container have.

        `placement` says on which NUMA node: by default wherever the kernel puts it.
        """
        self._placement = placement
        self._mapping = mapping
        self._available = available or _available
        self._slab_bytes = slab_bytes or SLAB_BYTES
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="lmcache-io")
        self._workers = workers
        self._on_progress = on_progress
        self._requested = 0  # bytes from 0 that have been submitted
        self._finished: dict[int, int] = {}  # start → stop, of slabs that are backed out of order
        self.backed = 0
        """Bytes from 0 that have memory."""
        self._lock = threading.Lock()

    @property
    def working(self) -> bool:
        """Whether more is on its way."""
        return self.backed < self._requested

    @property
    def complete(self) -> bool:
        """Whether the whole segment has memory."""
        return self.backed == self._mapping.size

    def request(self, bytes_wanted: int) -> bool:
        """Start backing until `bytes_wanted` bytes from 0 have memory, as far as the host has it now.

        False: nothing was started and nothing is on its way, because memory is short or everything is backed.
        """
        wanted = min(bytes_wanted, self._mapping.size)
        with self._lock:
            while self._requested < wanted and self._requested - self.backed < self._workers * self._slab_bytes:
                stop = min(self._requested + self._slab_bytes, self._mapping.size)
                # what is on its way has not been taken yet, so it is counted as well
                if self._available() < stop - self.backed:
                    break
                if self._placement is not None:
                    self._placement.place(self._mapping.address + self._requested, stop - self._requested)
                self._pool.submit(self._back, self._requested, stop)
                self._requested = stop
            return self.working

    def near(self, node: int) -> None:
        """A worker's device is on this NUMA node."""
        if self._placement is not None:
            self._placement.near(node)

    def _back(self, start: int, stop: int) -> None:
        try:
            self._mapping.populate(start, stop)
        except OSError:
            with self._lock:
                self._requested = min(self._requested, start)
        else:
            with self._lock:
                self._finished[start] = stop
                while self.backed in self._finished:
                    self.backed = self._finished.pop(self.backed)
                self._requested = max(self._requested, self.backed)
        self._on_progress()

    def close(self) -> None:
        """Wait for the slabs in progress; start no more."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _available() -> int:
    """Bytes that may be taken now; none while nobody can tell, for want of descriptors, say."""
    try:
        return available_memory().bytes
    except OSError:
        return 0
