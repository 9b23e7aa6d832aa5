"""What a request may say about how long its chunks are worth keeping. Values only; `core/cache.py` honours them."""

import enum
import math
from collections.abc import Iterable

import msgspec


class Priority(enum.IntEnum):
    """Which chunks go before which, whatever the eviction policy says."""

    LOW = -1
    """Goes before all others."""
    NORMAL = 0
    """Goes in the policy's order."""
    HIGH = 1
    """Goes when there is nothing else to take, as long as such chunks fill no more than half of L1."""


class Hints(msgspec.Struct, frozen=True, array_like=True):
    """What one request says of the chunks that it uses and stores."""

    ttl_s: float | None = None
    """Seconds from now after which they are neither served nor kept; None: as long as there is room."""
    priority: Priority | None = None
    """None: nothing is said, which is NORMAL where nobody says anything."""
    ends_session: bool = False
    """The last request of its session: what only this session used goes next."""

    def __post_init__(self) -> None:
        if self.ttl_s is not None and not (math.isfinite(self.ttl_s) and self.ttl_s >= 0):
            raise ValueError(f"a TTL of {self.ttl_s} s")
        if self.priority is not None and not isinstance(self.priority, Priority):
            raise ValueError(f"{self.priority!r} is no Priority")  # a plugin's: messages are read by type


NO_HINTS = Hints()


def combined(hints: Iterable[Hints]) -> Hints:
    """What several say at once about one request: the strictest of each. The shortest TTL, the lowest priority."""
    spoken = list(hints)
    ttls = [each.ttl_s for each in spoken if each.ttl_s is not None]
    priorities = [each.priority for each in spoken if each.priority is not None]
    return Hints(min(ttls, default=None), min(priorities, default=None), any(each.ends_session for each in spoken))
