"""Pages ↔ cells in the host's memory. NumPy only; used in worker processes.

A copy is a handful of large calls that release the GIL once each, because a call per page is slower and starves, or is
starved by, every other Python thread. To get there, the pages of many layers are seen as one array of *rows*: the
largest size that divides every page, every stride and the distance between the layers. One `np.take` then gathers all
pages of a cell, and one indexed assignment scatters them, without a temporary. Layers that share no such grid are
copied one by one, and layers whose strides allow none at all page by page.

One file, though a long one, so that there is one place to look at when bytes are wrong.
"""

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from lmcache.errors import GeometryError
from lmcache.geometry.layout import ObjectLayout, Piece

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

SMALLEST_ROW = 4096
"""Bytes of the smallest row worth indexing: below it one call over many rows is slower than a call per page."""


@attrs.frozen
class _Run:
    """Rows that lie one after another in a cell: what one call moves."""

    cell: int
    """Position in the object's list of cells."""
    offset: int
    """Bytes into that cell."""
    start: int
    """First row, as a position among all rows of the object on the grid."""
    stop: int


_Call: TypeAlias = tuple[Bytes, Integers, Bytes]
"""A grid, rows of it, and their place in the arena."""


class Pages:
    """The pages of one KV group on one rank, as the engine lays them out."""

    def __init__(self, layers: Sequence[Bytes]) -> None:
        """Take, per layer, a uint8 view `[blocks, page_bytes]` whose pages are contiguous; layers may share memory.

        Blocks may lie any distance apart. Views of one array are copied together whatever else lies between them, so
        cut them from one array where the engine has one. Raises GeometryError for a view that is none of that.
        """
        if not layers:
            raise GeometryError("a KV group without layers has no pages", remedy="leave scratch groups out")
        for number, layer in enumerate(layers):
            if layer.dtype != np.uint8 or layer.ndim != 2 or 0 in layer.shape or layer.strides[1] != 1:
                raise GeometryError(
                    f"layer {number} is {layer.dtype} of shape {layer.shape} and strides {layer.strides}",
                    remedy="pass uint8 views [blocks, page bytes] with contiguous pages",
                )
            if layer.strides[0] < layer.shape[1]:
                raise GeometryError(
                    f"blocks of layer {number} lie {layer.strides[0]} bytes apart, their pages have {layer.shape[1]}",
                    remedy="pass a view in which blocks follow each other and do not overlap",
                )
        self.layers = tuple(layers)
        self.blocks = min(len(layer) for layer in layers)


class Copier:
    """Copies objects of one group between an engine's pages and the arena. Plans once; any thread may call it."""

    def __init__(self, pages: Pages, layout: ObjectLayout, cell_bytes: int) -> None:
        """Plan the copies of `layout`. Raises GeometryError when the pages are not those of the layout."""
        _check(pages, layout)
        self.layout = layout
        self._cell_bytes = cell_bytes
        self._blocks = pages.blocks
        self._row_lanes: list[_RowLane] = []
        self._page_lanes: list[_PageLane] = []
        plans: dict[bytes, _RowPlan] = {}
        for layers in _partition(pages, layout, cell_bytes):
            pieces = [piece for piece in layout.pieces if piece.layer in layers]
            row = _row(pages, layers, pieces)
            if _gridded(row, pieces):
                lane = _RowLane(pages, layers, pieces, row, cell_bytes)
                # layers that are allocated one by one mostly differ in nothing but their address
                lane.plan = plans.setdefault(lane.plan.key, lane.plan)
                self._row_lanes.append(lane)
            else:
                self._page_lanes.append(_PageLane(pages, pieces))

    def store(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy the pages of `block_ids`, one id a kept position, into an object's `cells`.

        The caller sees to it that the pages are written and stay so until this returns. Unused ends of cells are left
        alone. Raises IndexError, before a byte is moved, when a block or a cell does not exist or the counts differ.
        """
        if len(block_ids) != self.layout.blocks:
            raise IndexError(f"{len(block_ids)} block ids for an object of {self.layout.blocks} blocks")
        ids = self._ids(block_ids, 0)
        offsets = self._offsets(arena, cells)
        for grid, rows, window in self._calls(arena, offsets, ids, None, spread=False):
            # mode="raise" would gather into a temporary first
            grid.take(rows, 0, window, "clip")
        for lane in self._page_lanes:
            lane.store(arena, offsets, ids)

    def load(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int], first: int = 0) -> None:
        """Copy kept positions `first`, `first + 1`, … of an object into the pages of `block_ids`.

        No other page is touched. Raises IndexError as `store` does.
        """
        if not 0 <= first <= first + len(block_ids) <= self.layout.blocks:
            raise IndexError(f"kept positions {first} to {first + len(block_ids)} of {self.layout.blocks}")
        if not block_ids:
            return
        ids = self._ids(block_ids, first)
        offsets = self._offsets(arena, cells)
        positions = range(first, first + len(block_ids))
        whole = len(positions) == self.layout.blocks
        # `take` above wants its output in one piece; here what is read may lie apart
        for grid, rows, window in self._calls(arena, offsets, ids, None if whole else positions, spread=True):
            grid[rows] = window
        for lane in self._page_lanes:
            lane.load(arena, offsets, ids, positions)

    def _calls(
        self, arena: Bytes, offsets: Sequence[int], ids: Integers, positions: range | None, *, spread: bool
    ) -> list[_Call]:
        """Every call that moves rows, before the first is made: that one drives this code out of the CPU's caches."""
        rows = {lane.plan: lane.plan.rows(ids) for lane in self._row_lanes}
        return [
            call
            for lane in self._row_lanes
            for call in lane.calls(arena, offsets, rows[lane.plan], positions, spread=spread)
        ]

    def _ids(self, block_ids: Sequence[int], first: int) -> Integers:
        """Block ids by kept position; positions that are not copied get block 0 and are never looked at."""
        # np.take clips and plain indexing wraps: a wrong id would move a foreign page
        if min(block_ids) < 0 or max(block_ids) >= self._blocks:
            raise IndexError(f"block ids {list(block_ids)} of an engine with {self._blocks} blocks")
        if len(block_ids) == self.layout.blocks:
            return np.array(block_ids, np.int64)
        ids = np.zeros(self.layout.blocks, np.int64)
        ids[first : first + len(block_ids)] = block_ids
        return ids

    def _offsets(self, arena: Bytes, cells: Sequence[int]) -> list[int]:
        if len(cells) != self.layout.cells:
            raise IndexError(f"{len(cells)} cells for an object of {self.layout.cells}")
        offsets = [int(cell) * self._cell_bytes for cell in cells]
        if min(offsets) < 0 or max(offsets) + self._cell_bytes > len(arena):
            raise IndexError(f"cells {list(cells)} of an arena with {len(arena) // self._cell_bytes}")
        return offsets


class _RowPlan:
    """Which rows of a grid an object's pages take, as a function of its block ids."""

    def __init__(self, start: Integers, step: Integers, block: Integers) -> None:
        self._start, self._step = start, step
        self.block = block
        """Kept position of each row."""

    @property
    def key(self) -> bytes:
        """Equal for plans that give equal rows."""
        return b"".join(part.tobytes() for part in (self._start, self._step, self.block))

    def rows(self, ids: Integers) -> Integers:
        """Numbers of the rows, in arena order."""
        rows = ids.take(self.block)
        rows *= self._step
        rows += self._start
        return rows


class _RowLane:
    """Layers on one row grid: each run of their rows is one call."""

    def __init__(self, pages: Pages, layers: Sequence[int], pieces: Sequence[Piece], row: int, cell_bytes: int) -> None:
        first = min((pages.layers[layer] for layer in layers), key=_address)
        origin = _address(first)
        rows = (max(_end(pages.layers[layer]) for layer in layers) - origin) // row
        # rows that belong to no page of ours are in this view too; no index ever points at them
        self._grid: Bytes = np.lib.stride_tricks.as_strided(first, (rows, row), (row, 1))
        self._keep = pages  # the view holds only the layer it starts in
        self._row = row
        self._cell_bytes = cell_bytes
        steps = np.array([layer.strides[0] // row for layer in pages.layers], np.int64)
        starts = np.array([(_address(layer) - origin) // row for layer in pages.layers], np.int64)
        counts = [piece.length // row for piece in pieces]
        within = np.concatenate([np.arange(count) for count in counts])
        layer_of, block, page_offset, place = (
            np.repeat(np.array(column, np.int64), counts)
            for column in zip(
                *((p.layer, p.block, p.page_offset, p.cell * cell_bytes + p.cell_offset) for p in pieces), strict=True
            )
        )
        self.plan = _RowPlan(starts[layer_of] + page_offset // row + within, steps[layer_of], block)
        self._place = place + within * row
        self._whole = self._runs(np.arange(len(place)))

    def _runs(self, selected: Integers) -> list[_Run]:
        """Cut the selected rows, in arena order, where a cell ends or a row between two is not selected."""
        place = self._place[selected]
        cell = place // self._cell_bytes
        cuts = np.flatnonzero((np.diff(place) != self._row) | (np.diff(cell) != 0)) + 1
        bounds = [0, *cuts.tolist(), len(selected)]
        return [
            _Run(int(cell[i]), int(place[i] % self._cell_bytes), int(selected[i]), int(selected[j - 1]) + 1)
            for i, j in itertools.pairwise(bounds)
        ]

    def calls(
        self, arena: Bytes, offsets: Sequence[int], rows: Integers, positions: range | None, *, spread: bool
    ) -> list[_Call]:
        """The calls that move the rows of kept `positions`, or of all.

        Equal runs of adjacent cells are one call if they fill their cells, and with `spread` if they do not.
        """
        runs = self._whole
        if positions is not None:
            block = self.plan.block
            runs = self._runs(np.flatnonzero((block >= positions.start) & (block < positions.stop)))
        calls: list[_Call] = []
        at = 0
        while at < len(runs):
            run = runs[at]
            place, size = offsets[run.cell] + run.offset, (run.stop - run.start) * self._row
            gapless = size == self._cell_bytes
            count = self._alike(runs, at, offsets) if gapless or spread else 1
            some = rows[run.start : runs[at + count - 1].stop]
            if gapless or count == 1:
                calls.append((self._grid, some, arena[place : place + count * size].reshape(-1, self._row)))
            else:
                shape, strides = (count, size // self._row, self._row), (self._cell_bytes, self._row, 1)
                window = np.lib.stride_tricks.as_strided(arena[place:], shape, strides)
                calls.append((self._grid, some.reshape(count, -1), window))
            at += count
        return calls

    def _alike(self, runs: Sequence[_Run], at: int, offsets: Sequence[int]) -> int:
        """How many runs from number `at` on have the same place in cells that follow each other, and as many rows."""
        first = runs[at]
        rows, cell = first.stop - first.start, offsets[first.cell]
        count = 1
        while at + count < len(runs):
            run = runs[at + count]
            if (
                offsets[run.cell] != cell + count * self._cell_bytes
                or run.offset != first.offset
                or run.start != first.start + count * rows
                or run.stop != run.start + rows
            ):
                break
            count += 1
        return count


class _PageLane:
    """Layers whose strides fit no grid: one call a piece."""

    def __init__(self, pages: Pages, pieces: Sequence[Piece]) -> None:
        # tuples, not pieces: this loop runs once a page, and attribute access would be a tenth of its time
        self._pieces = [
            (
                pages.layers[p.layer][:, p.page_offset : p.page_offset + p.length],
                p.block,
                p.cell,
                p.cell_offset,
                p.length,
            )
            for p in pieces
        ]

    def store(self, arena: Bytes, offsets: Sequence[int], ids: Integers) -> None:
        blocks = ids.tolist()
        for view, block, cell, within, length in self._pieces:
            start = offsets[cell] + within
            arena[start : start + length] = view[blocks[block]]

    def load(self, arena: Bytes, offsets: Sequence[int], ids: Integers, positions: range) -> None:
        blocks = ids.tolist()
        for view, block, cell, within, length in self._pieces:
            if block in positions:
                start = offsets[cell] + within
                view[blocks[block]] = arena[start : start + length]


def _check(pages: Pages, layout: ObjectLayout) -> None:
    wanted: dict[int, int] = {}
    for piece in layout.pieces:
        wanted[piece.layer] = max(wanted.get(piece.layer, 0), piece.page_offset + piece.length)
    held = {number: layer.shape[1] for number, layer in enumerate(pages.layers)}
    if held != wanted:
        raise GeometryError(
            f"the engine has pages of {list(held.values())} bytes, the geometry of {list(wanted.values())}",
            remedy="describe the group by the views that are registered",
        )


def _partition(pages: Pages, layout: ObjectLayout, cell_bytes: int) -> list[list[int]]:
    """All layers together where one grid holds them, else each on its own."""
    together = list(range(len(pages.layers)))
    if _near(pages.layers, cell_bytes) and _gridded(_row(pages, together, layout.pieces), layout.pieces):
        return [together]
    return [[layer] for layer in together]


def _gridded(row: int, pieces: Sequence[Piece]) -> bool:
    """Whether rows of `row` bytes pay: large ones do, and small ones that are whole pages."""
    return row >= SMALLEST_ROW or all(piece.length == row for piece in pieces)


def _row(pages: Pages, layers: Sequence[int], pieces: Sequence[Piece]) -> int:
    """Bytes of the largest row that divides the pieces, the strides and the distances between `layers`."""
    views = [pages.layers[layer] for layer in layers]
    distances = [_address(view) - _address(views[0]) for view in views]
    strides = [view.strides[0] for view in views if len(view) > 1]
    return math.gcd(*distances, *strides, *(number for p in pieces for number in (p.page_offset, p.length)))


def _near(layers: Sequence[Bytes], cell_bytes: int) -> bool:
    """Whether the arena cannot lie between two layers: NumPy would take it to overlap their grid, and copy it first."""
    if len({id(_owner(layer)) for layer in layers}) == 1:
        return True
    reached = min(_address(layer) for layer in layers)
    for layer in sorted(layers, key=_address):
        if _address(layer) - reached >= cell_bytes:
            return False
        reached = max(reached, _end(layer))
    return True


def _owner(array: object) -> object:
    while (base := getattr(array, "base", None)) is not None:
        array = base
    return array


def _address(array: Bytes) -> int:
    return int(array.ctypes.data)


def _end(array: Bytes) -> int:
    return _address(array) + (len(array) - 1) * int(array.strides[0]) + int(array.shape[1])
