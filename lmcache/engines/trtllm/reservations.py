"""Prefixes that the engine reserves while it puts a batch together. Scheduler process only.

A reservation lives from the engine's question until the engine has released all of it: pieces that it does not take
before anything is sent, the rest when every rank has loaded it.
"""

import attrs

from lmcache.engines.trtllm.tracked import Offer


@attrs.define
class _Reserved:
    offer: Offer
    left: list[tuple[int, int]]
    """Token intervals that are not released, in order."""
    ordered: bool = False
    """Its load was ordered: the ticket ends when every rank has confirmed, and must hold until then."""


class Reservations:
    """By the engine's number for each attempt."""

    def __init__(self) -> None:
        self._held: dict[int, _Reserved] = {}

    def add(self, number: int, offer: Offer) -> None:
        """Keep what was offered."""
        self.forget(number)
        self._held[number] = _Reserved(offer, [(offer.start, offer.end)])

    def take(self, number: int) -> Offer | None:
        """The engine loads it: from now on its ticket is the workers' to end."""
        reserved = self._held.get(number)
        if reserved is None or reserved.ordered:
            return None
        reserved.ordered = True
        return reserved.offer

    def release(self, number: int, start: int, end: int) -> None:
        """The engine has no more use for tokens `start` to `end`. What is not known, or gone already, is no error."""
        reserved = self._held.get(number)
        if reserved is None:
            return
        reserved.left = [
            piece
            for left, right in reserved.left
            for piece in ((left, min(right, start)), (max(left, end), right))
            if piece[0] < piece[1]
        ]
        if not reserved.left:
            self.forget(number)

    def forget(self, number: int) -> None:
        """Give up what is left of it."""
        reserved = self._held.pop(number, None)
        if reserved is not None and not reserved.ordered:
            reserved.offer.link.drop(reserved.offer.ticket)

    def __len__(self) -> int:
        return len(self._held)
