"""Which lengths of a prefix can be restored where some pools hold no more than the last pages of some of them."""

from collections.abc import Callable, Mapping
from typing import TypeVar

N = TypeVar("N")

MOST_ENDS = 8
"""Lengths that are looked for: SGLang's ranks agree on one of them, and hardly ever hold different ones."""


def restorable_ends(whole: int, trailing: Mapping[N, int], leading: Callable[[N, range], int]) -> list[int]:
    """Lengths, in pages and ascending, at most `whole`, before whose ends every pool has its last pages.

    `trailing` tells how many those are, by pool; where the prefix is shorter it is all of it. `leading(pool, pages)`
    asks how many of these pages, from their first on, are there. Without trailing pools any length will do.
    """
    if not trailing:
        return list(range(1, whole + 1))
    ends: list[int] = []
    end = whole
    while end > 0 and len(ends) < MOST_ENDS:
        below = min(_fitting(end, count, name, leading) for name, count in trailing.items())
        if below == end:
            ends.insert(0, end)
            end -= 1
        else:
            end = below
    return ends


def _fitting(end: int, count: int, name: N, leading: Callable[[N, range], int]) -> int:
    """`end` if the pool has the last pages before it; else the longest length without the missing one."""
    pages = range(max(0, end - count), end)
    there = leading(name, pages)
    return end if there >= len(pages) else pages.start + there
