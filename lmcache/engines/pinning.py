"""Which bytes of a mapped arena the device can read and write by itself. Imports no torch."""

import logging
from typing import Protocol

from lmcache.core.arena import SLAB_BYTES, ArenaAttendant

log = logging.getLogger(__name__)


class HostLocks(Protocol):
    """How memory of the host is locked for a device."""

    def lock(self, address: int, size: int) -> None:
        """Raises OSError, or RuntimeError as torch does."""

    def unlock(self, address: int) -> None:
        """Raises as `lock` does."""


class Reach(Protocol):
    """Says which part of an arena the device reaches."""

    @property
    def attendant(self) -> ArenaAttendant | None:
        """Who has to be told what of an arena exists, or None."""

    def reaches(self, address: int, stop: int) -> bool:
        """Whether the device may be given bytes 0 to `stop` of the arena at `address`."""


class Everywhere:
    """The CPU, which reaches every byte."""

    attendant = None

    def reaches(self, address: int, stop: int) -> bool:
        """It does."""
        return True


class Pins:
    """Locks arenas slab by slab as they come to exist, off the path of any copy.

    Only whole slabs, and the end of the arena: a page of memory must not be locked twice, and no copy may cross from
    one lock to the next, so they begin at multiples of `SLAB_BYTES`. A byte that is not locked costs speed only: it
    goes through a ring of buffers.
    """

    def __init__(self, locks: HostLocks) -> None:
        self._locks = locks
        self._locked: dict[int, int] = {}  # address of an arena → bytes of it, from 0, that are locked
        self._refused: set[int] = set()
        self._warned = False

    @property
    def attendant(self) -> ArenaAttendant:
        """This."""
        return self

    def reaches(self, address: int, stop: int) -> bool:
        """Whether every byte up to `stop` is locked."""
        return stop <= self._locked.get(address, 0)

    def mapped(self, address: int, stop: int, size: int) -> None:
        """Lock what has come to exist; called by the arena's own thread."""
        while address not in self._refused:
            start = self._locked.get(address, 0)
            end = min(start + SLAB_BYTES, size)
            if end > stop or start == end:
                return
            try:
                self._locks.lock(address + start, end - start)
            except (OSError, RuntimeError) as error:
                self._refused.add(address)
                self._warn(start, size, error)
            else:
                self._locked[address] = end

    def unmapping(self, address: int) -> None:
        """Undo it, before the addresses become somebody else's."""
        self._refused.discard(address)
        for start in range(0, self._locked.pop(address, 0), SLAB_BYTES):
            try:
                self._locks.unlock(address + start)
            except (OSError, RuntimeError) as error:
                log.debug("lmcache: a slab of an arena that goes stays locked: %s", error)

    def _warn(self, locked: int, size: int, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "lmcache: %d of %d MiB of the cache's memory are locked for the device, and no more can be: %s. The "
                "rest is copied through buffers, which is slower. Raise the limit on locked memory of this process "
                "(`ulimit -l unlimited`; for a container `--ulimit memlock=-1`), or give the server a smaller L1",
                locked >> 20,
                size >> 20,
                error,
            )
