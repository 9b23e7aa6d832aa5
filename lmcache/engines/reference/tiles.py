"""A tile: the tokens of one request that are computed together, and what each of them may read."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmcache.engines.reference.pages import Floats
from lmcache.engines.reference.shapes import ModelShape
from lmcache.geometry.groups import GroupKind

TILE = 32
"""Tokens."""


class Tile:
    """Positions [base, base + TILE) of a request, of which [first, last) are computed; the rest is padding.

    What a padding row reads is arbitrary but finite, and nothing that it computes is kept.
    """

    def __init__(self, shape: ModelShape, base: int, first: int, last: int, tables: Sequence[Sequence[int]]) -> None:
        self.base = base
        self.first = first
        self.last = last
        self.rows = slice(first - base, last - base)
        self._shape = shape
        self._tables = tables
        self._reads: dict[int, tuple[npt.NDArray[np.int64], Floats]] = {}

    @property
    def positions(self) -> range:
        """The positions that are computed."""
        return range(self.first, self.last)

    def block(self, group: int, number: int) -> int:
        """The block id of the sequence's block `number`."""
        return self._tables[group][number]

    def slots(self, group: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the computed tokens' entries go: block ids, and positions inside the blocks."""
        size = self._shape.groups[group].tokens_per_block
        blocks = np.array([self.block(group, position // size) for position in self.positions], np.int64)
        return blocks, np.arange(self.first, self.last) % size

    def reads(self, group: int) -> tuple[npt.NDArray[np.int64], Floats]:
        """Block ids that cover all the tile may read of `group`, and a mask `[TILE, tokens]` of 0 and minus infinity.

        Both depend on the tile's position only, never on which of its rows are computed.
        """
        if group not in self._reads:
            size = self._shape.groups[group].tokens_per_block
            low, high = self._first_read(group) // size, -(-(self.base + TILE) // size)
            table = self._tables[group]
            # beyond its end, and where the engine holds nothing: the null block, which is masked
            ids = np.array([table[n] if n < len(table) else 0 for n in range(low, high)], np.int64)
            self._reads[group] = ids, self._mask(group, np.arange(low * size, high * size))
        return self._reads[group]

    def _first_read(self, group: int) -> int:
        kind, window = self._shape.groups[group].kind, self._shape.groups[group].window
        if kind is GroupKind.SLIDING_WINDOW:
            return max(0, self.base - window + 1)
        if kind is GroupKind.CHUNKED_LOCAL:
            return self.base // window * window
        return 0

    def _mask(self, group: int, keys: npt.NDArray[np.int64]) -> Floats:
        kind, window = self._shape.groups[group].kind, self._shape.groups[group].window
        queries = np.arange(self.base, self.base + TILE)[:, None]
        visible = keys <= queries
        if kind is GroupKind.SLIDING_WINDOW:
            visible &= keys > queries - window
        if kind is GroupKind.CHUNKED_LOCAL:
            visible &= keys >= queries // window * window
        return np.where(visible, np.float32(0), np.float32(-np.inf))
