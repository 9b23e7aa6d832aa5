"""The scheduler's half: looks prompts up, decides what is loaded and what is stored. Imports neither vLLM nor torch.

One request goes through this:

    Askable ──▶ Asked ──▶ Held ──▶ loading ──▶ Settled
       ▲          │         │                     │
       │          └─────────┴── miss, deadline, no server, hit not used, load failed ──▶ Settled
       └── preempted: it will be looked up again, with what it has generated

Nothing here waits. An answer that does not come is a miss; a ticket that is not used is dropped; a request whose load
failed is never looked up again, for vLLM asks again at once and would load the same thing for ever.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import attrs

from lmcache.core.keys import HASH_BYTES, ChainHasher
from lmcache.core.protocol import Found
from lmcache.engines.vllm.content import Content, EngineRequest, NeverCached, content_of
from lmcache.engines.vllm.orders import LoadOrder, StepOrders, StoreOrder
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.geometry.groups import Geometry

log = logging.getLogger(__name__)

BlockTable = tuple[list[int], ...]
"""A request's block ids, one list for each KV group."""


class PendingLookup(Protocol):
    """`core.link.Pending`, of a lookup."""

    def poll(self) -> Found | None: ...


class SchedulerLink(Protocol):
    """As much of `core.link.Link` as a scheduler uses."""

    epoch: str
    namespace: bytes
    chunk_size: int

    def lookup(self, tenant: str, hashes: bytes, limit: int) -> PendingLookup: ...
    def drop(self, ticket: int) -> None: ...


class SchedulerClient(Protocol):
    """As much of `core.client.Client` as a scheduler uses."""

    def link(self) -> SchedulerLink: ...
    def close(self) -> None: ...


@attrs.frozen
class Askable:
    """Not looked up, or not since it was preempted."""


@attrs.frozen
class Settled:
    """Hit used, missed, or not to be had: vLLM computes the rest."""


@attrs.frozen
class Asked:
    """The answer is awaited."""

    link: SchedulerLink
    pending: PendingLookup


@attrs.frozen
class Held:
    """A hit, and the ticket that pins it."""

    link: SchedulerLink
    ticket: int
    tokens: int


@attrs.define
class _Tracked:
    """What the scheduler knows of one request."""

    request: EngineRequest
    content: Content
    state: Askable | Asked | Held | Settled = Askable()
    asked_after: int = 0
    """Store orders that had gone out when it was looked up."""
    turn: int = -1
    """Number of preemptions when vLLM first wanted to schedule it in its present life."""
    computed: int = 0
    """Tokens that vLLM held itself when it last asked."""
    hasher: ChainHasher | None = None
    chunk_size: int = 0
    """Of `hasher`."""
    offered: int = 0
    """Chunks that workers were told to store."""
    offered_in: tuple[str, int] = ("", 0)
    """Epoch and number of preemptions that `offered` counts in."""


class SchedulerSide:
    """All requests of one engine. Every method is called by vLLM's scheduler thread."""

    def __init__(
        self,
        client: SchedulerClient,
        geometry: Geometry,
        *,
        loads: bool = True,
        stores: bool = True,
        decode: bool = True,
    ) -> None:
        """`loads` and `stores` follow vLLM's `kv_role`; `decode` also stores chunks that sampled tokens complete."""
        self._client = client
        self._geometry = geometry
        self._loads = loads
        self._stores = stores
        self._decode = decode
        self._tracked: dict[str, _Tracked] = {}
        self._orders: list[LoadOrder] = []
        self._loading: dict[str, Held | None] = {}
        self._abandoned: list[Asked] = []
        self._store_orders = 0
        self._failed: set[str] = set()
        self._generation = ""
        self._told: set[str] = set()

    # --------------------------------------------------------------------------------------------------- looking up

    def arrived(self, request: EngineRequest) -> None:
        """Look the prompt up at once, so that the answer is there when the request's turn comes."""
        content = content_of(request, self._generation)
        if isinstance(content, NeverCached):
            self._tell_once(content.reason)
            return
        tracked = self._tracked[request.request_id] = _Tracked(request, content)
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
        if isinstance(tracked.state, Held) and tracked.state.tokens > computed:
            return tracked.state.tokens - computed, True
        return 0, False

    def _hear(self, tracked: _Tracked) -> None:
        if isinstance(tracked.state, Asked):
            tracked.state = self._answer(tracked.state)

    def _reconsider(self, tracked: _Tracked) -> None:
        """Its turn has come: look up again what was resumed, and what may have been stored while it was queued."""
        hit = tracked.state.tokens if isinstance(tracked.state, Held) else 0
        stale = tracked.asked_after != self._store_orders and hit < self._longest(tracked)
        if tracked.request.num_preemptions or stale:
            self._let_go(tracked)
            tracked.state = Askable()

    def _longest(self, tracked: _Tracked) -> int:
        """The longest hit that this request could have."""
        tokens, chunk_size = tracked.request.num_tokens, tracked.chunk_size or 1
        return min(tokens // chunk_size * chunk_size, tokens - 1) // self._geometry.alignment * self._geometry.alignment

    def _ask(self, tracked: _Tracked) -> None:
        tracked.asked_after = self._store_orders
        try:
            link = self._client.link()
            hashes = self._hashes(tracked, link)
            if not hashes:
                tracked.state = Settled()
                return
            pending = link.lookup(tracked.content.tenant, hashes, tracked.request.num_tokens - 1)
            tracked.state = Asked(link, pending)
        except ServerUnavailable:
            tracked.state = Askable()  # asked again when its turn comes, should a server be there by then

    def _answer(self, asked: Asked) -> Asked | Held | Settled:
        try:
            found = asked.pending.poll()
        except LMCacheError as error:
            self._tell_once(f"its lookup failed: {error}")
            return Settled()
        if found is None:
            return asked
        return Held(asked.link, found.ticket, found.tokens) if found.tokens else Settled()

    def _hashes(self, tracked: _Tracked, link: SchedulerLink) -> bytes:
        """Chain hashes of all whole chunks of the tokens known so far."""
        if tracked.hasher is None or tracked.chunk_size != link.chunk_size:
            tracked.chunk_size = link.chunk_size
            tracked.hasher = ChainHasher(tracked.content.root, link.chunk_size, tracked.content.items)
        return tracked.hasher.extend_to(tracked.request.all_token_ids)

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

    def step(self, scheduled: Mapping[str, int], block_table: Callable[[str], BlockTable]) -> StepOrders:
        """The orders of a step in which vLLM computes `scheduled` tokens of each request."""
        self._sweep()
        loads, self._orders = tuple(self._orders), []
        if not self._stores:
            return StepOrders(loads=loads)
        try:
            link = self._client.link()
        except ServerUnavailable:
            return StepOrders(loads=loads)
        stores: list[StoreOrder] = []
        for request_id, tokens in scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                chunks = self._whole_chunks(tracked, tokens, link)
                if chunks:
                    stores.append(self._store_order(tracked, chunks, link, block_table(request_id)))
        self._store_orders += len(stores)
        return StepOrders(link.namespace, loads, tuple(stores))

    def _whole_chunks(self, tracked: _Tracked, tokens: int, link: SchedulerLink) -> range:
        """Numbers of the chunks that are whole by the end of this step and were not offered before."""
        request = tracked.request
        # positions beyond `num_tokens` hold drafts that may be refused, or tokens that are not sampled yet
        known = min(request.num_tokens, request.num_computed_tokens + tokens)
        if not self._decode:
            known = min(known, request.num_prompt_tokens)
        life = (link.epoch, request.num_preemptions)
        if tracked.offered_in != life:
            # a new boot of the server holds nothing, and a resumed request has other blocks
            tracked.offered, tracked.offered_in = 0, life
        chunks = range(tracked.offered, known // link.chunk_size)
        tracked.offered = max(tracked.offered, chunks.stop)
        return chunks

    def _store_order(self, tracked: _Tracked, chunks: range, link: SchedulerLink, table: BlockTable) -> StoreOrder:
        hashes = self._hashes(tracked, link)[chunks.start * HASH_BYTES : chunks.stop * HASH_BYTES]
        start, stop = chunks.start * link.chunk_size, chunks.stop * link.chunk_size
        blocks = tuple(
            ids[start // group.tokens_per_block : stop // group.tokens_per_block] if group.cached else []
            for ids, group in zip(table, self._geometry.groups, strict=True)
        )
        return StoreOrder(tracked.request.request_id, tracked.content.tenant, chunks.start, hashes, blocks)

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

    def busy(self) -> bool:
        """Whether requests have gone whose tickets cannot be dropped before an answer comes: vLLM must step on."""
        self._sweep()
        return bool(self._abandoned)

    def close(self) -> None:
        """The engine ends."""
        self._client.close()

    def _let_go(self, tracked: _Tracked) -> None:
        """Give up a lookup or a ticket that no load will use."""
        if isinstance(tracked.state, Asked):
            self._abandoned.append(tracked.state)
        elif isinstance(tracked.state, Held):
            tracked.state.link.drop(tracked.state.ticket)
        tracked.state = Settled()

    def _sweep(self) -> None:
        """Drop the tickets of abandoned lookups whose answers have come."""
        if not self._abandoned:
            return
        answers = [self._answer(asked) for asked in self._abandoned]
        self._abandoned = [answer for answer in answers if isinstance(answer, Asked)]
        for answer in answers:
            if isinstance(answer, Held):
                answer.link.drop(answer.ticket)

    def _tell_once(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.warning("lmcache: a request goes without the cache: %s (said once)", reason)
