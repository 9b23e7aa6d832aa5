"""A lookup that was sent: its answer may have to be asked for again, while the server looks at its tiers."""

import time
from collections.abc import Callable

from lmcache.core.channel import Pending
from lmcache.core.protocol import Found

SHORTEST_PAUSE = 0.001
LONGEST_PAUSE = 0.01
"""Seconds between two questions."""
SHARE = 0.03
"""A pause is this share of the time since the first question, so that no more of it is lost in the end."""


class PendingHit:
    """As `Pending`, of a lookup. Asks again by itself, whenever it is polled and enough time has passed."""

    def __init__(self, pending: Pending[Found], ask_again: Callable[[int], Pending[Found]]) -> None:
        self._pending = pending
        self._ask_again = ask_again
        self._began = time.monotonic()
        self._not_before = 0.0
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
        now = time.monotonic()
        if not self._not_before:
            self._not_before = now + self._pause(now)
        if now >= self._not_before:
            self._not_before = 0.0
            self._pending = self._ask_again(found.ticket)
        return None

    def wait(self) -> Found:
        """Block until the final answer. Raises DeadlineExceeded, LinkLost or Refused."""
        while (found := self._pending.wait()).again:
            time.sleep(self._pause(time.monotonic()))
            self._pending = self._ask_again(found.ticket)
        return found

    def wait_at_most(self, seconds: float) -> Found | None:
        """As `wait`, but None where the tiers take longer than that; they go on, and `poll` tells how it ended.

        The server's first answer is waited for as long as any: it comes at once, or the link breaks.
        """
        end = time.monotonic() + seconds
        while (found := self._pending.wait()).again:
            now = time.monotonic()
            pause = self._pause(now)
            if now + pause > end:
                return None
            time.sleep(pause)
            self._pending = self._ask_again(found.ticket)
        return found

    def _pause(self, now: float) -> float:
        return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, (now - self._began) * SHARE))
