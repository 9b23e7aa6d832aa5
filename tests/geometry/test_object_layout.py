"""How the pages of an object lie in cells."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.geometry.groups import GroupKind, KVGroup
from lmcache.geometry.layout import Piece, object_bytes, object_cells, object_layout

MIB = 1 << 20


def full(tokens_per_block, *page_bytes):
    return KVGroup(GroupKind.FULL, tokens_per_block, page_bytes)


def test_a_chunk_of_glm_5_3_takes_23_cells_of_one_mebibyte():
    layout = object_layout(full(64, *[73_728] * 78), 256, MIB)
    assert (layout.blocks, layout.cells, len(layout.pieces)) == (4, 23, 312)
    assert layout.payload_bytes == 78 * 4 * 73_728
    assert collections.Counter(piece.cell for piece in layout.pieces) == {**dict.fromkeys(range(22), 14), 22: 4}


def test_small_pages_lie_layer_by_layer_and_move_on_to_the_next_cell_rather_than_straddle():
    assert object_layout(full(16, 10), 160, 85).pieces == tuple(
        Piece(layer=0, block=block, page_offset=0, cell=block // 8, cell_offset=block % 8 * 10, length=10)
        for block in range(10)
    )


def test_a_smaller_page_of_a_later_layer_fills_the_rest_of_a_cell():
    layout = object_layout(full(16, 10, 5), 9 * 16, 85)
    assert [(piece.layer, piece.block, piece.cell, piece.cell_offset) for piece in layout.pieces[7:12]] == [
        (0, 7, 0, 70),
        (0, 8, 1, 0),
        (1, 0, 1, 10),
        (1, 1, 1, 15),
        (1, 2, 1, 20),
    ]
    assert layout.cells == 2


def test_large_pages_are_cut_where_a_cell_ends():
    layout = object_layout(full(16, 60, 250, 12), 16, 100)
    assert layout.pieces == (
        Piece(0, 0, page_offset=0, cell=0, cell_offset=0, length=60),
        Piece(1, 0, page_offset=0, cell=0, cell_offset=60, length=40),
        Piece(1, 0, page_offset=40, cell=1, cell_offset=0, length=100),
        Piece(1, 0, page_offset=140, cell=2, cell_offset=0, length=100),
        Piece(1, 0, page_offset=240, cell=3, cell_offset=0, length=10),
        Piece(2, 0, page_offset=0, cell=3, cell_offset=10, length=12),
    )
    assert layout.cells == 4


def test_states_of_qwen3_next_that_are_a_little_larger_than_a_cell_fill_their_cells():
    # 12 layers a group; cut into whole cells and a rest, each would take two
    assert object_cells(KVGroup(GroupKind.RECURRENT, 544, (1_097_728,) * 12), 544, MIB) == 13
    # on two ranks each is a little larger than half a cell
    assert object_cells(KVGroup(GroupKind.RECURRENT, 544, (548_864,) * 12), 544, MIB) == 7


def test_a_page_of_exactly_one_cell_takes_one_cell():
    assert object_layout(full(16, 100), 48, 100).cells == 3


def test_windows_and_snapshots_store_only_the_blocks_they_keep():
    window = KVGroup(GroupKind.SLIDING_WINDOW, 16, (100,), window=40)
    recurrent = KVGroup(GroupKind.RECURRENT, 16, (100,))
    assert object_layout(window, 256, MIB).payload_bytes == 300
    assert object_layout(recurrent, 256, MIB).payload_bytes == 100


def test_scratch_takes_no_cells():
    scratch = KVGroup(GroupKind.SCRATCH, 0, ())
    assert (object_layout(scratch, 256, MIB).cells, object_layout(scratch, 256, MIB).pieces) == (0, ())
    assert object_cells(scratch, 256, MIB) == 0


def test_sizing_an_absurd_geometry_is_arithmetic_not_a_loop_over_its_pages():
    assert object_cells(full(1, 1 << 60, 1), 1 << 40, MIB) == (1 << 80) + (1 << 20)


@settings(max_examples=300, deadline=None)
@given(
    pages=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    blocks=st.integers(1, 8),
    cell_bytes=st.integers(1, 32),
)
def test_pieces_cover_every_page_once_in_order_without_overlap_within_as_few_cells_as_said(pages, blocks, cell_bytes):
    group = full(4, *pages)
    layout = object_layout(group, 4 * blocks, cell_bytes)
    covered = collections.defaultdict(list)
    used = collections.Counter()
    arena_end = 0
    for piece in layout.pieces:
        start = piece.cell * cell_bytes + piece.cell_offset
        assert arena_end <= start
        assert piece.cell_offset + piece.length <= cell_bytes
        arena_end = start + piece.length
        covered[piece.layer, piece.block] += range(piece.page_offset, piece.page_offset + piece.length)
        used[piece.cell] += piece.length
        assert pages[piece.layer] > cell_bytes // 8 or piece.length == pages[piece.layer]
    assert covered == {(layer, block): list(range(page)) for layer, page in enumerate(pages) for block in range(blocks)}
    assert layout.cells == -(-arena_end // cell_bytes) == object_cells(group, 4 * blocks, cell_bytes)
    assert arena_end == object_bytes(group, 4 * blocks, cell_bytes)
    assert all(used[cell] * 8 > cell_bytes * 7 for cell in range(layout.cells - 1))
