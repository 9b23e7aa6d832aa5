"""The values that a bench returns."""

import enum
import statistics
from collections.abc import Callable, Mapping, Sequence

import attrs

Step = Callable[[str], None]
"""Hears what is measured next."""


class Direction(enum.Enum):
    """Which side of its target a figure should be on."""

    AT_LEAST = "≥"
    AT_MOST = "≤"


@attrs.frozen
class Target:
    """What the design asks of a figure."""

    direction: Direction
    limit: float
    """In the figure's unit."""

    def met_by(self, value: float) -> bool:
        """Whether `value` is on the right side."""
        return value >= self.limit if self.direction is Direction.AT_LEAST else value <= self.limit


def at_least(limit: float) -> Target:
    """A figure that should be large."""
    return Target(Direction.AT_LEAST, limit)


def at_most(limit: float) -> Target:
    """A figure that should be small."""
    return Target(Direction.AT_MOST, limit)


@attrs.frozen
class Figure:
    """One number, how far its samples spread, and what it should be."""

    row: int
    """Of the table of cost targets, from 1; 0 for a limit of the machine itself."""
    what: str
    subject: str
    """What it was measured on: a page shape, a prompt."""
    value: float
    unit: str
    low: float
    """First quartile of the samples."""
    high: float
    """Third quartile."""
    samples: int
    target: Target | None = None
    """None where the design asks nothing."""
    beside: Mapping[str, float] = attrs.Factory(dict)
    """Other readings in the same unit, which explain it."""
    counts: Mapping[str, int] = attrs.Factory(dict)
    """What was done for it: bytes moved, pages verified, lookups."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        return self.target.met_by(self.value) if self.target else None


def figure(
    row: int,
    what: str,
    subject: str,
    samples: Sequence[float],
    unit: str,
    *,
    target: Target | None = None,
    beside: Mapping[str, float] | None = None,
    counts: Mapping[str, int] | None = None,
) -> Figure:
    """The median of `samples`, with their quartiles as the noise."""
    low, middle, high = quartiles(samples)
    return Figure(row, what, subject, middle, unit, low, high, len(samples), target, beside or {}, counts or {})


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def percentile(samples: Sequence[float], percent: float) -> float:
    """What `percent` % of the samples do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
