"""How fast this engine computes prompts: what a tier's speed is weighed against. Scheduler process only."""

from collections import deque

REMEMBERED = 32
"""Steps: a model's speed hardly changes, but the first steps of an engine are slow."""

FEWEST_TOKENS = 128
"""A step of fewer tokens tells more of its overhead than of the engine's speed."""


class PrefillSpeed:
    """Tokens a second of the fastest of the last large steps.

    The fastest, because the time between two steps is all that a scheduler sees: an engine that was idle in between
    looks slow, and none ever looks faster than it is.
    """

    def __init__(self) -> None:
        self._speeds: deque[float] = deque(maxlen=REMEMBERED)
        self._tokens = 0
        self._at = 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 until it is known."""
        return max(self._speeds, default=0.0)

    def step(self, tokens: int, now: float) -> None:
        """A step of so many tokens begins; the one before has ended."""
        if self._tokens >= FEWEST_TOKENS and now > self._at:
            self._speeds.append(self._tokens / (now - self._at))
        self._tokens, self._at = tokens, now
