"""Down: what is committed in L1 goes to the tiers. The server's thread only."""

from collections import deque
from collections.abc import Sequence

from lmcache.core.cache import Cache
from lmcache.core.index import Node
from lmcache.core.tier_in_use import TierInUse
from lmcache.core.tier_url import StorePolicy

MOST_WAITING = 1 << 16
"""Shards that wait to be written to one tier; what comes while so many wait is not."""

KEPT_FREE = 0.05
"""Share of L1 that tiers written on eviction keep free ahead of need."""


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
        while self._waiting and tier.threads.busy < tier.settings.threads and tier.usable():
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
    """Writes what would be evicted next to tiers, and evicts it when they have it, so that some cells are always free.

    A store that needs more than those evicts what has not been written yet: it never waits.
    """

    def __init__(self, cache: Cache, tiers: Sequence[TierInUse]) -> None:
        self._cache = cache
        self._tiers = tiers
        self._leaving: dict[Node, int] = {}
        """Nodes that are being written → calls that have not come back."""
        self._ready = max(1, int(cache.allocator.cells * KEPT_FREE))
        self._due = True
        """Whether something has come or gone since victims were looked for last."""

    def committed(self) -> None:
        """Something is in L1 that was not there before."""
        self._due = True

    def pump(self) -> None:
        """Start to write what has to go for enough cells to be free."""
        allocator = self._cache.allocator
        if not self._due or allocator.backed < allocator.cells or not any(tier.usable() for tier in self._tiers):
            return
        coming = sum(node.cells for node in self._leaving)
        self._due = False
        if allocator.free + coming >= self._ready:
            return
        for node in self._cache.residents.next_victims(self._ready - coming):
            self._begin(node)

    def _begin(self, node: Node) -> None:
        self._cache.hold(node)
        self._leaving[node] = 1
        for tier in self._tiers if not node.expires_some_day else ():
            for slot, packed in enumerate(node.shards):
                lacking = packed is not None and not tier.holds(node, slot)
                if lacking and tier.save(node, slot, lambda: self._written(node)):
                    self._leaving[node] += 1
        self._written(node)

    def _written(self, node: Node) -> None:
        self._leaving[node] -= 1
        if not self._leaving[node]:
            self._due = True
            del self._leaving[node]
            self._cache.let_go(node)
            if node.evictable and node.cells:  # nobody has asked for it meanwhile
                self._cache.residents.evict(node)


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
