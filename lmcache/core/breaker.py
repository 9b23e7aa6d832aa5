"""When to leave a tier alone: after failures in a row, for a while, then one try. Knows no clock: it is told."""

import attrs

FAILURES = 3
"""In a row, after which the tier is left alone."""

SHORTEST_SECONDS = 1.0
LONGEST_SECONDS = 30.0
"""It is left alone for the one at first, twice as long after every try that fails, and never longer than the other."""


@attrs.define
class CircuitBreaker:
    """A tier's recent record, and what follows from it."""

    failures: int = 0
    """Since the last success."""
    _until: float = 0.0
    _pause: float = 0.0
    _trying: bool = False

    def allows(self, now: float) -> bool:
        """Whether to call the tier. Where it has failed, one call is let through when its time is over."""
        if self.failures < FAILURES:
            return True
        if self._trying or now < self._until:
            return False
        self._trying = True
        return True

    def open(self, now: float) -> bool:
        """Whether the tier is being left alone."""
        return self.failures >= FAILURES and (self._trying or now < self._until)

    def succeeded(self) -> None:
        """A call came back as it should."""
        self.failures, self._pause, self._trying = 0, 0.0, False

    def failed(self, now: float) -> None:
        """A call failed, or did not come back in time."""
        self.failures += 1
        tried, self._trying = self._trying, False
        # calls that were under way when it was left alone say nothing new, however many fail
        if tried or self.failures == FAILURES:
            self._pause = min(LONGEST_SECONDS, max(SHORTEST_SECONDS, 2 * self._pause))
            self._until = now + self._pause
