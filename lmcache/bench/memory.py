"""Engine memory for a bench: paged, and such that every page proves whether it was moved."""

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmcache.bench.shapes import PageShape
from lmcache.engines.copy import Pages

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

ENGINE_ALIGNMENT = 64
"""Bytes. Engines' allocators give that, and it matters: NumPy's own arrays begin 16 bytes into a memory page, and on
some CPUs (Zen 3) a memcpy to such a place takes three times as long."""

STAMP_BYTES = 16


class EngineMemory:
    """The pages of one prompt to store, and as many to load it into, in one pool of blocks."""

    def __init__(self, shape: PageShape, chunks: int) -> None:
        self.shape = shape
        self.chunks = chunks
        self._random = np.random.default_rng(0)
        layers, page = len(shape.group.page_bytes), shape.group.page_bytes[0]
        blocks = 2 * chunks * shape.blocks
        if shape.one_allocation:
            self._layers = list(_allocate(layers * blocks * page).reshape(layers, blocks, page))
        else:
            self._layers = [_allocate(blocks * page).reshape(blocks, page) for _ in range(layers)]
        for layer in self._layers:
            layer[:] = self._random.integers(0, 256, layer.shape, np.uint8)
        self.pages = Pages(self._layers)
        self._stored: Integers = np.empty(0, np.int64)
        self._loaded: Integers = np.empty(0, np.int64)

    def new_prompt(self, *, scattered: bool) -> None:
        """Choose the blocks of both sides, and mark every page, so that one that is not moved cannot be right.

        Either every second block in order, which is how the yardstick goes through its pages, or blocks at random, as
        an engine has them after a while.
        """
        blocks = self.pages.blocks
        ids = self._random.permutation(blocks) if scattered else np.arange(blocks).reshape(-1, 2).T.reshape(-1)
        self._stored, self._loaded = ids[: blocks // 2], ids[blocks // 2 :]
        for layer in self._layers:
            stamps = self._random.integers(1, 256, (len(self._stored), STAMP_BYTES), np.uint8)
            layer[self._stored, :STAMP_BYTES] = layer[self._stored, -STAMP_BYTES:] = stamps
            layer[self._loaded, :STAMP_BYTES] = layer[self._loaded, -STAMP_BYTES:] = 0

    def stored(self, chunk: int) -> list[int]:
        """Block ids that hold chunk number `chunk`."""
        return self._chunk(self._stored, chunk)

    def loaded(self, chunk: int) -> list[int]:
        """Block ids that chunk number `chunk` is loaded into."""
        return self._chunk(self._loaded, chunk)

    def _chunk(self, blocks: Integers, chunk: int) -> list[int]:
        count = self.shape.blocks
        return [int(block) for block in blocks[chunk * count : (chunk + 1) * count]]

    def verified_pages(self) -> int:
        """How many pages that were loaded equal those that were stored, byte for byte."""
        equal = 0
        for layer in self._layers:
            for stored, loaded in zip(self._stored, self._loaded, strict=True):
                equal += np.array_equal(layer[stored], layer[loaded])
        return equal


class PlainCopy:
    """The yardstick: as many bytes in pages of the same size, by nothing but a memcpy a page.

    It has pages and cells of its own, as many as the real copy goes through, so that it meets memory just as cold. It
    takes every second page: then NumPy's loop calls memcpy once a page with no Python in between, and no two pages are
    one memcpy. Measured to be no slower than a C loop, a ctypes.memmove a page, or one memcpy of the whole.
    """

    def __init__(self, shape: PageShape, cells: Sequence[Integers], cell_bytes: int) -> None:
        """Take the cells of two prompts, a row an object each."""
        page = shape.group.page_bytes[0]
        self._page, self._cells, self._cell_bytes = page, cells, cell_bytes
        self._pages, self._per_cell = shape.pages, cell_bytes // page
        # at least two cells of pages: every second one is taken
        rows = max(2 * len(cells[0]) * shape.pages, 2 * self._per_cell)
        self._pool = _allocate(rows * page).reshape(rows, page)
        self._pool[:] = 1  # memory that was never written does not exist yet
        self._calls = self._prompts = 0

    def new_prompt(self) -> None:
        """Go on to the cells of the other prompt."""
        self._prompts += 1

    def store(self, arena: Bytes, chunk: int) -> None:
        """From pages to the cells of object number `chunk`."""
        for window, pages in self._pairs(arena, chunk):
            np.copyto(window, pages)

    def load(self, arena: Bytes, chunk: int) -> None:
        """From the cells of object number `chunk` to pages."""
        for window, pages in self._pairs(arena, chunk):
            np.copyto(pages, window)

    def _pairs(self, arena: Bytes, chunk: int) -> list[tuple[Bytes, Bytes]]:
        pairs, left = [], self._pages
        for cell in self._cells[self._prompts % 2][chunk].tolist():
            count = min(left, self._per_cell)
            left -= count
            start = cell * self._cell_bytes
            window = arena[start : start + count * self._page].reshape(count, self._page)
            pairs.append((window, self._every_second(count)))
        return pairs

    def _every_second(self, count: int) -> Bytes:
        # the even rows of the pool, then the odd ones
        places = len(self._pool) // (2 * count)
        place, odd = self._calls % places, self._calls // places % 2
        self._calls += 1
        start = place * 2 * count + odd
        return self._pool[start : start + 2 * count - 1 : 2]


def _allocate(size: int) -> Bytes:
    """Memory as an engine's allocator gives it, in pages of whatever size the host gives by itself."""
    return np.frombuffer(mmap.mmap(-1, size + ENGINE_ALIGNMENT), np.uint8, size, offset=ENGINE_ALIGNMENT)
