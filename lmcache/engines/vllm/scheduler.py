"""The scheduler's half: looks prompts up, decides what is loaded and what is stored. Imports neither vLLM nor torch.

One request goes through this:

    Askable ──▶ Asked ──▶ Held ──▶ loading ──▶ Settled
       ▲          │         │                     │
       │          └─────────┴── miss, deadline, no server, hit not used, load failed ──▶ Settled
       └── preempted: it will be looked up again, with what it has generated

Nothing here waits for longer than `PATIENCE_S` a step. An answer that does not come is a miss; a ticket that is not
used is dropped; a request whose load failed is never looked up again, for vLLM asks again at once and would load the
same thing for ever.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import attrs

from lmcache.engines.abandoned import AbandonedLookups
from lmcache.engines.storing import StoreOrder
from lmcache.engines.vllm.content import EngineRequest, NeverCached, content_of
from lmcache.engines.vllm.lora import LoraBook
from lmcache.engines.vllm.offering import Offering, Snapshot
from lmcache.engines.vllm.orders import LoadOrder, StepOrders
from lmcache.engines.vllm.speed import PrefillSpeed
from lmcache.engines.vllm.tracked import (
    Askable,
    Asked,
    BlockTable,
    Held,
    SchedulerClient,
    Settled,
    Tracked,
)
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.geometry.groups import Geometry
from lmcache.geometry.hits import longest_hit

log = logging.getLogger(__name__)

PATIENCE_S = 0.001
"""Seconds that a step waits for answers, all together, and each lookup once: without them every request that arrives,
hit or miss, would lose a step to a question that is answered in less. A server that hangs costs no more than this."""

NO_SNAPSHOTS: Mapping[str, Sequence[Snapshot]] = MappingProxyType({})


class SchedulerSide:
    """All requests of one engine. Every method is called by vLLM's scheduler thread."""

    def __init__(
        self,
        client: SchedulerClient,
        geometry: Geometry,
        offering: Offering | None = None,
        *,
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        """`loads` and `stores` follow vLLM's `kv_role`; `offering` decides which chunks are stored."""
        self._client = client
        self._geometry = geometry
        self._offering = offering or Offering(geometry)
        self._loads = loads
        self._stores = stores
        self._tracked: dict[str, Tracked] = {}
        self._orders: list[LoadOrder] = []
        self._loading: dict[str, Held | None] = {}
        self._abandoned = AbandonedLookups()
        self._store_orders = 0
        self._failed: set[str] = set()
        self._generation = ""
        self._updates = 0
        self._loras = LoraBook()
        self._told: set[str] = set()
        self._speed = PrefillSpeed()
        self._patience = PATIENCE_S

    # --------------------------------------------------------------------------------------------------- looking up

    def arrived(self, request: EngineRequest) -> None:
        """Look the prompt up at once, so that the answer is there when the request's turn comes."""
        content = content_of(request, self._generation, self._loras)
        if isinstance(content, NeverCached):
            self._tell_once(content.reason)
            return
        tracked = self._tracked[request.request_id] = Tracked(request, content)
        if self._loads and not request.skip_reading_prefix_cache:
            self._ask(tracked)

    def matched(self, request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        """Tokens to be had beyond the `computed` ones, and whether a load follows; (None, False): ask again next step.

        vLLM calls it any number of times. Once there is an answer, it is the same for the rest of the request's life.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        tracked.computed = computed
        if request.request_id in self._failed:
            return 0, False
        self._hear(tracked)
        if tracked.turn != request.num_preemptions and not isinstance(tracked.state, Asked):
            tracked.turn = request.num_preemptions
            self._reconsider(tracked)
        if isinstance(tracked.state, Askable):
            self._ask(tracked)
            self._hear(tracked)
        if isinstance(tracked.state, Asked):
            return None, False
        if isinstance(tracked.state, Held) and tracked.state.tokens > computed and tracked.content.certain():
            return tracked.state.tokens - computed, True
        return 0, False

    def _hear(self, tracked: Tracked) -> None:
        if isinstance(tracked.state, Asked):
            tracked.state = self._answer(tracked.state)

    def _reconsider(self, tracked: Tracked) -> None:
        """Its turn has come: look up again what was resumed, and what may have been stored while it was queued."""
        hit = tracked.state.tokens if isinstance(tracked.state, Held) else 0
        stale = tracked.asked_after != self._store_orders and hit < self._longest(tracked)
        if tracked.request.num_preemptions or stale:
            self._let_go(tracked)
            tracked.state = Askable()

    def _longest(self, tracked: Tracked) -> int:
        """The longest hit that this request could have: as if all of it were stored."""
        if not tracked.chunk_size:
            return 0
        everything = [-1] * (tracked.request.num_tokens // tracked.chunk_size)
        return longest_hit(self._geometry, tracked.chunk_size, everything, tracked.request.num_tokens - 1).tokens

    def _ask(self, tracked: Tracked) -> None:
        tracked.asked_after = self._store_orders
        try:
            link = self._client.link()
            hashes = tracked.hashes(link.chunk_size)
            if not hashes:
                tracked.state = Settled()
                return
            content = tracked.content
            limit = tracked.request.num_tokens - 1
            pending = link.lookup(content.tenant, hashes, limit, content.hints, self._speed.tokens_per_s)
            tracked.state = Asked(link, pending)
        except ServerUnavailable:
            tracked.state = Askable()  # asked again when its turn comes, should a server be there by then

    def _answer(self, asked: Asked) -> Asked | Held | Settled:
        patience = self._patience if asked.fresh else 0.0
        began = time.monotonic()
        try:
            found = asked.pending.poll(patience)
        except LMCacheError as error:
            self._tell_once(f"its lookup failed: {error}")
            return Settled()
        finally:
            if patience:
                self._patience = max(0.0, patience - (time.monotonic() - began))
        if found is None:
            return attrs.evolve(asked, fresh=False) if asked.fresh else asked
        return Held(asked.link, found.ticket, found.tokens) if found.tokens else Settled()

    # ------------------------------------------------------------------------------------------------------- loading

    def allocated(self, request: EngineRequest, blocks: Callable[[], BlockTable], external: int) -> None:
        """vLLM gave the request blocks, `external` tokens of which are to be loaded; 0 means that the hit is not used.

        Called again, with 0, when a load has ended.
        """
        tracked = self._tracked.get(request.request_id)
        if not external:
            if tracked is not None:
                self._let_go(tracked)
            return
        held = tracked.state if tracked is not None and isinstance(tracked.state, Held) else None
        computed = tracked.computed if tracked is not None else 0
        # without a ticket the workers report a failed load: vLLM waits for some outcome, whatever went wrong here
        epoch, ticket = (held.link.epoch, held.ticket) if held else ("", 0)
        self._orders.append(LoadOrder(request.request_id, epoch, ticket, computed, computed + external, blocks()))
        self._loading[request.request_id] = held
        if tracked is not None:
            tracked.state = Settled()

    def loaded(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """Every rank is done with these loads; those in `failed` did not succeed on all of them."""
        failed = set(failed)
        for request_id in finished:
            held = self._loading.pop(request_id, None)
            if request_id in failed:
                if held is not None:
                    held.link.drop(held.ticket)  # no rank copies any more, and not all have confirmed
                if request_id in self._tracked:
                    self._failed.add(request_id)

    # ------------------------------------------------------------------------------------------------------- storing

    def step(
        self,
        scheduled: Mapping[str, int],
        block_table: Callable[[str], BlockTable],
        snapshots: Mapping[str, Sequence[Snapshot]] = NO_SNAPSHOTS,
    ) -> StepOrders:
        """The orders of a step in which vLLM computes `scheduled` tokens of each request.

        `snapshots` are the recurrent states that the step leaves behind, for each request.
        """
        self._speed.step(sum(scheduled.values()), time.monotonic())
        self._patience = PATIENCE_S
        self._abandoned.sweep()
        loads, self._orders = tuple(self._orders), []
        if not self._stores:
            return StepOrders(loads=loads, updates=self._updates)
        try:
            link = self._client.link()
        except ServerUnavailable:
            return StepOrders(loads=loads, updates=self._updates)
        stores: list[StoreOrder] = []
        for request_id, tokens in scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                chunks = self._offering.whole_chunks(tracked, tokens, link)
                if chunks:
                    held = block_table(request_id), snapshots.get(request_id, ())
                    stores.append(self._offering.order(tracked, chunks, link, *held))
        self._store_orders += len(stores)
        return StepOrders(link.namespace, loads, tuple(stores), self._updates)

    # -------------------------------------------------------------------------------------------------------- ending

    def ended(self, request: EngineRequest) -> None:
        """The request finished or was aborted, at whatever stage. A load in progress goes on, and is reported."""
        tracked = self._tracked.pop(request.request_id, None)
        self._failed.discard(request.request_id)
        if tracked is not None:
            self._let_go(tracked)

    def reset(self) -> None:
        """From now on this engine finds nothing that was stored before: its weights may have changed under one name.

        Requests that are running have KV of both, so they are not cached any more.
        """
        for tracked in self._tracked.values():
            self._let_go(tracked)
        self._tracked.clear()
        self._failed.clear()
        self._generation = secrets.token_hex(16)

    def updated(self, updates: int) -> None:
        """The workers say that there have been so many updates of the weights: as `reset`, if that is news."""
        if updates != self._updates:
            self._updates = updates
            self.reset()

    def busy(self) -> bool:
        """Whether requests have gone whose tickets cannot be dropped before an answer comes: vLLM must step on."""
        self._abandoned.sweep()
        return bool(self._abandoned)

    def close(self) -> None:
        """The engine ends."""
        self._client.close()

    def _let_go(self, tracked: Tracked) -> None:
        """Give up a lookup or a ticket that no load will use."""
        if isinstance(tracked.state, Asked):
            self._abandoned.add(tracked.state.link, tracked.state.pending)
        elif isinstance(tracked.state, Held):
            tracked.state.link.drop(tracked.state.ticket)
        tracked.state = Settled()

    def _tell_once(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.warning("lmcache: a request goes without the cache: %s (said once)", reason)
