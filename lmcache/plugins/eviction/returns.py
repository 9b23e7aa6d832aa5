"""When chunks come back: learned from what was seen, and turned into what it is worth to wait for them."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import compress, cycle, pairwise

import attrs

EDGES = (0, *(int(256 * 1.5**power) for power in range(28)))
"""Ages at which a bin begins, in chunks that were stored or used since: half as long again each time, to 15 million.

The first is as long as a few long prompts: so little can be told apart below that, that recency decides."""

BINS = len(EDGES) - 1
_WIDTHS = [after - before for before, after in pairwise(EDGES)]

SAMPLE = 4
"""One life in so many is watched, on average."""

DRAWS = 4093
"""After so many lives the draws repeat themselves: a prime, so that no length of a prompt falls in with them."""

MEMORY = 20_000
"""Lives that a bin knows at most, before it forgets half: so the model follows the traffic."""

PRIOR, PRIOR_LIVES = 0.1, 20 / SAMPLE
"""Before anything was seen: one in ten comes back in every bin, as if so many lives had shown it. So what is younger is
worth more, as in LRU, but for the first bin, which is wider than the next."""

REFRESH = 256
"""Observations after which what one kind is worth is computed anew: each in its turn, and only once somebody asks."""


@attrs.define(eq=False)
class Life:
    """A chunk between two uses. Knows no node: it is remembered when the node is gone."""

    kind: int = 0
    since: int = 0
    """Time of the last use."""
    watched: dict[int, int] | None = None
    """By kind, how many of those that began with it, and are watched as it is, have not ended; None if it is not."""


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
        self._worth = [[0.0] * BINS for _ in range(kinds)]
        self._entered = [[0.0] * BINS for _ in range(kinds)]
        self._returned = [[0.0] * BINS for _ in range(kinds)]
        self._watched: list[deque[tuple[int, dict[int, int]]]] = [deque() for _ in range(BINS)]
        """For each bin, what is in it: lives that began together, by kind, and when they did; the oldest first."""
        self._draws = cycle(_draws())
        self._seen = self._appraised = self._due = 0
        for kind in range(kinds):
            self._appraise(kind)

    def begin(self, lives: Sequence[Life]) -> None:
        """Chunks, each of `life.kind`, were used now. What they lived before has ended."""
        now, watched = self.now, dict[int, int]()
        for life in lives:
            life.since = now
        for life in compress(lives, self._draws):
            life.watched = watched
            watched[life.kind] = watched.get(life.kind, 0) + 1
        self._enter(0, now, watched)

    def end(self, lives: Iterable[Life]) -> None:
        """Their chunks were used again."""
        for life in lives:
            if life.watched is not None:
                self._returned[life.kind][bin_of(self.now - life.since)] += 1
                self.forget(life)

    def forget(self, life: Life) -> None:
        """Nobody would notice if its chunk were used again."""
        if life.watched is not None:
            life.watched[life.kind] -= 1
            life.watched = None

    def advance(self) -> None:
        """Let lives that are old enough enter their next bin."""
        if self.now < self._due:
            return
        self._due = self.now + EDGES[1]
        for number, watched in enumerate(self._watched):
            old = self.now - EDGES[number + 1]
            while watched and watched[0][0] <= old:
                since, left = watched.popleft()
                if number + 1 < BINS:
                    self._enter(number + 1, since, left)

    def _enter(self, number: int, since: int, lives: dict[int, int]) -> None:
        if not any(lives.values()):
            return
        self._watched[number].append((since, lives))
        for kind, count in lives.items():
            entered = self._entered[kind]
            entered[number] += count
            self._seen += count
            if entered[number] > MEMORY:
                entered[number] /= 2
                self._returned[kind][number] /= 2

    def worth(self) -> list[list[float]]:
        """By kind, then by bin of age: hits to be expected for a place and a unit of time. As good as `REFRESH`."""
        # the kinds whose turn has come since, each once; that takes long enough not to be done at every use
        due = self._seen // REFRESH
        for turn in range(max(self._appraised, due - len(self._worth)), due):
            self._appraise((turn + 1) % len(self._worth))
        self._appraised = due
        return self._worth

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
            start, best = (time[number] + time[end]) / 2, 0.0
            for stop in reversed(hull):
                slope = (hits[stop] - hits[number]) / max(time[stop] - start, 1e-9)
                if slope < best:
                    break  # the hull is concave: once it falls, it falls for good
                best = slope
            self._worth[kind][number] = best


def _draws() -> list[bool]:
    """Who is watched: at random, for a fixed step would meet prompts of a fixed length at the same chunks always.

    The same in every run (D. E. Knuth's MMIX generator).
    """
    draws, state = [], 1
    for _ in range(DRAWS):
        state = (state * 0x5851F42D4C957F2D + 0x14057B7EF767814F) & 0xFFFFFFFFFFFFFFFF
        draws.append((state >> 32) % SAMPLE == 0)
    return draws


def _slope(time: list[float], hits: list[float], start: int, stop: int) -> float:
    """Hits for time between the beginnings of two bins."""
    return (hits[stop] - hits[start]) / max(time[stop] - time[start], 1e-9)
