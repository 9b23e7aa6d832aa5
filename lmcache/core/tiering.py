"""Movement between L1 and the tiers behind it, off the request path.

**Down** (`saving.py`). A tier that is written through gets every shard as soon as it is committed; one that is written
on eviction gets what would go next, ahead of need, so that some cells can always be had at once: a store never waits
for I/O. What such a tier does not have yet is not evicted, unless the tier does not work.

**Up** (`promotion.py`). A lookup that could be longer with what the tiers have is answered "ask again". It looks at the
tiers in order and fetches what the longer hit needs into L1, in chain order and a few shards at a time; the hit is
frozen when all has come, when something cannot be had, or when its time is over. L1 makes room for what is fetched as
for what is stored; where there is none the hit is shorter.

Everything here runs in the server's thread; the I/O is done by each tier's own threads (`tier_threads.py`). A tier that
fails or hangs costs misses: it is left alone for a while (`breaker.py`). Cells that a call may still write to are not
handed to anybody until it has returned.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from lmcache.core.blob import BlobStore
from lmcache.core.cache import Cache
from lmcache.core.l1_only import NOTHING, Answer, Asked, answer
from lmcache.core.promotion import Fetches, Promotion
from lmcache.core.saving import Saving
from lmcache.core.tier_in_use import Arena, ThreadsMaker, TierInUse
from lmcache.core.tier_threads import TierThreads
from lmcache.core.tier_url import TierSettings
from lmcache.geometry.hits import longest_hit

log = logging.getLogger("lmcache.server")

PROMOTED_SHARE = 0.5
"""Share of L1 that all promotions together may go for."""

LOOK_AGAIN_SECONDS = 0.25
"""Lookups that wait for room look for it so often though nothing seems to have happened."""

CLOSE_SECONDS = 10.0
"""Tiers have so long to close, all together."""

DRAIN_SECONDS = 5.0
"""A stopping server lets its tiers finish what they have begun, and what waits, for so long."""


class Tiering:
    """All tiers of one server, in the order in which they are looked at. The server's thread only."""

    def __init__(
        self,
        cache: Cache,
        tiers: Sequence[tuple[BlobStore, TierSettings]] = (),
        arena: Arena | None = None,
        wake: Callable[[], None] = lambda: None,
        deadline_s: float = 10.0,
        min_speedup: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        make_threads: ThreadsMaker = TierThreads,
    ) -> None:
        """`wake` is called from threads of tiers, and should lead to a call of `advance`. Tiers need an `arena`."""
        self._cache = cache
        self.tiers = [
            TierInUse(number, *tier, arena, wake, clock, make_threads) for number, tier in enumerate(tiers) if arena
        ]
        self._clock = clock
        self._deadline_s = deadline_s
        self._min_speedup = min_speedup
        self._saving = Saving(cache, self.tiers, self._memory_is_coming)
        self._room_seen: tuple[int, ...] = ()
        self._look_again = 0.0
        self._fetches = Fetches()
        self.memory_comes: Callable[[int], bool] = _nothing_comes
        """Whether so many cells have no memory yet, and it is on its way. Set by who puts memory behind the arena."""
        self._promotions: dict[int, Promotion] = {}
        """Those that are under way, and those that are over and were not asked for again yet."""
        if self.tiers:
            cache.on_committed = self._saving.committed
            cache.residents.on_kept = self._saving.kept

    # ------------------------------------------------------------------------------------------------------- looking up

    def lookup(self, asked: Asked) -> Answer:
        """The hit in L1, or a promise to look further: never waits."""
        if self._worth_looking(asked):
            promotion = self._promote(asked)
            if not promotion.over:
                return Answer(promotion.id, 0, final=False)
            del self._promotions[promotion.id]
            return answer(promotion.ticket)
        ticket = self._cache.lookup(asked.owner, asked.namespace, asked.hashes, asked.limit, asked.tenant, asked.hints)
        return answer(ticket)

    def poll(self, owner: int, number: int) -> Answer:
        """What has become of a lookup that was to be asked for again. Once it is final, it is forgotten."""
        if self.undecided(owner, number):
            return Answer(number, 0, final=False)
        promotion = self._promotions.get(number)
        if promotion is None or promotion.asked.owner != owner:
            return NOTHING
        del self._promotions[number]
        return answer(promotion.ticket)

    def undecided(self, owner: int, number: int) -> bool:
        """Whether `poll` would answer "ask again"."""
        promotion = self._promotions.get(number)
        return promotion is not None and promotion.asked.owner == owner and not promotion.over

    def _worth_looking(self, asked: Asked) -> bool:
        if not asked.hashes or not any(tier.usable() for tier in self.tiers):
            return False
        space = asked.namespace
        sealed = self._cache.residents.served(list(map(space.nodes.get, asked.hashes)))
        if sealed.count(space.all_sealed) == len(sealed):
            return False  # what L1 answers most often, so without working out a hit that the cache works out again
        now = longest_hit(space.geometry, space.chunk_size, sealed, asked.limit)
        best = longest_hit(space.geometry, space.chunk_size, [-1] * len(sealed), asked.limit)
        return now.tokens < best.tokens

    def _promote(self, asked: Asked) -> Promotion:
        number = self._cache.new_id()
        until = self._clock() + self._deadline_s
        promotion = self._promotions[number] = Promotion(
            *(number, asked, until, self._cache, self.tiers, self._fetches, self._room, self._saving.makes_room),
            memory_comes=self.memory_comes,
            min_speedup=self._min_speedup,
        )
        promotion.begin()
        return promotion

    def _room(self) -> int:
        """Cells that promotions may still go for."""
        promised = sum(each.promised for each in self._promotions.values() if not each.over)
        return int(self._cache.allocator.cells * PROMOTED_SHARE) - promised - self._fetches.left_over

    def drop(self, owner: int, number: int) -> None:
        """Nobody will ask for this lookup again. Others', and unknown ones, are left alone."""
        promotion = self._promotions.get(number)
        if promotion and promotion.asked.owner == owner:
            del self._promotions[number]
            if not promotion.over:
                promotion.give_up()

    def owner_gone(self, owner: int) -> None:
        """The connection that asked has ended."""
        for number in [n for n, promotion in self._promotions.items() if promotion.asked.owner == owner]:
            self.drop(owner, number)

    # ------------------------------------------------------------------------------------------------------------- time

    def advance(self) -> None:
        """Take in what the tiers have done, and start what can be started. Cheap when there is nothing."""
        for tier in self.tiers:
            tier.collect()
        now = self._clock()
        for promotion in list(self._promotions.values()):
            if not promotion.over and now >= promotion.until:
                promotion.freeze()
        self._saving.pump()
        if self._promotions and self._may_have_room(now):
            short = math.inf
            for promotion in list(self._promotions.values()):
                # where there is no room for one, there is none for others that need as much
                if (needed := promotion.next_cells) < short and not promotion.pump():
                    short = needed

    def _memory_is_coming(self, cells: int) -> bool:
        return self.memory_comes(cells)

    def _may_have_room(self, now: float) -> bool:
        """Whether anything has happened that lookups which wait for room may go on for; looking for it takes long."""
        counters = self._cache.counters
        seen = (
            self._cache.allocator.free,
            self._cache.allocator.backed,
            self.memory_comes(1),
            counters.loads_confirmed,
            counters.tickets_dropped,
            counters.chunks_aborted,
            sum(not promotion.over for promotion in self._promotions.values()),
            self._saving.written,
            *(tier.writable() for tier in self.tiers),
        )
        if seen == self._room_seen and now < self._look_again:
            return False
        self._room_seen, self._look_again = seen, now + LOOK_AGAIN_SECONDS
        return True

    @property
    def pause(self) -> float:
        """Seconds after which `advance` should be called, though nothing wakes; infinite if never."""
        if not self.tiers:
            return math.inf
        now = self._clock()
        ends = [promotion.until for promotion in self._promotions.values() if not promotion.over]
        # these look for room now and then
        ends += [self._look_again] if ends else []
        ends += [now + tier.settings.timeout_s for tier in self.tiers if tier.threads.busy]
        # shards wait for a tier that is being left alone
        ends += [now + 1.0] if self._saving.waiting else []
        return max(0.0, min(ends, default=math.inf) - now)

    def close(self) -> None:
        """Drain what is under way, and close the tiers."""
        until = time.monotonic() + DRAIN_SECONDS
        for promotion in self._promotions.values():
            if not promotion.over:
                promotion.give_up()
        while self._saving.waiting and time.monotonic() < until and any(tier.writable() for tier in self.tiers):
            self.advance()
            time.sleep(0.005)
        for tier in self.tiers:
            tier.threads.close(max(0.1, until - time.monotonic()))
            tier.collect()
        self._close_tiers()

    def _close_tiers(self) -> None:
        """Close each, on a thread of its own: one that hangs keeps neither the others nor the process."""
        closing = [
            threading.Thread(target=_close, args=(tier,), name=f"lmcache-close-{tier.number}", daemon=True)
            for tier in self.tiers
        ]
        for thread in closing:
            thread.start()
        until = time.monotonic() + CLOSE_SECONDS
        for thread, tier in zip(closing, self.tiers, strict=True):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning("the tier %s does not close; the server ends without it", tier.name)

    # -------------------------------------------------------------------------------------------------------- reporting

    @property
    def busy(self) -> int:
        """Calls and shards that wait or are under way: `lmcache wait-idle` waits for them."""
        return self._saving.waiting + sum(tier.threads.busy for tier in self.tiers)

    def report(self) -> list[dict[str, Any]]:
        """For `lmcache status`: each tier, what it holds, and what it has done."""
        return [
            {
                "tier": tier.name,
                "store": tier.settings.store_policy.value,
                "codec": tier.settings.codec,
                "usable": tier.usable(),
                "writable": tier.writable(),
                "trouble": tier.trouble,
                "in_flight": tier.threads.busy,
                **attrs.asdict(tier.blobs.tier.usage()),
                "counters": attrs.asdict(tier.counters),
            }
            for tier in self.tiers
        ]


def _close(tier: TierInUse) -> None:
    try:
        tier.blobs.tier.close()
    except Exception:
        log.exception("the tier %s did not close well", tier.name)


def _nothing_comes(_: int) -> bool:
    """Whether memory is on its way, where all cells have it."""
    return False
