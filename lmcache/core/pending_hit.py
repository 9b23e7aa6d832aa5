"""A lookup that was sent: its answer may have to be asked for again, while the server looks at its tiers."""

import time
from collections.abc import Callable

from lmcache.core.channel import Pending
from lmcache.core.protocol import Found

SHORTEST_PAUSE = 0.001
"""Seconds between two questions, though the server should keep no answer back: one that is stopping does not."""


class PendingHit:
    """As `Pending`, of a lookup. Asks again by itself, when it is polled after an answer that is not final.

    The server keeps its answer back for a while as long as it is not final, so that few questions are asked, and the
    final answer comes at once.
    """

    def __init__(self, pending: Pending[Found], ask_again: Callable[[int], Pending[Found]]) -> None:
        """`ask_again` sends the question about a ticket."""
        self._pending = pending
        self._ask_again = ask_again
        self._asked = 0.0
        self.promised = 0
        """The ticket under which the server goes on looking, once it has said that it does; else 0."""

    def poll(self, patience: float = 0.0) -> Found | None:
        """The final answer if it has come, else None. Raises DeadlineExceeded, LinkLost or Refused.

        `patience`: about so many seconds the server's next answer is waited for; whatever it is, no other is.
        """
        found = self._pending.poll(patience)
        if found is None or not found.again:
            return found
        self.promised = found.ticket
        if self._pause() <= 0:
            self._ask(found)
        return None

    def wait(self) -> Found:
        """Block until the final answer. Raises DeadlineExceeded, LinkLost or Refused."""
        while (found := self._pending.wait()).again:
            time.sleep(max(0.0, self._pause()))
            self._ask(found)
        return found

    def wait_at_most(self, seconds: float) -> Found | None:
        """As `wait`, but None where the tiers take longer than that; they go on, and `poll` tells how it ended.

        The server's first answer is waited for as long as any: it comes at once, or the link breaks.
        """
        end = time.monotonic() + seconds
        found: Found | None = self._pending.wait()
        while found is not None and found.again:
            time.sleep(max(0.0, self._pause()))
            self._ask(found)
            found = self._pending.poll(max(0.0, end - time.monotonic()))
        return found

    def _ask(self, found: Found) -> None:
        self.promised = found.ticket
        self._asked = time.monotonic()
        self._pending = self._ask_again(found.ticket)

    def _pause(self) -> float:
        """Seconds for which it is too early to ask again."""
        return self._asked + SHORTEST_PAUSE - time.monotonic()
