"""Every byte of a copy: the right pages reach the right cells and come back, and nothing else is touched."""

import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import pytest

from lmcache.engines.copy import Bytes, Copier, Pages
from lmcache.errors import GeometryError
from lmcache.geometry.groups import GroupKind, KVGroup
from lmcache.geometry.layout import ObjectLayout, object_layout

BLOCKS = 12
"""Blocks of every engine in this file."""


def contiguous(sizes: Sequence[int]) -> tuple[Bytes, list[Bytes]]:
    """Layers one after another in one storage."""
    memory = np.zeros(BLOCKS * sum(sizes), np.uint8)
    starts = itertools.accumulate((BLOCKS * size for size in sizes), initial=0)
    return memory, [memory[i : i + BLOCKS * size].reshape(BLOCKS, size) for i, size in zip(starts, sizes, strict=False)]


def block_major(sizes: Sequence[int]) -> tuple[Bytes, list[Bytes]]:
    """One storage in which a block's pages of all layers are neighbours."""
    memory = np.zeros((BLOCKS, sum(sizes)), np.uint8)
    starts = np.cumsum([0, *sizes])
    return memory, [memory[:, start : start + size] for start, size in zip(starts, sizes, strict=False)]


def separate(sizes: Sequence[int]) -> tuple[list[Bytes], list[Bytes]]:
    """An allocation for each layer."""
    layers = [np.zeros((BLOCKS, size), np.uint8) for size in sizes]
    return layers, layers


def padded(sizes: Sequence[int]) -> tuple[Bytes, list[Bytes]]:
    """Blocks a little further apart than their pages are long, at an odd distance."""
    memory = np.zeros((len(sizes), BLOCKS, max(sizes) + 24), np.uint8)
    return memory, [memory[layer, :, 8 : 8 + size] for layer, size in enumerate(sizes)]


def padded_to_rows(sizes: Sequence[int]) -> tuple[Bytes, list[Bytes]]:
    """Blocks padded to a power of two, as engines do that align their pages."""
    memory = np.zeros((len(sizes), BLOCKS, 1 << (max(sizes)).bit_length()), np.uint8)
    return memory, [memory[layer, :, :size] for layer, size in enumerate(sizes)]


def far_apart(sizes: Sequence[int]) -> tuple[list[Bytes], list[Bytes]]:
    """Allocations with room for an arena between them."""
    memory = np.zeros((len(sizes), 4 << 20), np.uint8)
    slices = [memoryview(memory[layer, : BLOCKS * size]) for layer, size in enumerate(sizes)]
    # frombuffer hides from NumPy that the slices belong to one array
    return [memory], [np.frombuffer(s, np.uint8).reshape(BLOCKS, size) for s, size in zip(slices, sizes, strict=True)]


STORAGES = [contiguous, block_major, separate, padded, padded_to_rows, far_apart]

SHAPES = {
    "one layer": ([4096], 4, 16384),
    "equal pages": ([8192] * 5, 4, 32768),
    "pages that leave a cell's end unused": ([9216] * 5, 4, 32768),
    "small pages": ([96] * 3, 4, 1024),
    "pages larger than a cell": ([20480] * 3, 4, 8192),
    "pages that are cells": ([8192] * 2, 3, 8192),
    "mixed pages on one grid": ([8192, 4096, 8192, 12288], 4, 32768),
    "mixed pages on none": ([8192, 1000, 700], 4, 16384),
    "one page a chunk": ([8192] * 3, 1, 16384),
}


@attrs.frozen
class Bench:
    """An engine's pages, an arena of three objects, and the object under test: pairs of adjacent cells, backwards."""

    layers: list[Bytes]
    copier: Copier
    layout: ObjectLayout
    cell_bytes: int
    arena: Bytes
    cells: list[int]
    storage: object

    def expected(self, block_ids: Sequence[int]) -> dict[tuple[int, int], bytes]:
        """What must be in each (cell position, offset), from the layout's own pieces."""
        return {
            (p.cell, p.cell_offset): self.layers[p.layer][block_ids[p.block]][p.page_offset :][: p.length].tobytes()
            for p in self.layout.pieces
        }

    def stored(self) -> dict[tuple[int, int], bytes]:
        """What is there."""
        starts = [(p, self.cells[p.cell] * self.cell_bytes + p.cell_offset) for p in self.layout.pieces]
        return {(p.cell, p.cell_offset): self.arena[s : s + p.length].tobytes() for p, s in starts}


@pytest.fixture(params=STORAGES, ids=lambda f: f.__name__)
def storage(request: pytest.FixtureRequest) -> Callable[[Sequence[int]], tuple[object, list[Bytes]]]:
    return request.param


@pytest.fixture(params=SHAPES)
def bench(request: pytest.FixtureRequest, storage: Callable[[Sequence[int]], tuple[object, list[Bytes]]]) -> Bench:
    sizes, blocks, cell_bytes = SHAPES[request.param]
    group = KVGroup(GroupKind.FULL, 16, tuple(sizes))
    layout = object_layout(group, 16 * blocks, cell_bytes)
    rng = np.random.default_rng(7)
    owner, layers = storage(sizes)
    for memory in owner if isinstance(owner, list) else [owner]:
        memory[...] = rng.integers(0, 256, memory.shape, np.uint8)
    arena = rng.integers(0, 256, 3 * layout.cells * cell_bytes, np.uint8)
    pairs = range(3 * (-(-layout.cells // 2) - 1), -1, -3)
    cells = [cell for first in pairs for cell in (first, first + 1)][: layout.cells]
    return Bench(layers, Copier(Pages(layers), layout, cell_bytes), layout, cell_bytes, arena, cells, owner)


def some_blocks(count: int) -> list[int]:
    return [9, 2, 11, 0][:count]


def test_store_puts_every_page_where_the_layout_says_and_touches_nothing_else(bench: Bench) -> None:
    block_ids = some_blocks(bench.layout.blocks)
    before = bench.arena.copy()
    bench.copier.store(bench.arena, bench.cells, block_ids)
    assert bench.stored() == bench.expected(block_ids)
    for piece in bench.layout.pieces:
        start = bench.cells[piece.cell] * bench.cell_bytes + piece.cell_offset
        before[start : start + piece.length] = bench.arena[start : start + piece.length]
    assert before.tobytes() == bench.arena.tobytes(), "foreign cells or the ends of cells were written"


def snapshot(storage: object) -> list[Bytes]:
    return [memory.copy() for memory in (storage if isinstance(storage, list) else [storage])]


def runs(blocks: int) -> Iterator[tuple[int, int]]:
    for first in range(blocks):
        for count in range(1, blocks - first + 1):
            yield first, count


def test_load_fills_just_the_pages_asked_for_whatever_part_of_a_chunk_they_are(bench: Bench) -> None:
    source = [3, 5, 7, 1][: bench.layout.blocks]
    bench.copier.store(bench.arena, bench.cells, source)
    kept = [layer[source].copy() for layer in bench.layers]
    for first, count in runs(bench.layout.blocks):
        targets = [8, 10, 4, 6][:count]
        for layer in bench.layers:
            layer[targets] ^= 0xFF
        wanted = [layer.copy() for layer in bench.layers]
        flipped = [layer[targets] for layer in bench.layers]
        memory = [m.tobytes() for m in snapshot(bench.storage)]
        bench.copier.load(bench.arena, bench.cells, targets, first)
        for layer, whole, pages in zip(bench.layers, wanted, kept, strict=True):
            whole[targets] = pages[first : first + count]
            assert layer.tobytes() == whole.tobytes()
        for layer, pages in zip(bench.layers, flipped, strict=True):
            layer[targets] = pages
        assert [m.tobytes() for m in snapshot(bench.storage)] == memory, "padding or foreign pages were written"


def test_loading_nothing_changes_nothing(bench: Bench) -> None:
    before = snapshot(bench.storage)
    bench.copier.load(bench.arena, bench.cells, [], 0)
    assert [m.tobytes() for m in before] == [m.tobytes() for m in snapshot(bench.storage)]


@pytest.mark.parametrize("block_ids", [[0, 1, 2, BLOCKS], [0, 1, 2, -1], [0, 1, 2], [0, 1, 2, 3, 4]], ids=str)
def test_a_block_that_is_not_there_is_refused_before_a_byte_moves(block_ids: list[int]) -> None:
    layout = object_layout(KVGroup(GroupKind.FULL, 16, (4096, 4096)), 64, 16384)
    copier = Copier(Pages(contiguous([4096, 4096])[1]), layout, 16384)
    arena = np.full(8 * 16384, 5, np.uint8)
    with pytest.raises(IndexError):
        copier.store(arena, [0, 1], block_ids)
    with pytest.raises(IndexError):
        copier.load(arena, [0, 1], block_ids, 2)
    assert (arena == 5).all()


@pytest.mark.parametrize("cells", [[0], [0, 1, 2], [0, 8], [-1, 0]], ids=str)
def test_a_cell_that_is_not_there_is_refused(cells: list[int]) -> None:
    layout = object_layout(KVGroup(GroupKind.FULL, 16, (4096, 4096)), 64, 16384)
    copier = Copier(Pages(contiguous([4096, 4096])[1]), layout, 16384)
    with pytest.raises(IndexError):
        copier.store(np.zeros(8 * 16384, np.uint8), cells, [0, 1, 2, 3])


def test_layers_that_share_memory_are_stored_twice_and_loaded_alike() -> None:
    memory = np.random.default_rng(1).integers(0, 256, (BLOCKS, 4096), np.uint8)
    layout = object_layout(KVGroup(GroupKind.FULL, 16, (4096, 4096)), 32, 8192)
    copier = Copier(Pages([memory, memory]), layout, 8192)
    arena = np.zeros(4 * 8192, np.uint8)
    copier.store(arena, [2, 0], [4, 6])
    assert arena[2 * 8192 : 3 * 8192].tobytes() == memory[[4, 6]].tobytes() == arena[:8192].tobytes()
    kept = memory[[4, 6]].copy()
    memory[:] = 0
    copier.load(arena, [2, 0], [1, 2])
    assert memory[[1, 2]].tobytes() == kept.tobytes()
    assert not memory[[0, *range(3, BLOCKS)]].any()


def test_a_window_group_keeps_only_its_last_blocks() -> None:
    group = KVGroup(GroupKind.SLIDING_WINDOW, 16, (4096, 4096), window=40)
    layout = object_layout(group, 256, 65536)
    assert layout.blocks == 3
    _, layers = contiguous([4096, 4096])
    layers[0][7], layers[1][7] = 1, 2
    arena = np.zeros(65536, np.uint8)
    Copier(Pages(layers), layout, 65536).store(arena, [0], [5, 6, 7])
    assert arena[2 * 4096] == 1
    assert arena[5 * 4096] == 2
    assert np.count_nonzero(arena) == 8192


@pytest.mark.parametrize("storage", STORAGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("page", [65536, 73728, 65536 + 24], ids=str)
def test_no_temporary_of_the_size_of_a_page_appears(
    storage: Callable[[Sequence[int]], tuple[object, list[Bytes]]], page: int
) -> None:
    sizes = [page] * 5
    layout = object_layout(KVGroup(GroupKind.FULL, 16, tuple(sizes)), 64, 1 << 20)
    owner, layers = storage(sizes)
    copier = Copier(Pages(layers), layout, 1 << 20)
    arena = np.zeros(layout.cells << 20, np.uint8)
    cells = list(range(layout.cells))
    copier.store(arena, cells, [1, 2, 3, 4])
    tracemalloc.start()
    try:
        copier.store(arena, cells, [1, 2, 3, 4])
        copier.load(arena, cells, [5, 6, 7, 8])
        copier.load(arena, cells, [5, 6], 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < page // 2
    assert owner is not None


def test_an_arena_between_two_layers_does_not_make_numpy_copy_twice() -> None:
    page, cell = 65536, 1 << 20
    memory = np.zeros(8 << 20, np.uint8)
    # one piece of memory dealt out as a layer, the arena, a layer; each hidden from the others
    first, arena, second = (
        np.frombuffer(memoryview(memory)[start : start + size], np.uint8)
        for start, size in ((0, BLOCKS * page), (1 << 20, 4 << 20), (5 << 20, BLOCKS * page))
    )
    layout = object_layout(KVGroup(GroupKind.FULL, 16, (page, page)), 64, cell)
    copier = Copier(Pages([first.reshape(BLOCKS, page), second.reshape(BLOCKS, page)]), layout, cell)
    tracemalloc.start()
    try:
        copier.store(arena, [2], [1, 2, 3, 4])
        copier.load(arena, [2], [5, 6, 7, 8])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < page // 2


def calls_of_a_copy(copier: Copier, cells: Sequence[int], block_ids: Sequence[int]) -> tuple[int, int]:
    """Of a store, and of a load."""
    arena = np.zeros((max(cells) + 1) << 20, np.uint8)
    offsets, ids = copier._offsets(arena, cells), copier._ids(block_ids, 0)
    store, load = (len(copier._calls(arena, offsets, ids, None, spread=spread)) for spread in (False, True))
    return store, load


@pytest.mark.parametrize("storage", [contiguous, block_major])
def test_the_usual_storages_are_stored_in_one_call_a_cell_and_loaded_in_fewer(
    storage: Callable[[Sequence[int]], tuple[object, list[Bytes]]],
) -> None:
    # 14 such pages fill 98 % of a cell, so that even adjacent cells are no one piece; the last cell holds 6
    sizes = [73728] * 12
    layout = object_layout(KVGroup(GroupKind.FULL, 64, tuple(sizes)), 256, 1 << 20)
    _, layers = storage(sizes)
    copier = Copier(Pages(layers), layout, 1 << 20)
    assert calls_of_a_copy(copier, [0, 1, 2, 3], [1, 2, 3, 4]) == (4, 2)
    assert calls_of_a_copy(copier, [0, 1, 5, 6], [1, 2, 3, 4]) == (4, 3)
    assert calls_of_a_copy(copier, [6, 4, 2, 0], [1, 2, 3, 4]) == (4, 4)


@pytest.mark.parametrize(
    ("cells", "calls"),
    [([0, 1, 2, 3], 1), ([4, 5, 0, 1], 2), ([0, 2, 4, 6], 4), ([3, 2, 1, 0], 4)],
    ids=["adjacent", "two runs", "apart", "backwards"],
)
def test_pages_that_fill_adjacent_cells_are_copied_in_one_call(cells: list[int], calls: int) -> None:
    sizes = [65536] * 16
    layout = object_layout(KVGroup(GroupKind.FULL, 64, tuple(sizes)), 256, 1 << 20)
    _, layers = contiguous(sizes)
    assert calls_of_a_copy(Copier(Pages(layers), layout, 1 << 20), cells, [1, 2, 3, 4]) == (calls, calls)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (np.zeros((4, 64), np.uint16), "layer 0 is uint16 of shape (4, 64)"),
        (np.zeros((4, 8, 8), np.uint8), "layer 0 is uint8 of shape (4, 8, 8)"),
        (np.zeros((4, 128), np.uint8)[:, ::2], "strides (128, 2)"),
        (np.lib.stride_tricks.as_strided(np.zeros(200, np.uint8), (4, 64), (32, 1)), "lie 32 bytes apart"),
    ],
    ids=["dtype", "dimensions", "torn pages", "overlapping blocks"],
)
def test_views_that_are_no_pages_are_refused(view: Bytes, message: str) -> None:
    with pytest.raises(GeometryError) as refused:
        Pages([view])
    assert message in str(refused.value)


def test_pages_of_another_size_than_the_geometry_says_are_refused() -> None:
    layout = object_layout(KVGroup(GroupKind.FULL, 16, (4096, 4096)), 64, 16384)
    with pytest.raises(GeometryError) as refused:
        Copier(Pages(contiguous([4096, 2048])[1]), layout, 16384)
    assert "pages of [4096, 2048] bytes, the geometry of [4096, 4096]" in str(refused.value)


def test_a_group_without_layers_is_refused() -> None:
    with pytest.raises(GeometryError) as refused:
        Pages([])
    assert str(refused.value) == "a KV group without layers has no pages; leave scratch groups out"
