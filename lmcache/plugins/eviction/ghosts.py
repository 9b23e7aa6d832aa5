"""Chunks that are cached no more, and are remembered for a while."""

from collections.abc import Hashable
from typing import Any


class _Ghost:
    """A place in the ring of ghosts, from old to new."""

    __slots__ = ("key", "newer", "note", "older")

    key: Hashable
    note: Any
    newer: "_Ghost"
    older: "_Ghost"


class Ghosts:
    """Keys of removed nodes, each with a note; the one that was added first is forgotten first.

    Holds no node. Every operation costs the same at any number of ghosts, wherever they leave the line: a ring, closed
    by a ghost without a key, as in `NodeQueue`.
    """

    __slots__ = ("_end", "_ghosts")

    def __init__(self) -> None:
        self._ghosts: dict[Hashable, _Ghost] = {}
        self._end = end = _Ghost()
        end.older = end.newer = end

    def __len__(self) -> int:
        return len(self._ghosts)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._ghosts

    def add(self, key: Hashable, note: Any = None) -> None:
        """Remember `key`, as the last that will be forgotten."""
        self.pop(key)
        end = self._end
        ghost = self._ghosts[key] = _Ghost()
        ghost.key, ghost.note = key, note
        ghost.older, ghost.newer = end.older, end
        end.older.newer = ghost
        end.older = ghost

    def pop(self, key: Hashable) -> Any:
        """Forget `key`, and return its note; None when it was not remembered."""
        ghost = self._ghosts.pop(key, None)
        if ghost is None:
            return None
        ghost.older.newer = ghost.newer
        ghost.newer.older = ghost.older
        return ghost.note

    def pop_oldest(self) -> Any:
        """Forget the key that was added first, and return its note. There must be one."""
        return self.pop(self._end.newer.key)

    def trim(self, most: int) -> None:
        """Forget the oldest until at most `most` are left."""
        while len(self._ghosts) > max(0, most):
            self.pop_oldest()
