"""Down: what is committed in L1 goes to the tiers. The server's thread only."""

from collections import deque
from collections.abc import Sequence

from lmcache.core.cache import Cache
from lmcache.core.index import Node
from lmcache.core.tier_in_use import TierInUse
from lmcache.core.tier_url import StorePolicy

MOST_WAITING = 1 << 16
"""Shards that wait to be written to one tier; what comes while so many wait is not."""

READY_SHARE = 0.1
"""Share of L1 that is free, or can be at once, ahead of need, where tiers are written on eviction."""

MOST_READY = 1024
"""Cells that are made ready ahead, at most: every store looks whether they still are."""


class WriteThrough:
    """Writes what is committed to one tier, in order, as fast as it takes it.

    What waits is not held: L1 may evict it, and it is lost to the tier then.
    """

    def __init__(self, cache: Cache, tier: TierInUse) -> None:
        self._cache = cache
        self._tier = tier
        self._waiting: deque[tuple[Node, int]] = deque()

    @property
    def waiting(self) -> int:
        """Shards that wait for their turn."""
        return len(self._waiting)

    def committed(self, node: Node, slot: int) -> None:
        """A shard is readable."""
        if self._tier.holds(node, slot):
            return
        if len(self._waiting) >= MOST_WAITING:
            self._tier.counters.lost += 1
            return
        self._waiting.append((node, slot))

    def pump(self) -> None:
        """Start what can be started."""
        tier = self._tier
        at_once = 1 if tier.blobs.in_order else tier.settings.threads
        while self._waiting and tier.threads.busy < at_once and tier.usable():
            node, slot = self._waiting.popleft()
            if node.shards[slot] is None:
                tier.counters.lost += 1
                continue
            self._cache.hold(node)
            if not tier.save(node, slot, lambda node=node: self._cache.let_go(node)):  # type: ignore[misc]
                self._cache.let_go(node)
                self._waiting.appendleft((node, slot))
                return


class OnEvict:
    """Writes what would be evicted next to tiers, so that there is always something that can go at once.

    What the tiers do not have yet does not go, unless none of them works: a store that needs more room than is ready is
    placed as far as it fits, and never waits.
    """

    def __init__(self, cache: Cache, tiers: Sequence[TierInUse]) -> None:
        self._cache = cache
        self._tiers = tiers
        self._leaving: dict[Node, int] = {}
        """Nodes that are being written → calls that have not come back."""
        self._ready = min(MOST_READY, max(1, int(cache.allocator.cells * READY_SHARE)))
        self._due = True
        """Whether something has come or gone since victims were looked for last."""
        self._target = self._ready
        cache.residents.unsaved = self._unsaved
        cache.on_short = self._short

    def committed(self) -> None:
        """Something is in L1 that was not there before."""
        self._due = True
        self._target = max(self._ready, self._target * 3 // 4)

    def _short(self) -> None:
        """A store found too little room: what was ready was too little, or its own."""
        self._due = True
        self._target = min(self._cache.allocator.cells, 2 * self._target)

    def makes_room(self) -> bool:
        """Somebody found too little room: whether something is being written that may go afterwards."""
        if not self._leaving:  # asked again and again until it has: that says nothing new of what should be ready
            self._short()
        self.pump()
        return bool(self._leaving)

    def _unsaved(self, node: Node) -> bool:
        return not node.expires_some_day and any(tier.usable() and self._lacking(tier, node) for tier in self._tiers)

    @staticmethod
    def _lacking(tier: TierInUse, node: Node) -> list[int]:
        """Slots that are committed and not known to be there."""
        return [slot for slot, packed in enumerate(node.shards) if packed is not None and not tier.holds(node, slot)]

    def pump(self) -> None:
        """Start to write what has to go for enough cells to be ready."""
        allocator = self._cache.allocator
        if not self._due or allocator.backed < allocator.cells or not any(tier.usable() for tier in self._tiers):
            return
        self._due = False
        coming = sum(node.cells for node in self._leaving)
        for node in self._cache.residents.next_victims(self._target - coming):
            if self._unsaved(node):
                self._begin(node)

    def _begin(self, node: Node) -> None:
        self._cache.hold(node)
        self._leaving[node] = 1
        for tier in self._tiers:
            for slot in self._lacking(tier, node):
                if tier.save(node, slot, lambda: self._written(node)):
                    self._leaving[node] += 1
        self._written(node)

    def _written(self, node: Node) -> None:
        self._leaving[node] -= 1
        if not self._leaving[node]:
            self._due = True
            del self._leaving[node]
            self._cache.let_go(node)


class Saving:
    """All tiers, each as its settings say."""

    def __init__(self, cache: Cache, tiers: Sequence[TierInUse]) -> None:
        self._through = [
            WriteThrough(cache, tier) for tier in tiers if tier.settings.store_policy is StorePolicy.WRITE_THROUGH
        ]
        leaving = [tier for tier in tiers if tier.settings.store_policy is StorePolicy.ON_EVICT]
        self._on_evict = OnEvict(cache, leaving) if leaving else None

    @property
    def waiting(self) -> int:
        """Shards that wait to be written."""
        return sum(each.waiting for each in self._through)

    def makes_room(self) -> bool:
        """Called by who finds none: whether something is being written that may go afterwards."""
        return self._on_evict is not None and self._on_evict.makes_room()

    def committed(self, node: Node, slot: int) -> None:
        """A shard is readable. What is to expire stays in L1: no tier would forget it in time."""
        if self._on_evict:
            self._on_evict.committed()
        if not node.expires_some_day:
            for each in self._through:
                each.committed(node, slot)

    def pump(self) -> None:
        """Start what can be started."""
        for each in self._through:
            each.pump()
        if self._on_evict:
            self._on_evict.pump()
