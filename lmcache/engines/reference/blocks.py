"""The engine's block pool and its own prefix cache: unused blocks keep what they hold until they are needed."""

from collections.abc import Iterable

from lmcache.core.keys import ChainHash

NULL_BLOCK = 0
"""Stands in block tables for a block that the engine does not hold. It is all zeros, and nobody writes it."""

BlockKey = tuple[int, ChainHash]
"""A KV group, and the tokens up to the end of the block."""


class OutOfBlocks(Exception):
    """Every block is in use."""


class BlockPool:
    """Block ids from 1 on, shared by all groups. Used by the scheduler only."""

    def __init__(self, blocks: int) -> None:
        self._users = [0] * blocks
        self._keys: list[BlockKey | None] = [None] * blocks
        self._cached: dict[BlockKey, int] = {}
        # an ordered set: the block that has been unused for longest comes first, and goes first
        self._unused: dict[int, None] = dict.fromkeys(range(1, blocks))

    @property
    def unused(self) -> int:
        """Blocks that nobody uses, cached or not."""
        return len(self._unused)

    def allocate(self) -> int:
        """A block to write to; whatever it cached is forgotten. Raises OutOfBlocks."""
        for block in self._unused:
            del self._unused[block]
            self._forget(block)
            self._users[block] = 1
            return block
        raise OutOfBlocks

    def find(self, key: BlockKey) -> int:
        """The block that holds what `key` says, or NULL_BLOCK."""
        return self._cached.get(key, NULL_BLOCK)

    def share(self, block: int) -> None:
        """One more request reads this cached block."""
        self._unused.pop(block, None)
        self._users[block] += 1

    def remember(self, key: BlockKey, block: int) -> None:
        """`block` is complete and holds what `key` says; if another one does so already, that one stays to be found."""
        if self._keys[block] is None and self._cached.setdefault(key, block) == block:
            self._keys[block] = key

    def release(self, blocks: Iterable[int]) -> None:
        """A request is done with these blocks; null blocks are ignored."""
        for block in blocks:
            if block != NULL_BLOCK:
                self._users[block] -= 1
                if not self._users[block]:
                    self._unused[block] = None

    def drop_cache(self) -> None:
        """Forget what all blocks hold; blocks in use stay in use."""
        self._cached.clear()
        self._keys = [None] * len(self._keys)

    def _forget(self, block: int) -> None:
        key, self._keys[block] = self._keys[block], None
        if key is not None:
            del self._cached[key]
