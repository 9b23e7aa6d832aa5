"""What a worker on another host has in place of the arena: memory of its own, cut into places as large as cells.

So an adapter copies as it would beside the server. A place stands for one cell of one reservation or of one ticket,
from the first byte until it has travelled, or has been copied out; the server's cell numbers mean nothing here. Places
are used again, the last one first: memory that has been touched before is several times faster than new memory.
"""

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterable

_MAP_NORESERVE = 0x4000
_MADV_DONTNEED = 4
_MADV_DONTFORK = 10
_libc = ctypes.CDLL(None, use_errno=True)

WARM_BYTES = 256 << 20
"""Of places that nobody holds, so many keep their memory for who comes next, until `cool` is called."""


class Mirror:
    """Stands in for `MappedArena`. Taking, giving back and cooling is the carrier's thread's; the rest any thread's."""

    def __init__(self, places: int, cell_bytes: int) -> None:
        """Address space, no memory. Raises OSError or OverflowError where there is none for so much."""
        size = places * cell_bytes
        self._map: mmap.mmap | None = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self._cell_bytes = cell_bytes
        self._places = places
        anchor = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping from being closed
        _libc.madvise(ctypes.c_void_p(self._address), ctypes.c_size_t(size), _MADV_DONTFORK)
        self._fresh = 0  # places below it have been taken at least once
        self._warm: list[int] = []
        self._cold: list[int] = []
        self._most_warm = WARM_BYTES // cell_bytes
        self._lock = threading.Lock()

    @property
    def memory(self) -> memoryview:
        """All of it, writable, as bytes."""
        if self._map is None:
            raise ValueError("the mirror is closed")
        return memoryview(self._map)

    @property
    def held(self) -> int:
        """Places that somebody holds."""
        return self._fresh - len(self._warm) - len(self._cold)

    @property
    def free(self) -> int:
        """Places that can be taken."""
        return self._places - self.held

    @property
    def warm(self) -> int:
        """Places with memory that nobody holds."""
        return len(self._warm)

    def prefault(self, _: int) -> None:
        """Nothing is to be mapped ahead: the kernel gives memory to what is touched."""

    def take(self, count: int) -> list[int] | None:
        """Numbers of so many places, ascending; None where there are not enough. Anything may be in them."""
        if count > self.free:
            return None
        taken: list[int] = []
        for pile in (self._warm, self._cold):
            lying = len(pile) - min(count - len(taken), len(pile))
            taken += pile[lying:]
            del pile[lying:]
        more = count - len(taken)
        taken += range(self._fresh, self._fresh + more)
        self._fresh += more
        return sorted(taken)

    def give(self, places: Iterable[int]) -> None:
        """Nobody uses these any more."""
        for place in places:
            if len(self._warm) < self._most_warm:
                self._warm.append(place)
            else:
                self._discard(place)

    def cool(self) -> None:
        """Give the memory back that nobody holds."""
        for place in self._warm:
            self._discard(place)
        self._warm.clear()

    def _discard(self, place: int) -> None:
        self._cold.append(place)
        with self._lock:
            if self._map is not None:
                start = self._address + place * self._cell_bytes
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
