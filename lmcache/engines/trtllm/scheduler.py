"""The scheduler's half: looks prompts up, decides what is loaded and what is stored. Imports no engine, nor torch.

One request goes through this:

    asked ──▶ offered ──▶ load ordered ──▶ running
       │          │                           ▲
       └── miss ──┴── taken back by the engine┘

TensorRT-LLM asks once for each allocation and takes the answer for granted, so an answer is given only for a hit that
is pinned. A load that fails after that cannot be computed instead: the worker raises.
"""

import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from lmcache.core.client import Client, Link
from lmcache.core.keys import HASH_BYTES
from lmcache.engines.storing import StoreOrder
from lmcache.engines.trtllm.content import NeverCached, content_of
from lmcache.engines.trtllm.describe import Shape
from lmcache.engines.trtllm.lookups import Lookups
from lmcache.engines.trtllm.orders import BAD_PAGE, LoadOrder, StepOrders
from lmcache.engines.trtllm.reservations import Reservations
from lmcache.engines.trtllm.settings import Settings
from lmcache.engines.trtllm.tracked import Offer, Tracked, blocks_of, tables_by_group
from lmcache.errors import ServerUnavailable

log = logging.getLogger(__name__)

TAKEN = "py_num_connector_matched_tokens"
"""Where some versions note, on the request, how many of the offered tokens the engine takes."""


class SchedulerSide:
    """All requests of one engine. Every method is called by the executor's thread."""

    def __init__(self, client: Client, shape: Shape, settings: Settings, engine_id: str) -> None:
        """`engine_id` is this engine's alone, and new with every start."""
        self._client = client
        self._shape = shape
        self._settings = settings
        self._engine_id = engine_id
        self._lookups = Lookups(client, shape, settings.lookup_wait)
        self._reservations = Reservations()
        self._tracked: dict[int, Tracked] = {}
        self._orders: list[LoadOrder] = []
        self._ended: list[str] = []
        self._told: set[str] = set()

    # --------------------------------------------------------------------------------------------------- looking up

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """Tokens to be had beyond the `computed` ones, and whether the request has to wait for them."""
        offer = self._look_up(request, computed)
        if offer is None:
            return 0, False
        offer.parked = self._settings.async_loads
        self._tracked[request.request_id].offer = offer
        return offer.end - offer.start, offer.parked

    def reserve(self, request: Any, computed: int, reservation: int) -> tuple[int, bool]:
        """As `matched`, while a batch is being put together: what is answered stays until it is released."""
        offer = self._look_up(request, computed)
        if offer is None:
            return 0, False
        offer.parked = self._settings.async_loads
        self._reservations.add(reservation, offer)
        return offer.end - offer.start, offer.parked

    def release(self, reservation: int, start: int, end: int) -> None:
        """The engine needs tokens `start` to `end` of a reservation no more."""
        self._reservations.release(reservation, start, end)

    def _look_up(self, request: Any, computed: int) -> Offer | None:
        tokens = list(request.get_tokens(0))
        tracked = self._track(request, len(tokens))
        if tracked is None:
            return None
        self._let_go(tracked)
        # who wants the logits of every prompt token wants every one computed
        if getattr(request, "py_return_context_logits", False):
            return None
        return self._lookups.offer(tracked, tokens, computed)

    def _track(self, request: Any, prompt_tokens: int) -> Tracked | None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            content = content_of(request, self._engine_id)
            if isinstance(content, NeverCached):
                self._tell_once(content.reason)
                return None
            tracked = self._tracked[request.request_id] = Tracked(request, content, prompt_tokens)
        tracked.request = request
        return tracked

    # ------------------------------------------------------------------------------------------------------- loading

    def allocated(self, request: Any, grouped: Any) -> None:
        """The request has blocks, by layer group. A parked one is told of nowhere else: its load is ordered here."""
        tracked = self._tracked.get(request.request_id)
        offer = tracked.offer if tracked is not None else None
        if tracked is None or offer is None or not offer.parked:
            return
        blocks = blocks_of(tables_by_group(grouped), self._shape)
        # the engine counts no more than it has blocks for
        end = min(offer.end, min(map(len, blocks)) * self._tokens_per_block)
        tracked.offer = None
        tracked.parked = True
        self._orders.append(
            LoadOrder(
                *(request.request_id, offer.link.epoch, offer.ticket, offer.start, max(end, offer.start), blocks),
                parked=True,
            )
        )

    def cancelled(self, request: Any, start: int, end: int) -> None:
        """The engine does not take tokens `start` to `end` of what it was offered."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.offer is None or end < tracked.offer.end:
            return
        tracked.offer.end = min(tracked.offer.end, start)
        if tracked.offer.end <= tracked.offer.start:
            self._let_go(tracked)

    def _order_waiting(self, tracked: Tracked) -> None:
        """Order the load that the step about to begin counts on, if there is one."""
        offer, tracked.offer = tracked.offer, None
        if offer is None:
            return
        taken = getattr(tracked.request, TAKEN, None)
        end = offer.end if taken is None else min(offer.end, offer.start + int(taken))
        if end <= offer.start:
            offer.link.drop(offer.ticket)
            return
        tracked.loaded = end
        self._orders.append(
            LoadOrder(
                *(tracked.request.request_id, offer.link.epoch, offer.ticket, offer.start, end),
                tracked.blocks(self._shape),
            )
        )

    def _order_prefix(self, load: Any) -> None:
        """Order what the engine took of a reservation. Without a ticket the workers raise: it counts on it already."""
        offer = self._reservations.take(load.reservation_id)
        epoch, ticket = (offer.link.epoch, offer.ticket) if offer else ("", 0)
        tracked = self._tracked.get(load.request_id)
        if tracked is not None:
            tracked.loaded = load.end
            tracked.parked = bool(load.is_async)
        self._orders.append(
            LoadOrder(
                *(load.request_id, epoch, ticket, load.start, load.end),
                blocks_of(tables_by_group(load.block_ids_by_layer_group), self._shape),
                parked=bool(load.is_async),
                reservation=load.reservation_id,
            )
        )

    # ------------------------------------------------------------------------------------------------------- a step

    def step(self, output: Any) -> StepOrders:
        """The orders of a step, from what TensorRT-LLM schedules in it."""
        self._lookups.sweep()
        for load in getattr(output, "prefix_loads", None) or ():
            self._order_prefix(load)
        scheduled = []
        for data, fresh in _scheduled(output):
            tracked = self._tracked.get(data.request_id)
            if tracked is not None:
                self._take_in(tracked, data, fresh=fresh)
                scheduled.append((tracked, data.computed_position, data.num_scheduled_tokens))
        loads, self._orders = tuple(self._orders), []
        ended, self._ended = tuple(self._ended), []
        owner = getattr(output, "attention_dp_rank", None)
        try:
            link = self._client.link()
        except ServerUnavailable:
            return StepOrders(b"", loads, (), ended, owner)
        stores = [order for each in scheduled for order in self._store(link, *each)]
        return StepOrders(link.namespace, loads, tuple(stores), ended, owner)

    def _take_in(self, tracked: Tracked, data: Any, *, fresh: bool) -> None:
        if fresh:
            tracked.begin()
        tracked.append(data)
        if fresh:
            tracked.parked = False
            self._order_waiting(tracked)
        else:
            # the engine's own count includes what was loaded from the second time on
            tracked.loaded = 0
        tracked.forget_stale(self._shape, max(data.computed_position, tracked.loaded))

    def _store(self, link: Link, tracked: Tracked, position: int, tokens: int) -> Iterable[StoreOrder]:
        """The order to store the chunks that are whole by the end of a step that begins at `position`."""
        # tokens beyond those known are drafts, or not sampled yet
        known = min(max(position, tracked.loaded) + tokens, len(tracked.tokens))
        if not self._settings.store_decode:
            known = min(known, tracked.prompt_tokens)
        if tracked.offered_in != link.epoch:
            tracked.offered, tracked.offered_in = 0, link.epoch
        chunks = range(tracked.offered, known // link.chunk_size)
        if chunks:
            tracked.offered = chunks.stop
            yield self._store_order(link.chunk_size, tracked, chunks)

    def _store_order(self, chunk_size: int, tracked: Tracked, chunks: range) -> StoreOrder:
        hashes = tracked.hashes(chunk_size, tracked.tokens)[chunks.start * HASH_BYTES : chunks.stop * HASH_BYTES]
        blocks = range(*(chunk * chunk_size // self._tokens_per_block for chunk in (chunks.start, chunks.stop)))
        tables = tuple(_cut(table, blocks) for table in tracked.blocks(self._shape))
        name = str(tracked.request.request_id)
        return StoreOrder(name, tracked.content.tenant, chunks.start, hashes, tables)

    @property
    def _tokens_per_block(self) -> int:
        return self._shape.geometry.block_multiple

    # -------------------------------------------------------------------------------------------------------- ending

    def ended(self, request: Any) -> bool:
        """The request finished or was aborted. True: its blocks must stay until the workers have let go of them."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        self._let_go(tracked)
        self._ended.append(str(request.request_id))
        return tracked.parked

    def reset(self, request: Any) -> None:
        """The request has lost its blocks, and will be asked for again as if it were new."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            self._let_go(tracked)
            self._withdraw(request.request_id)

    def _withdraw(self, request: int) -> None:
        """Its blocks would be somebody else's by the time workers fill them. What was sent is the engine's to mind."""
        gone = [order for order in self._orders if order.request == request and order.reservation is None]
        self._orders = [order for order in self._orders if order not in gone]
        with contextlib.suppress(ServerUnavailable):
            link = self._client.link()
            for order in gone:
                if order.epoch == link.epoch:
                    link.drop(order.ticket)

    def close(self) -> None:
        """The engine ends."""
        self._client.close()

    def _let_go(self, tracked: Tracked) -> None:
        """Give up a ticket that no load will use."""
        if tracked.offer is not None:
            tracked.offer.link.drop(tracked.offer.ticket)
            tracked.offer = None

    def _tell_once(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.warning("lmcache: a request goes without the cache: %s (said once)", reason)


def _scheduled(output: Any) -> Iterable[tuple[Any, bool]]:
    """The data of all requests of a step, and whether the engine tells of one for the first time."""
    yield from ((data, True) for data in output.new_requests)
    yield from ((data, False) for data in output.cached_requests)


def _cut(table: Sequence[int], blocks: range) -> list[int]:
    """Some blocks of a table; positions that the engine told no id for hold no page."""
    ids = list(table[blocks.start : blocks.stop])
    return ids + [BAD_PAGE] * (len(blocks) - len(ids))
