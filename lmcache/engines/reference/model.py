"""The reference model: a small transformer in NumPy, exact enough to compare bit by bit.

A token's numbers must not depend on what else happens to be computed in the same call, or a cache-served prompt could
differ from a cold one in the last bit. So all work is done in tiles of `TILE` tokens that begin at multiples of `TILE`:
a token always sits in the same row of matrices of the same sizes, and rows that are not to be computed are padding.
"""

from collections.abc import Callable

import attrs
import numpy as np

from lmcache.engines.reference.layers import MIXERS, Layer, normalized
from lmcache.engines.reference.pages import Floats, PageMemory
from lmcache.engines.reference.shapes import ModelShape
from lmcache.engines.reference.tiles import TILE, Tile

Reduce = Callable[[Floats], Floats]
"""Sums a tile's partial result over all ranks, and gives every rank the sum."""


@attrs.frozen
class Span:
    """Tokens [start, start + len(tokens)) of one request, to be computed in one step."""

    start: int
    tokens: list[int]
    tables: list[list[int]]
    """For each group, the block id of each block of the sequence; 0 where the engine holds none."""


class Model:
    """One rank's share of the model: its heads, and a copy of all else. Used by one thread."""

    def __init__(
        self, shape: ModelShape, memory: PageMemory, *, seed: int, rank: int = 0, ranks: int = 1, reduce: Reduce
    ) -> None:
        self._shape = shape
        self._reduce = reduce
        rng = np.random.default_rng([seed, *map(ord, shape.name)])
        self._embedding: Floats = rng.standard_normal((shape.vocabulary, shape.hidden), np.float32)
        self._output: Floats = rng.standard_normal((shape.hidden, shape.vocabulary), np.float32)
        self._layers: list[Layer] = []
        self._mlps: list[tuple[Floats, Floats]] = []
        positions = dict.fromkeys(range(len(shape.groups)), 0)
        for number, group in enumerate(shape.layers):
            mixer = MIXERS[shape.groups[group].mixer]
            self._layers.append(mixer(shape, memory, rng, group, number, positions[group], rank, ranks))
            positions[group] += mixer.arrays
            self._mlps.append(_mlp(rng, shape.hidden))

    def compute(self, span: Span) -> Floats:
        """Write the KV of a span (at least one token) into its blocks; return the logits that follow its last token."""
        stop = span.start + len(span.tokens)
        hidden = [self._run(span, base) for base in range(span.start // TILE * TILE, stop, TILE)]
        logits: Floats = (hidden[-1] @ self._output)[(stop - 1) % TILE]
        return logits

    def _run(self, span: Span, base: int) -> Floats:
        first, last = max(base, span.start), min(base + TILE, span.start + len(span.tokens))
        tile = Tile(self._shape, base, first, last, span.tables)
        ids = np.zeros(TILE, np.int64)
        ids[tile.rows] = span.tokens[first - span.start : last - span.start]
        hidden = self._embedding[ids]
        for layer, (up, down) in zip(self._layers, self._mlps, strict=True):
            hidden = hidden + self._reduce(layer.mix(tile, normalized(hidden)))
            hidden = hidden + np.maximum(normalized(hidden) @ up, 0) @ down
        return normalized(hidden)


def _mlp(rng: np.random.Generator, hidden: int) -> tuple[Floats, Floats]:
    up: Floats = rng.standard_normal((hidden, 2 * hidden), np.float32) / np.float32(np.sqrt(hidden))
    down: Floats = rng.standard_normal((2 * hidden, hidden), np.float32) / np.float32(np.sqrt(2 * hidden))
    return up, down
