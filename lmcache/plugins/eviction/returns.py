"""When chunks come back: learned from what was seen, and turned into what it is worth to wait for them."""

from bisect import bisect_right
from collections import deque
from itertools import pairwise

import attrs

EDGES = (0, *(int(256 * 1.5**power) for power in range(28)))
"""Ages at which a bin begins, in chunks that were stored or used since: half as long again each time, to 15 million.

The first is as long as a few long prompts: so little can be told apart below that, that recency decides."""

BINS = len(EDGES) - 1
_WIDTHS = [after - before for before, after in pairwise(EDGES)]

SAMPLE = 4
"""One life in so many is watched, on average; a power of two."""

MEMORY = 20_000
"""Lives that a bin knows at most, before it forgets half: so the model follows the traffic."""

PRIOR, PRIOR_LIVES = 0.1, 20 / SAMPLE
"""Before anything was seen: one in ten comes back in every bin, as if so many lives had shown it. So what is younger is
worth more, as in LRU, but for the first bin, which is wider than the next."""

REFRESH = 256
"""Observations between two looks at what one kind is worth."""


@attrs.define(eq=False)
class Life:
    """A chunk between two uses. Knows no node: it is remembered when the node is gone."""

    kind: int = 0
    since: int = 0
    """Time of the last use."""
    watched: bool = False


def bin_of(age: int) -> int:
    """The bin of an age."""
    return min(bisect_right(EDGES, age), BINS) - 1


class Returns:
    """For kinds of chunks, how likely they come back at what age; and what a place is worth to one of them.

    A life that is watched enters bin after bin until its chunk is used again, is forgotten, or is older than all bins.
    Of those that entered a bin, some came back in it: that is all that is counted. What counts is chance per time:
    `worth` is the most hits for a cell and a unit of time that can be had by keeping a chunk of some age for some time
    longer, however long (the index of J. C. Gittins, Bandit processes and dynamic allocation indices, Journal of the
    Royal Statistical Society B 41(2), 1979). For a chunk that comes back after a pause, that is low at first and rises.
    """

    def __init__(self, kinds: int) -> None:
        self.now = 0
        """Chunks stored or used so far: the policy moves it on."""
        self.worth = [[0.0] * BINS for _ in range(kinds)]
        self._entered = [[0.0] * BINS for _ in range(kinds)]
        self._returned = [[0.0] * BINS for _ in range(kinds)]
        self._watched: list[deque[tuple[Life, int]]] = [deque() for _ in range(BINS)]
        self._draw = self._seen = self._due = 0
        for kind in range(kinds):
            self._appraise(kind)

    def begin(self, life: Life) -> None:
        """`life.kind` was used now."""
        life.since = self.now
        # a fixed step would meet prompts of a fixed length always at the same chunk; the same draws in every run
        self._draw = (self._draw * 0x5851F42D4C957F2D + 1) & 0xFFFFFFFFFFFFFFFF
        life.watched = not self._draw >> 32 & SAMPLE - 1
        if life.watched:
            self._watched[0].append((life, life.since))
            self._enter(life.kind, 0)

    def end(self, life: Life) -> None:
        """Its chunk was used again."""
        if life.watched:
            self._returned[life.kind][bin_of(self.now - life.since)] += 1
            life.watched = False

    def forget(self, life: Life) -> None:
        """Nobody would notice if its chunk were used again."""
        life.watched = False

    def advance(self) -> None:
        """Let lives that are old enough enter their next bin."""
        if self.now < self._due:
            return
        self._due = self.now + EDGES[1]
        for number, watched in enumerate(self._watched):
            old = self.now - EDGES[number + 1]
            while watched and watched[0][1] <= old:
                life, since = watched.popleft()
                # it may have ended, and begun again, since it came here
                if life.watched and life.since == since and number + 1 < BINS:
                    self._watched[number + 1].append((life, since))
                    self._enter(life.kind, number + 1)

    def _enter(self, kind: int, number: int) -> None:
        entered, returned = self._entered[kind], self._returned[kind]
        entered[number] += 1
        if entered[number] > MEMORY:
            entered[number] /= 2
            returned[number] /= 2
        self._seen += 1
        if not self._seen % REFRESH:
            self._appraise(self._seen // REFRESH % len(self.worth))

    def _appraise(self, kind: int) -> None:
        """Compute `worth` of one kind anew."""
        # of 1 life that begins: where it stands at the beginning of every bin, in time spent and hits had
        time, hits, left = [0.0], [0.0], 1.0
        for entered, back, width in zip(self._entered[kind], self._returned[kind], _WIDTHS, strict=True):
            chance = (back + PRIOR * PRIOR_LIVES) / max(entered + PRIOR_LIVES, back + 1)
            hits.append(hits[-1] + left * chance)
            time.append(time[-1] + left * (1 - chance / 2) * width)
            left *= 1 - chance
        # the best time to stop, seen from each bin, is a corner of the concave hull of what comes after it
        hull: list[int] = []
        for number in range(BINS - 1, -1, -1):
            end = number + 1
            while len(hull) > 1 and _slope(time, hits, end, hull[-1]) <= _slope(time, hits, hull[-1], hull[-2]):
                hull.pop()
            hull.append(end)
            # on average, half of the bin that it is in lies behind a chunk
            start = (time[number] + time[end]) / 2
            self.worth[kind][number] = max(
                (hits[stop] - hits[number]) / max(time[stop] - start, 1e-9) for stop in reversed(hull)
            )


def _slope(time: list[float], hits: list[float], start: int, stop: int) -> float:
    """Hits for time between the beginnings of two bins."""
    return (hits[stop] - hits[start]) / max(time[stop] - time[start], 1e-9)
