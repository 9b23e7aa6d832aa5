"""Sizes of L1 as users write them: a share of what the trace stores, bytes, or chunks."""

import contextlib
import enum
import math
import re
from collections.abc import Sequence

import attrs

from lmcache.errors import ConfigError
from lmcache.simulator.trace import Trace

DEFAULT = ("1%", "2%", "5%", "10%", "20%", "40%")

_WRITTEN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z%]*)\s*", re.IGNORECASE)

_UNITS = {"kb": 10, "kib": 10, "mb": 20, "mib": 20, "gb": 30, "gib": 30, "tb": 40, "tib": 40}
"""Powers of two, GB as well: `--l1-size-gb` counts them so."""


class Unit(enum.Enum):
    """What a capacity is given in."""

    SHARE = "share"
    """Percent of the cells that the trace's distinct chunks take."""
    BYTES = "bytes"
    CHUNKS = "chunks"


@attrs.frozen
class Wish:
    """A capacity as it was asked for, whatever the trace."""

    text: str
    unit: Unit
    amount: float


@attrs.frozen
class Capacity:
    """A capacity for one trace."""

    text: str
    """As the user wrote it."""
    cells: int
    chunks: float
    """What that is in chunks of average size."""
    bytes: int | None
    """None where nobody has said how large chunks are."""


def parse_capacity(text: str) -> Wish:
    """Read `2%`, `8GB` or `5000`; ConfigError says what can be written."""
    match = _WRITTEN.fullmatch(text)
    unit = match[2].lower() if match else "?"
    if match and unit in {"", "%", "chunks", *_UNITS}:
        amount = float(match[1])
        if amount > 0 and math.isfinite(amount):
            if unit == "%":
                return Wish(text.strip(), Unit.SHARE, amount / 100)
            if unit in _UNITS:
                return Wish(text.strip(), Unit.BYTES, amount * (1 << _UNITS[unit]))
            return Wish(text.strip(), Unit.CHUNKS, amount)
    raise ConfigError(
        f"--capacity {text!r} is no size",
        remedy="write a share of all distinct chunks like 2%, bytes like 8GB, or a number of chunks like 5000",
    )


def usual_capacities(trace: Trace) -> tuple[list[Wish], list[str]]:
    """What is replayed where nobody has asked for anything: shares of the trace; and those too small for a server.

    Where all of them are too small, what holds everything stands in for them. ConfigError if a server needs more.
    """
    wishes = [parse_capacity(text) for text in DEFAULT]
    fitting = []
    for wish in wishes:
        with contextlib.suppress(ConfigError):
            fit_capacities([wish], trace)
            fitting.append(wish)
    left_out = [wish.text for wish in wishes if wish not in fitting]
    return fitting or [parse_capacity("100%")], left_out


def fit_capacities(wishes: Sequence[Wish], trace: Trace) -> list[Capacity]:
    """What the wishes come to for this trace, in cells. ConfigError if one cannot be had, naming what is missing."""
    spaces = [space.fresh(trace.cell_bytes) for space in trace.namespaces]
    cells_of_groups = [
        [space.object_cells[number] * group.shards for number, group in enumerate(space.geometry.groups)]
        for space in spaces
    ]
    stored = trace.stored()
    total = sum(
        sum(cells for group, cells in enumerate(cells_of_groups[space]) if bits >> group & 1)
        for (space, _), bits in stored.items()
    )
    largest = max(space.chunk_cells for space in spaces)
    one_size = len({space.chunk_cells for space in spaces}) == 1
    return [_fitted(wish, trace, total, largest, one_size, total / max(1, len(stored))) for wish in wishes]


def _fitted(wish: Wish, trace: Trace, total: int, largest: int, one_size: bool, average: float) -> Capacity:
    if wish.unit is Unit.SHARE:
        cells = round(total * wish.amount)
    elif wish.unit is Unit.CHUNKS:
        if not one_size:
            raise ConfigError(
                f"--capacity {wish.text} counts chunks, and those of {trace.name} have several sizes",
                remedy="write bytes like 8GB, or a share like 2%",
            )
        cells = round(wish.amount * largest)
    else:
        if not trace.sized:
            raise ConfigError(
                f"--capacity {wish.text} is in bytes, and {trace.name} does not say how large its chunks are",
                remedy="give --bytes-per-token as well, the KV bytes of a token over all layers and ranks, or write a "
                "share like 2%",
            )
        cells = int(wish.amount // trace.cell_bytes)
    if cells < 2 * largest:
        # a server refuses engines then: half of L1 is the most that one engine's tickets may pin
        raise ConfigError(
            f"--capacity {wish.text} is {cells / largest:.2g} chunks of {trace.name}, and a server needs room for 2",
            remedy="give more",
        )
    size = cells * trace.cell_bytes if trace.sized else None
    return Capacity(wish.text, cells, cells / average if average else 0.0, size)
