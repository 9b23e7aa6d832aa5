"""Lookups that nobody waits for any more. Scheduler process only."""

from typing import Protocol

from lmcache.core.protocol import Found
from lmcache.errors import LMCacheError


class _Link(Protocol):
    """As much of `core.link.Link` as is used here."""

    def drop(self, ticket: int) -> None: ...


class _Pending(Protocol):
    """As much of `core.pending_hit.PendingHit` as is used here."""

    @property
    def promised(self) -> int: ...

    def poll(self) -> Found | None: ...


class AbandonedLookups:
    """Gives back the tickets that lookups bring whose requests have gone, or could not wait. Raises nothing."""

    def __init__(self, *, wanted: bool = False) -> None:
        """`wanted`: what tiers are bringing is to come into memory all the same, for the next request that asks."""
        self._wanted = wanted
        self._waiting: list[tuple[_Link, _Pending]] = []

    def __bool__(self) -> bool:
        """Whether any is not answered yet."""
        return bool(self._waiting)

    def add(self, link: _Link, pending: _Pending) -> None:
        """From now on nobody else asks for this answer."""
        self._waiting.append((link, pending))

    def sweep(self) -> None:
        """Look for answers, without waiting. To be called in every step: what a ticket pins is held until then."""
        waiting = []
        for link, pending in self._waiting:
            try:
                found = pending.poll()
            except LMCacheError:
                continue  # the link has ended, and with it the ticket; or none was given
            promise = 0 if self._wanted else pending.promised
            ticket = found.ticket if found else promise
            if ticket:
                link.drop(ticket)
            elif found is None:
                waiting.append((link, pending))
        self._waiting = waiting
