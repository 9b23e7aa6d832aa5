"""Lookups that have to be answered at once, for the engine asks only once. Scheduler process only."""

import logging
import time
from collections.abc import Sequence

from lmcache.core.client import Client, Link
from lmcache.core.pending_hit import PendingHit
from lmcache.core.protocol import Found
from lmcache.engines.abandoned import AbandonedLookups
from lmcache.engines.trtllm.describe import Shape, block_alignment
from lmcache.engines.trtllm.tracked import Offer, Tracked
from lmcache.errors import LMCacheError

log = logging.getLogger(__name__)


class Lookups:
    """Asks the server, with patience of a known length."""

    def __init__(self, client: Client, shape: Shape, patience: float) -> None:
        """`patience` is in seconds."""
        self._client = client
        self._alignment = block_alignment(shape)
        self._patience = patience
        self._abandoned = AbandonedLookups(wanted=True)
        self._told: set[str] = set()

    def offer(self, tracked: Tracked, tokens: Sequence[int], computed: int) -> Offer | None:
        """The hit on `tokens` beyond the `computed` ones, pinned; None where there is none. Raises nothing."""
        # the last token is always computed, for its logits; and a block that the engine holds half of is its own
        limit = (len(tokens) - 1) // self._alignment * self._alignment
        if computed % self._alignment or limit <= computed:
            return None
        try:
            link = self._client.link()
            hashes = tracked.hashes(link.chunk_size, tokens)
            found = self._answer(link, link.lookup(tracked.content.tenant, hashes, limit)) if hashes else None
        except LMCacheError as error:
            self._tell_once(str(error))
            return None
        if found is None:
            return None
        if found.tokens <= computed:
            if found.ticket:
                link.drop(found.ticket)
            return None
        return Offer(link, found.ticket, computed, found.tokens)

    def _answer(self, link: Link, pending: PendingHit) -> Found | None:
        until = time.monotonic() + self._patience
        while (found := pending.poll(max(0.0, until - time.monotonic()))) is None:
            if time.monotonic() >= until:
                # asked on, so that what tiers bring meanwhile is there for the next request
                self._abandoned.add(link, pending)
                return None
        return found

    def sweep(self) -> None:
        """Drop the tickets of lookups whose answers have come too late. Called in every step."""
        self._abandoned.sweep()

    def _tell_once(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            log.warning("lmcache: requests are computed: %s (said once)", reason)
