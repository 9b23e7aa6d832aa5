"""Which blobs a folder holds, how many bytes they take, and which goes next. Pure bookkeeping: it touches no disk.

Not thread-safe: `DiskTier` holds its lock around every call.
"""

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lmcache.core.policy import EvictionPolicy
from lmcache.errors import ConfigError, TierError

BLOCK = 4096
"""Files are counted in whole blocks of so many bytes, as most filesystems give them out."""


class Entry:
    """A blob in the folder. To the eviction policy it is a chunk node without a parent."""

    __slots__ = ("blocks", "key", "length", "policy_state", "used_at")

    def __init__(self, key: str, length: int, used_at: float) -> None:
        self.key = key
        self.length = length
        self.blocks = -(-length // BLOCK)  # as `blocks_of`, without a call: a hundred thousand are made at a start
        self.used_at = used_at
        """The file's time of modification as far as it is known here: when it was last stored or, roughly, loaded."""
        self.policy_state: Any = None

    @property
    def parent(self) -> None:
        """Nothing is known of chains here."""
        return

    @property
    def depth(self) -> int:
        """Nothing is known of chains here."""
        return 0

    @property
    def tenant(self) -> str:
        """Nothing is known of tenants here."""
        return ""

    @property
    def priority(self) -> int:
        """Nor of what requests said."""
        return 0

    @property
    def cells(self) -> int:
        """Room that it takes, in blocks."""
        return self.blocks


def blocks_of(length: int) -> int:
    """Blocks that a file of `length` bytes takes."""
    return -(-length // BLOCK)


def make_policy(name: str) -> EvictionPolicy:
    """One of lmcache's own eviction policies, case ignored."""
    from lmcache.plugins.sources import BUILT_IN

    known: dict[str, type[EvictionPolicy]] = {}
    for module in BUILT_IN:
        if module.startswith("lmcache.plugins.eviction."):
            for each in importlib.import_module(module).lmcache_register_eviction_policies():
                known[each.name.casefold()] = each
    if name.casefold() not in known:
        names = ", ".join(sorted(each.name for each in known.values()))
        raise ConfigError(f"--l2 disk:// has policy={name}", remedy=f"use one of {names}")
    return known[name.casefold()]()


class DiskIndex:
    """Entries by key, in the order of an eviction policy, within a limit in blocks; None for no limit."""

    def __init__(self, policy: EvictionPolicy, limit: int | None) -> None:
        self.limit = limit
        self.used = 0
        """Blocks of all entries."""
        self.reserved = 0
        """Blocks of files that are being written."""
        self._writing: dict[str, int] = {}
        self._policy = policy
        self._entries: dict[str, Entry] = {}
        if limit is not None:
            policy.resize(limit)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: str) -> Entry | None:
        """The entry of that key."""
        return self._entries.get(key)

    def restore(self, entries: Iterable[Entry]) -> None:
        """Take in what a folder holds, the one to evict first coming first."""
        for entry in entries:
            self._insert(entry)

    def add(self, entry: Entry) -> None:
        """A blob was stored, in place of any other of its key."""
        self.remove(self._entries.get(entry.key))
        self._insert(entry)
        self._policy.touch([entry])

    def _insert(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self.used += entry.blocks
        self._policy.insert(entry)

    def touch(self, entry: Entry) -> None:
        """A blob was read. It may have left meanwhile."""
        if self._entries.get(entry.key) is entry:
            self._policy.touch([entry])

    def touch_all(self, entries: Sequence[Entry]) -> None:
        """Blobs of one prompt were used, its tail first: what comes last goes last."""
        self._policy.touch([entry for entry in entries if self._entries.get(entry.key) is entry])

    def remove(self, entry: Entry | None) -> None:
        """A blob is no longer in the folder. It may have left before."""
        if entry is not None and self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self.used -= entry.blocks
            self._policy.remove(entry)

    def reserve(self, path: str, blocks: int) -> None:
        """A file of so many blocks is about to be written there."""
        self._writing[path] = blocks
        self.reserved += blocks

    def release(self, path: str) -> None:
        """It has become an entry, or nothing. May be said again."""
        self.reserved -= self._writing.pop(path, 0)

    def lacks(self, blocks: int) -> bool:
        """Whether something must go before `blocks` more fit. Raises TierError if they cannot fit at all."""
        if self.limit is None or self.used + self.reserved + blocks <= self.limit:
            return False
        if self.reserved + blocks > self.limit:
            raise TierError(
                f"{blocks * BLOCK} bytes do not fit: the tier may take {self.limit * BLOCK}, of which "
                f"{self.reserved * BLOCK} are being written"
            )
        return True

    def victim(self) -> Entry | None:
        """The entry that goes next; None when there is none."""
        return next(self.by_age(), None)

    def by_age(self) -> Iterator[Entry]:
        """Every entry, the one to evict first coming first."""
        for node in self._policy.victims():
            yield self._entries[str(node.key)]
