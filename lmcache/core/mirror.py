"""What a worker on another host has in place of the arena: memory of its own, as large, with the same cell numbers.

So an adapter copies as it would beside the server. Only the cells that are being stored or loaded take memory, from the
first byte until they have travelled, or have been copied out.
"""

import contextlib
import ctypes
import mmap
import threading
from collections import Counter
from collections.abc import Iterable

_MAP_NORESERVE = 0x4000
_MADV_DONTNEED = 4
_MADV_DONTFORK = 10
_libc = ctypes.CDLL(None, use_errno=True)


class Mirror:
    """Stands in for `MappedArena`. Holding and releasing is the carrier's thread's; the rest any thread's."""

    def __init__(self, size: int, cell_bytes: int) -> None:
        self._map: mmap.mmap | None = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self._cell_bytes = cell_bytes
        anchor = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping from being closed
        _libc.madvise(ctypes.c_void_p(self._address), ctypes.c_size_t(size), _MADV_DONTFORK)
        self._held: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def memory(self) -> memoryview:
        """All of it, writable, as bytes."""
        if self._map is None:
            raise ValueError("the mirror is closed")
        return memoryview(self._map)

    @property
    def held_cells(self) -> int:
        """Cells that may have memory."""
        return len(self._held)

    def prefault(self, _: int) -> None:
        """Nothing is to be mapped ahead: the kernel gives memory to what is touched."""

    def hold(self, cells: Iterable[int]) -> None:
        """These are in use, once more."""
        self._held.update(iter(cells))  # of a mapping, its keys

    def release(self, cells: Iterable[int]) -> None:
        """Give back the memory of those that nobody else holds. Their bytes are zero from then on."""
        for cell in cells:
            self._held[cell] -= 1
            if self._held[cell] <= 0:
                del self._held[cell]
                with self._lock:
                    if self._map is not None:
                        start = self._address + cell * self._cell_bytes
                        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(self._cell_bytes), _MADV_DONTNEED)

    def close(self) -> None:
        """Unmap; where a view still exists, when the last one goes. No copy may be in flight."""
        with self._lock:
            mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()

    def forget(self) -> None:
        """In a forked child, where the pages do not exist and no lock can be relied on."""
        mapping, self._map = self._map, None
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()
