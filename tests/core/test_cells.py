"""Which cells are handed out, in what order, and that none is handed out twice."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lmcache.core.cells import CellAllocator, pack_cells, unpack_cells


def allocator(cells: int, backed: int | None = None) -> CellAllocator:
    made = CellAllocator(cells)
    made.back(cells if backed is None else backed)
    return made


def test_fresh_cells_come_in_order_as_one_run() -> None:
    cells = allocator(8)

    assert cells.allocate(3) == (0, 1, 2)
    assert cells.allocate(2) == (3, 4)
    assert (cells.free, cells.used) == (3, 5)


def test_only_cells_with_memory_are_handed_out() -> None:
    cells = allocator(8, backed=2)
    assert cells.free == 2
    assert cells.allocate(3) is None
    assert cells.allocate(2) == (0, 1)
    cells.back(4)

    assert cells.allocate(2) == (2, 3)
    assert cells.allocate(1) is None


def test_a_request_that_does_not_fit_takes_nothing() -> None:
    cells = allocator(4)
    assert cells.allocate(5) is None

    assert cells.allocate(4) == (0, 1, 2, 3)


def test_objects_of_one_size_keep_their_runs_of_adjacent_cells() -> None:
    cells = allocator(12)
    objects = [cells.allocate(4) for _ in range(3)]
    assert objects == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    for cell in (objects[2], objects[0]):
        assert cell is not None
        cells.release(cell)

    assert cells.allocate(4) == (0, 1, 2, 3)
    assert cells.allocate(4) == (8, 9, 10, 11)


def test_what_one_object_lacks_in_returned_cells_comes_fresh_and_all_are_in_ascending_order() -> None:
    cells = allocator(6)
    first, second = cells.allocate(2), cells.allocate(1)
    assert first is not None
    assert second == (2,)
    cells.release(first)

    assert cells.allocate(4) == (0, 1, 3, 4)


@pytest.mark.parametrize("cells", [1, 9])
def test_memory_never_shrinks_and_never_exceeds_the_arena(cells: int) -> None:
    made = allocator(8, backed=2)

    with pytest.raises(ValueError, match=f"cannot back {cells} of 8 cells: 2 are backed already"):
        made.back(cells)


def test_validation_finds_cells_released_twice_or_never_handed_out() -> None:
    cells = allocator(4)
    got = cells.allocate(2)
    assert got is not None
    cells.validate()
    cells.release((*got, got[0]))
    with pytest.raises(RuntimeError, match="released twice"):
        cells.validate()

    cells = allocator(4)
    cells.release((3,))
    with pytest.raises(RuntimeError, match="never allocated"):
        cells.validate()


def test_cell_numbers_travel_as_four_bytes_each() -> None:
    assert pack_cells((1, 2**32 - 1)) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert unpack_cells(pack_cells(range(5))) == (0, 1, 2, 3, 4)
    assert unpack_cells(b"") == ()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "back"]), st.integers(0, 7))))
def test_in_any_order_of_calls_no_cell_has_two_holders_and_none_is_lost(calls: list[tuple[str, int]]) -> None:
    cells = allocator(20, backed=5)
    held: list[tuple[int, ...]] = []
    for call, number in calls:
        if call == "allocate" and (got := cells.allocate(number)) is not None:
            assert len(got) == number
            held.append(got)
        elif call == "release" and held:
            cells.release(held.pop(number % len(held)))
        elif call == "back":
            cells.back(min(20, cells.backed + number))
        taken = [cell for each in held for cell in each]
        assert len(taken) == len(set(taken)) == cells.used
        assert all(cell < cells.backed for cell in taken)
        assert cells.free == cells.backed - len(taken)
        cells.validate()
