"""The ways in which a layer of the reference model reads earlier tokens. One class a way.

Each writes what it keeps of a tile's tokens into their blocks, then computes from the blocks alone: if a page was
loaded wrongly, the output is wrong.
"""

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from lmcache.engines.reference.pages import Floats, PageMemory
from lmcache.engines.reference.shapes import Mixer, ModelShape
from lmcache.engines.reference.tiles import TILE, Tile

SHARPNESS = 2.0
"""Random keys score nearly alike; scaled up, each token reads a few others and the output depends on which."""


def normalized(x: Floats) -> Floats:
    """Each row at a root mean square of one."""
    result: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return result


def rotated(x: Floats, tile: Tile) -> Floats:
    """Turn `[TILE, …, size]` by the tokens' positions, so that scores depend on distances."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(tile.base, tile.base + TILE), 100.0 ** (-np.arange(half) / half))
    shape = (TILE, *(1,) * (x.ndim - 2), half)
    cos, sin = np.cos(angles).astype(np.float32).reshape(shape), np.sin(angles).astype(np.float32).reshape(shape)
    left, right = x[..., :half], x[..., half:]
    return np.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def weighted(scores: Floats, mask: Floats) -> Floats:
    """Softmax over what the mask lets through; overwrites `scores`."""
    scores += mask
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


class Layer(abc.ABC):
    """One layer's mixing of tokens, for the heads of one rank."""

    arrays: ClassVar[int] = 1
    """Page arrays that it has in its group."""

    def __init__(
        self,
        shape: ModelShape,
        memory: PageMemory,
        rng: np.random.Generator,
        group: int,
        number: int,
        position: int,
        rank: int,
        ranks: int,
    ) -> None:
        """`number` counts layers, `position` page arrays of `group`. Draws the same from `rng` on every rank."""
        self.shape = shape
        self.memory = memory
        self.group = group
        self.number = number
        self.position = position
        self.tokens = shape.groups[group].tokens_per_block
        self.heads = shape.heads // ranks
        self._rng = rng
        self._rank = rank
        self.output = self.per_head(shape.head_size, shape.hidden)

    def everywhere(self, rows: int, columns: int) -> Floats:
        """A weight that all ranks hold."""
        weight: Floats = self._rng.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(rows))
        return weight

    def per_head(self, rows: int, columns: int) -> Floats:
        """A weight `[heads, rows, columns]`, of which each rank keeps its own heads."""
        scale = np.float32(np.sqrt(rows if columns != self.shape.hidden else rows * self.shape.heads))
        weight: Floats = self._rng.standard_normal((self.shape.heads, rows, columns), np.float32) / scale
        return np.ascontiguousarray(weight[self._rank * self.heads : (self._rank + 1) * self.heads])

    def project(self, per_head: Floats) -> Floats:
        """`[heads, TILE, head_size]` to this rank's part of `[TILE, hidden]`."""
        result: Floats = np.matmul(per_head, self.output).sum(axis=0)
        return result

    @abc.abstractmethod
    def mix(self, tile: Tile, hidden: Floats) -> Floats:
        """Store what the tile's tokens leave for later ones; return this rank's part of what each of them reads."""


class HeadsLayer(Layer):
    """Attention with keys and values for each head. Page: `[2, tokens, heads, head_size]`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # handed through unseen
        size, hidden = self.shape.head_size, self.shape.hidden
        self._query, self._key, self._value = (self.per_head(hidden, size) for _ in range(3))
        self._pages = self.memory.array(self.group, self.position, 2, self.tokens, self.heads, size)

    def mix(self, tile: Tile, hidden: Floats) -> Floats:
        query, key, value = (np.matmul(hidden, w).swapaxes(0, 1) for w in (self._query, self._key, self._value))
        blocks, within = tile.slots(self.group)
        self._pages[blocks, 0, within] = rotated(key, tile)[tile.rows]
        self._pages[blocks, 1, within] = value[tile.rows]
        ids, mask = tile.reads(self.group)
        keys, values = (self._pages[ids, which].reshape(-1, *query.shape[1:]) for which in (0, 1))
        scores = np.matmul(rotated(query, tile).transpose(1, 0, 2), keys.transpose(1, 2, 0)) * np.float32(SHARPNESS)
        return self.project(np.matmul(weighted(scores, mask), values.transpose(1, 0, 2)))


class LatentLayer(Layer):
    """Attention through one vector a token for all heads. Page: `[tokens, latent_size + rotary_size]`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # handed through unseen
        shape = self.shape
        self._latent = self.everywhere(shape.hidden, shape.latent_size)
        self._rotary = self.everywhere(shape.hidden, shape.rotary_size)
        self._query = self.per_head(shape.hidden, shape.latent_size)
        self._rotary_query = self.per_head(shape.hidden, shape.rotary_size)
        self._value = self.per_head(shape.latent_size, shape.head_size)
        width = shape.latent_size + shape.rotary_size
        self._pages = self.memory.array(self.group, self.position, self.tokens, width)

    def mix(self, tile: Tile, hidden: Floats) -> Floats:
        entries = np.concatenate([hidden @ self._latent, rotated(hidden @ self._rotary, tile)], axis=-1)
        blocks, within = tile.slots(self.group)
        self._pages[blocks, within] = entries[tile.rows]
        ids, mask = tile.reads(self.group)
        keys = self._pages[ids].reshape(-1, entries.shape[-1])
        rotary_query = rotated(np.matmul(hidden, self._rotary_query).swapaxes(0, 1), tile).swapaxes(0, 1)
        query = np.concatenate([np.matmul(hidden, self._query), rotary_query], axis=-1)
        scores = np.matmul(query, keys.T) * np.float32(SHARPNESS)
        weights = weighted(scores, mask + self.selection(tile, hidden, mask.shape[-1]))
        return self.project(np.matmul(np.matmul(weights, keys[:, : self.shape.latent_size]), self._value))

    def selection(self, tile: Tile, hidden: Floats, tokens: int) -> Floats | float:
        """A further mask `[TILE, tokens]`."""
        return 0.0


class SparseLayer(LatentLayer):
    """Latent attention to the blocks whose mean index key suits the query best. Second page: `[index_size]`."""

    arrays = 2

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._index_query, self._index_key = (
            self.everywhere(self.shape.hidden, self.shape.index_size) for _ in range(2)
        )
        self._means = self.memory.array(self.group, self.position + 1, self.shape.index_size)
        self._scratch = self.shape.scratch_group

    def selection(self, tile: Tile, hidden: Floats, tokens: int) -> Floats:
        self._pool(tile, hidden @ self._index_key)
        means = self._means[tile.reads(self.group)[0]]
        complete = (np.arange(tile.base, tile.base + TILE) // self.tokens)[:, None]
        blocks = np.arange(len(means))
        scores = np.where(blocks < complete, (hidden @ self._index_query) @ means.T, np.float32(-np.inf))
        wanted = min(self.shape.selected_blocks, len(means))
        least = np.partition(scores, -wanted, axis=-1)[:, -wanted, None]
        chosen = (scores >= least) & (blocks < complete) | (blocks == complete)
        return np.repeat(np.where(chosen, np.float32(0), np.float32(-np.inf)), self.tokens, axis=-1)[:, :tokens]

    def _pool(self, tile: Tile, keys: Floats) -> None:
        """Add the tokens to the running sum, one by one, and keep the mean of each block that they complete."""
        tail = self.memory.tail[tile.block(self._scratch, 0), self.number]
        for position in tile.positions:
            if position % self.tokens == 0:
                tail[:] = 0  # what another request, or an earlier block, left there
            tail += keys[position - tile.base]
            if (position + 1) % self.tokens == 0:
                self._means[tile.block(self.group, position // self.tokens)] = tail / np.float32(self.tokens)


class StateLayer(Layer):
    """A gated linear recurrence. Page: `[heads, head_size, head_size]`, the state after the block's last token."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # handed through unseen
        size, hidden = self.shape.head_size, self.shape.hidden
        self._query, self._key, self._value = (self.per_head(hidden, size) for _ in range(3))
        self._gate = self.per_head(hidden, 1)
        self._pages = self.memory.array(self.group, self.position, self.heads, size, size)

    def mix(self, tile: Tile, hidden: Floats) -> Floats:
        query, key, value, gate = (
            np.matmul(hidden, w).swapaxes(0, 1) for w in (self._query, self._key, self._value, self._gate)
        )
        keep = 1 / (1 + np.exp(-gate - np.float32(5)))
        state = self._state_before(tile)
        read = np.zeros((self.heads, TILE, self.shape.head_size), np.float32)
        for position in tile.positions:
            row = position - tile.base
            state = state * keep[row, :, :, None] + key[row, :, :, None] * value[row, :, None, :]
            read[:, row] = np.matmul(query[row, :, None, :], state)[:, 0]
            if (position + 1) % self.tokens == 0 or position + 1 == tile.last:
                self._pages[tile.block(self.group, position // self.tokens)] = state
        return self.project(normalized(read))

    def _state_before(self, tile: Tile) -> Floats:
        if tile.first == 0:
            return np.zeros(self._pages.shape[1:], np.float32)
        before: Floats = self._pages[tile.block(self.group, (tile.first - 1) // self.tokens)]
        return before


MIXERS: Mapping[Mixer, type[Layer]] = MappingProxyType(
    {Mixer.HEADS: HeadsLayer, Mixer.LATENT: LatentLayer, Mixer.SPARSE: SparseLayer, Mixer.STATE: StateLayer}
)
