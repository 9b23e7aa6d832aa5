"""Adapter, part 2: the scheduler's half. Decides what to load and what may be stored; never touches a byte of KV.

Call order, for each request: `arrived`, then `hit` every step until it answers, then either `load` or `drop`; `offer`
after every step that computed tokens of it; `ended`. No method waits for the server, and none raises when it is away.
"""

import attrs

from lmcache.core.client import Client, Link
from lmcache.core.keys import HASH_BYTES, ChainHasher, chain_root, tenant_of
from lmcache.core.pending_hit import PendingHit
from lmcache.core.protocol import Found
from lmcache.engines.abandoned import AbandonedLookups
from lmcache.engines.reference.messages import LoadOrder, StoreOffer
from lmcache.errors import LMCacheError
from lmcache.geometry.hits import load_spans


@attrs.define
class _Request:
    """What the connector remembers of one request."""

    salt: str
    hasher: ChainHasher | None = None
    namespace: bytes = b""
    """Of the link that the hasher's chunk size came from."""
    link: Link | None = None
    lookup: PendingHit | None = None
    found: Found | None = None
    given_up: bool = False
    """A load has failed: the request is computed, and not looked up again."""


class SchedulerConnector:
    """One per engine. `client` has the role `SCHEDULER`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._requests: dict[int, _Request] = {}
        self.abandoned = AbandonedLookups()

    def arrived(self, request: int, tokens: list[int], salt: str) -> None:
        """A request waits to be scheduled, for the first time or again after a preemption: ask what the server has."""
        known = self._requests.setdefault(request, _Request(salt))
        if known.given_up:
            return
        try:
            link = self._client.link()
            hashes = self._hashes(known, link, tokens)
            # one token is always computed: its logits are what the engine needs
            known.lookup = link.lookup(tenant_of(salt), hashes, len(tokens) - 1) if hashes else None
            known.link = link
        except LMCacheError:
            known.lookup = None

    def hit(self, request: int) -> int | None:
        """Tokens that the server holds of the request; None: not known yet, ask again in the next step."""
        known = self._requests[request]
        if known.lookup is not None:
            try:
                known.found = known.lookup.poll()
            except LMCacheError:
                known.found = None  # no server, or one that is too slow to be worth waiting for
            else:
                if known.found is None:
                    return None
            known.lookup = None
        return known.found.tokens if known.found else 0

    def blocks_to_load(self, request: int, computed: int) -> list[tuple[int, range]]:
        """Groups, and block numbers of the sequence, a hit fills when the engine itself holds `computed` tokens."""
        known = self._requests[request]
        if known.found is None or known.link is None:
            return []
        return [
            (number, span.blocks)
            for number, group in enumerate(self._client.engine.geometry.groups)
            for span in load_spans(group, known.link.chunk_size, known.found.tokens, computed)
        ]

    def load(self, request: int, computed: int, tables: list[list[int]]) -> LoadOrder:
        """Have the workers load the hit. The ticket now ends when all of them have confirmed, or by `loaded`."""
        known = self._requests[request]
        if known.found is None or known.link is None:
            raise ValueError(f"request {request} has no hit to load")
        return LoadOrder(request, known.link.epoch, known.found.ticket, computed, known.found.tokens, tables)

    def loaded(self, request: int, *, well: bool) -> None:
        """Every rank has reported on the load. One that failed is remembered, or it would be tried again for ever."""
        self._requests[request].given_up = not well
        if well:
            self._requests[request].found = None  # the ticket has ended with the last confirmation
        else:
            self.drop(request)

    def drop(self, request: int) -> None:
        """No load will follow, or it failed: give the ticket back, now or as soon as the server has named it."""
        known = self._requests[request]
        if known.lookup is not None and known.link is not None:
            self.abandoned.add(known.link, known.lookup)
        if known.found is not None and known.found.ticket and known.link is not None:
            known.link.drop(known.found.ticket)
        known.lookup = known.found = None

    def offer(self, request: int, tokens: list[int], tables: list[list[int]]) -> StoreOffer | None:
        """What may be stored of a request once all of `tokens` are computed; None: no whole chunk, or no server.

        Called before the step, with the block tables that hold during it: window blocks and snapshots are gone later.
        Whole chunks are stored whatever they are made of; what the engine generated is the prompt of the next turn.
        """
        known = self._requests[request]
        try:
            link = self._client.link()
        except LMCacheError:
            return None
        hashes = self._hashes(known, link, tokens)
        if not hashes:
            return None
        return StoreOffer(request, tenant_of(known.salt), link.namespace, hashes, tables)

    def ended(self, request: int) -> None:
        """The request is finished or aborted, and no load of it is under way."""
        self.drop(request)
        del self._requests[request]

    def tick(self) -> None:
        """Once a step: give back the tickets of lookups that were answered after nobody wanted to know."""
        self.abandoned.sweep()

    def _hashes(self, known: _Request, link: Link, tokens: list[int]) -> bytes:
        if known.hasher is None or known.namespace != link.namespace:
            # the tenant's salt is content: it changes the keys, so that tenants never share a chunk
            known.hasher = ChainHasher(chain_root({"salt": known.salt} if known.salt else {}), link.chunk_size)
            known.namespace = link.namespace
        return known.hasher.extend_to(tokens)[: len(tokens) // link.chunk_size * HASH_BYTES]
