"""Down: what is committed in L1 goes to the tiers. The server's thread only."""

from collections import deque
from collections.abc import Callable, Sequence

from lmcache.core.accounts import Account
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
        self._under_way = 0

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
        # one more for each thread, so that none waits for the loop to give it its next
        at_once = 1 if tier.blobs.in_order else 2 * tier.settings.threads
        while self._waiting and self._under_way < at_once and tier.writable():
            node, slot = self._waiting.popleft()
            if node.shards[slot] is None:
                tier.counters.lost += 1
                continue
            self._cache.hold(node)
            self._under_way += 1
            if not tier.save(node, slot, lambda node=node: self._written(node)):  # type: ignore[misc]
                self._written(node)
                self._waiting.appendleft((node, slot))
                return

    def _written(self, node: Node) -> None:
        self._under_way -= 1
        self._cache.let_go(node)


class OnEvict:
    """Writes what would be evicted next to tiers, so that there is always something that can go at once.

    What the tiers do not have yet does not go, unless none of them works: a store that needs more room than is ready is
    placed as far as it fits, and never waits. A tenant that has a quota makes room among its own chunks only, so it has
    something ready of its own from when it has been short.
    """

    def __init__(self, cache: Cache, tiers: Sequence[TierInUse], memory_comes: Callable[[int], bool]) -> None:
        """`memory_comes` says whether so many cells have no memory yet, and it is on its way: nobody need go for it."""
        self._cache = cache
        self._memory_comes = memory_comes
        self._tiers = tiers
        self._leaving: dict[Node, int] = {}
        """Nodes that are being written → calls that have not come back."""
        self._ready = min(MOST_READY, max(1, int(cache.allocator.cells * READY_SHARE)))
        self._due = True
        """Whether something has come or gone since victims were looked for last."""
        self._target = self._ready
        self._targets: dict[Account, int] = {}
        """Cells that tenants with quotas have been short of."""
        self._due_accounts: set[Account] = set()
        """Of those, the ones that something has come or gone of since their victims were looked for last."""
        self.written = 0
        """Chunks that may go since all that was written of them has come back."""
        cache.residents.unsaved = self._unsaved
        cache.on_short = self._short

    def committed(self, node: Node) -> None:
        """Something is in L1 that was not there before."""
        self._due = True
        self._changed(node)
        self._target = max(self._ready, self._target * 3 // 4)

    def _short(self, account: Account | None = None, cells: int = 0) -> None:
        """A store found too little room: what was ready was too little, or its own."""
        self._due = True
        if account is not None and account.quota is not None and account.room < cells:
            self._targets[account] = min(account.quota, max(cells, self._targets.get(account, 0)))
            self._due_accounts.add(account)
        else:
            self._target = min(self._cache.allocator.cells, 2 * self._target)

    def makes_room(self) -> bool:
        """Somebody found too little room: whether something is being written that may go afterwards."""
        if not self._leaving:  # asked again and again until it has: that says nothing new of what should be ready
            self._short()
        self.pump()
        return bool(self._leaving)

    def _unsaved(self, node: Node) -> bool:
        return not node.expires_some_day and any(tier.writable() and self._lacking(tier, node) for tier in self._tiers)

    @staticmethod
    def _lacking(tier: TierInUse, node: Node) -> list[int]:
        """Slots that are committed and not known to be there. What is known from long ago may not be so any more."""
        tier.forget_old(node)
        return [slot for slot, packed in enumerate(node.shards) if packed is not None and not tier.holds(node, slot)]

    def pump(self) -> None:
        """Start to write what has to go for enough cells to be ready."""
        if not self._due or not any(tier.writable() for tier in self._tiers):
            return
        if not self._memory_comes(self._target):
            self._due = False
            self._make_ready(self._target)
        due, self._due_accounts = self._due_accounts, set()
        for account in due:
            if account.empty:
                del self._targets[account]
            else:
                self._make_ready(self._targets[account], account)

    def _changed(self, node: Node) -> None:
        if node.account in self._targets:
            self._due_accounts.add(node.account)

    def _make_ready(self, cells: int, account: Account | None = None) -> None:
        """Start to write what has to go before so many cells can be had, by a tenant of a quota or by any other."""
        coming = sum(node.cells for node in self._leaving if account in (None, node.account))
        for node in self._cache.residents.next_victims(cells - coming, account):
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
            self.written += 1
            self._changed(node)
            del self._leaving[node]
            self._cache.let_go(node)


class Saving:
    """All tiers, each as its settings say."""

    def __init__(self, cache: Cache, tiers: Sequence[TierInUse], memory_comes: Callable[[int], bool]) -> None:
        """`memory_comes` is as of `OnEvict`."""
        self._through = [
            WriteThrough(cache, tier) for tier in tiers if tier.settings.store_policy is StorePolicy.WRITE_THROUGH
        ]
        leaving = [tier for tier in tiers if tier.settings.store_policy is StorePolicy.ON_EVICT]
        self._on_evict = OnEvict(cache, leaving, memory_comes) if leaving else None

    @property
    def waiting(self) -> int:
        """Shards that wait to be written."""
        return sum(each.waiting for each in self._through)

    @property
    def written(self) -> int:
        """How often something has come to be free to go, for it is in the tiers by then."""
        return self._on_evict.written if self._on_evict else 0

    def makes_room(self) -> bool:
        """Called by who finds none: whether something is being written that may go afterwards."""
        return self._on_evict is not None and self._on_evict.makes_room()

    def committed(self, node: Node, slot: int) -> None:
        """A shard is readable. What is to expire stays in L1: no tier would forget it in time."""
        if self._on_evict:
            self._on_evict.committed(node)
        if not node.expires_some_day:
            for each in self._through:
                each.committed(node, slot)

    def kept(self, node: Node) -> None:
        """What was to expire is not to any more, so tiers may have it."""
        for slot, packed in enumerate(node.shards):
            if packed is not None:
                self.committed(node, slot)

    def pump(self) -> None:
        """Start what can be started."""
        for each in self._through:
            each.pump()
        if self._on_evict:
            self._on_evict.pump()
