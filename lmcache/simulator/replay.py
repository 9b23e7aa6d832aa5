"""One trace, one policy, one capacity: what an engine would have asked, asked of the server's own cache.

Requests come one after the other: what one stores is published before the next looks up, and loads end at once.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import attrs

from lmcache.core.cache import Cache
from lmcache.core.cells import CellAllocator
from lmcache.core.index import Namespace
from lmcache.core.interpreter import collector_off
from lmcache.core.keys import ChainHash
from lmcache.core.policy import EvictionPolicy
from lmcache.simulator.capacity import Capacity
from lmcache.simulator.opt import Opt
from lmcache.simulator.trace import NO_LOOKUP, Event, Trace

OWNER = 1
"""The one engine that there is."""

WATERMARK = 0.8
BATCH = 0.2
"""Watermark eviction: a cache that is 80 % full drops 20 % of what it holds before it takes anything more."""

STEP = 256
"""Events between two reports of progress."""


@attrs.frozen
class Outcome:
    """What a replay came to, in the server's own counters."""

    policy: str
    capacity: Capacity
    tokens_asked: int
    tokens_hit: int
    chunks_evicted: int
    policy_errors: int
    """Calls in which the policy failed: the cache stood in for it."""
    seconds: float
    """CPU time of the replay."""

    @property
    def hit_ratio(self) -> float:
        """Tokens that hit, of those that were asked for."""
        return self.tokens_hit / self.tokens_asked if self.tokens_asked else 0.0


class CountedCells(CellAllocator):
    """As many cells as a real arena, without telling which: there are no bytes to put there."""

    def __init__(self, cells: int) -> None:
        super().__init__(cells)
        self.backed = self._left = cells

    @property
    def free(self) -> int:
        """Cells that can be handed out."""
        return self._left

    @property
    def used(self) -> int:
        """Cells that are handed out."""
        return self.cells - self._left

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` times cell 0, or None when fewer are free."""
        if count > self._left:
            return None
        self._left -= count
        return (0,) * count

    def release(self, cells: Sequence[int]) -> None:
        """Take back what `allocate` gave."""
        self._left += len(cells)


class BatchCache(Cache):
    """A cache that evicts in batches at a watermark, as other systems do. For comparison only."""

    @property
    def room(self) -> int:
        """Cells that may be taken before the watermark is met."""
        return max(0, int(self.allocator.cells * WATERMARK) - self.allocator.used)

    def evict_batch(self) -> None:
        """Evict a fifth of what is there, in the policy's order."""
        cells = self.allocator.free + max(1, int(self.allocator.used * BATCH))
        self.residents.make_room(cells, 1, self.residents.accounts.of(""))


class Replay:
    """A cache, and the engine's side of it."""

    def __init__(self, trace: Trace, cells: int, policy: EvictionPolicy, *, batches: bool = False) -> None:
        """`policy` is this replay's own; `batches` evicts at a watermark instead of exactly what is needed."""
        self._trace = trace
        self._opt = policy if isinstance(policy, Opt) else None
        # a server lets one engine's tickets hold half of L1; a bound that kept to it would be none
        self.cache = (BatchCache if batches else Cache)(CountedCells(cells), policy)
        if self._opt:
            self.cache = Cache(CountedCells(cells), policy, pin_share=1.0)
        self._spaces = [space.fresh(trace.cell_bytes) for space in trace.namespaces]
        for space in self._spaces:
            self.cache.namespaces[space.digest] = space

    def run(self) -> Iterator[int]:
        """Replay the trace; yields now and then how many events have been replayed since."""
        done = 0
        for number, event in enumerate(self._trace.events):
            self.take(number, event)
            done += 1
            if done == STEP:
                yield done
                done = 0
        yield done

    def take(self, number: int, event: Event) -> int:
        """Event `number`: look up, if it does, and store, if it does. Returns the tokens that hit."""
        space = self._spaces[event.namespace]
        if event.at:
            self.cache.advance(event.at)
        if self._opt:
            self._opt.advance(number, event, space)
        hit = 0
        if event.limit != NO_LOOKUP:
            hit = self._look_up(space, event)
        if event.groups and hit < len(event.hashes) * space.chunk_size:
            self._store(space, event)
        return hit

    def _look_up(self, space: Namespace, event: Event) -> int:
        ticket = self.cache.lookup(OWNER, space, event.hashes, event.limit, event.tenant, event.hints)
        if ticket is None:
            return 0
        for rank in range(space.geometry.ranks):
            self.cache.confirm(ticket.id, space, rank)
        return ticket.hit.tokens

    def _store(self, space: Namespace, event: Event) -> None:
        hashes, parent = event.hashes, event.parent
        if parent is not None and parent not in space.nodes:
            # it was there when this was recorded; here an engine has missed it, so that it computes and stores it, too
            before = self._trace.namespaces[event.namespace].chain(parent)
            hashes, parent = [*before, *hashes], None
        if self._opt:
            hashes = hashes[: self._opt.worth_storing(space, hashes, self.cache.allocator.free)]
        for group in event.groups:
            for shard in range(space.geometry.groups[group].shards):
                if isinstance(self.cache, BatchCache):
                    self._reserve_in_batches(self.cache, space, event, parent, hashes, group, shard)
                else:
                    self._reserve(space, event, parent, hashes, group, shard)

    def _reserve(
        self,
        space: Namespace,
        event: Event,
        parent: ChainHash | None,
        hashes: Sequence[ChainHash],
        group: int,
        shard: int,
    ) -> None:
        placed = self.cache.reserve(OWNER, space, event.tenant, parent or b"", hashes, group, shard, event.hints)
        if placed.reservation:
            self.cache.commit(OWNER, placed.reservation)

    def _reserve_in_batches(
        self,
        cache: BatchCache,
        space: Namespace,
        event: Event,
        parent: ChainHash | None,
        hashes: Sequence[ChainHash],
        group: int,
        shard: int,
    ) -> None:
        start = 0
        while start < len(hashes):
            if not cache.room:
                cache.evict_batch()
            room, end = cache.room, start
            while end < len(hashes) and room > 0:
                room -= cache.cells_lacking(space, hashes[end : end + 1], group, shard)
                end += 1
            self._reserve(space, event, parent, hashes[start:end], group, shard)
            parent, start = hashes[end - 1], end


def replay(
    trace: Trace,
    capacity: Capacity,
    policy: EvictionPolicy,
    *,
    batches: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Replay a trace once; `progress` hears of events as they are done."""
    run = Replay(trace, capacity.cells, policy, batches=batches)
    started = time.process_time()
    with collector_off():
        for done in run.run():
            progress(done)
    counters = run.cache.counters
    return Outcome(
        policy.name,
        capacity,
        counters.tokens_asked,
        counters.tokens_hit,
        counters.chunks_evicted,
        counters.policy_errors,
        time.process_time() - started,
    )
