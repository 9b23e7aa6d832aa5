"""Answers that are not final yet, kept back until they are: whoever waits for one need not ask for it over and over."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lmcache.core.protocol import AskAgain

if TYPE_CHECKING:
    from lmcache.core.connection import Connection

LONGEST_HOLD = 1.0
"""Seconds, whatever the client would have."""


class HeldAnswers:
    """Requests whose answer is kept back. The server's thread only."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[float, Connection, AskAgain]] = {}
        """By owner and ticket: a client that asks twice gets one answer at once."""

    def hold(self, connection: "Connection", request: AskAgain) -> bool:
        """Keep the answer back. False: it should be given now."""
        key = connection.owner, request.ticket
        # written so that what is no number is no reason to wait
        if key in self._held or not request.patience > 0:
            return False
        self._held[key] = time.monotonic() + min(LONGEST_HOLD, request.patience), connection, request
        return True

    def due(
        self, undecided: Callable[[int, int], bool], *, everything: bool = False
    ) -> "Iterator[tuple[Connection, AskAgain]]":
        """Those to be answered now. `undecided` says of an owner and a ticket whether the answer is still not final."""
        if not self._held:
            return
        now = time.monotonic()
        for key, (until, connection, request) in list(self._held.items()):
            if everything or now >= until or not undecided(*key):
                del self._held[key]
                yield connection, request

    @property
    def next_due(self) -> float:
        """When one has to be answered, whatever happens (`time.monotonic`); infinite if none."""
        return min((until for until, _, _ in self._held.values()), default=float("inf"))
