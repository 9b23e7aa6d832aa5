"""Engine memory of a bench: a page that was not moved, or not whole, is noticed."""

import numpy as np
import pytest

from lmcache.bench.memory import ENGINE_ALIGNMENT, EngineMemory, PlainCopy
from lmcache.bench.shapes import PageShape
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

CHUNKS, LAYERS, BLOCKS, PAGE = 3, 2, 4, 4096
PAGES = CHUNKS * LAYERS * BLOCKS


@pytest.fixture(params=[True, False], ids=["one allocation", "an allocation a layer"])
def memory(request: pytest.FixtureRequest) -> EngineMemory:
    geometry = Geometry((KVGroup(GroupKind.FULL, 16, (PAGE,) * LAYERS),))
    return EngineMemory(PageShape("test", geometry, 16 * BLOCKS, one_allocation=request.param), CHUNKS)


def move(memory: EngineMemory, *, but: tuple[int, int, slice] | None = None) -> None:
    """Copy every page to where it should be loaded; of layer and position `but`, spare those bytes."""
    for number, layer in enumerate(memory.pages.layers):
        for chunk in range(CHUNKS):
            for position, (source, target) in enumerate(zip(memory.stored(chunk), memory.loaded(chunk), strict=True)):
                spared = layer[target].copy()
                layer[target] = layer[source]
                if but and but[:2] == (number, chunk * BLOCKS + position):
                    layer[target, but[2]] = spared[but[2]]


@pytest.mark.parametrize("scattered", [True, False])
def test_a_prompt_that_was_moved_is_verified_page_by_page(memory: EngineMemory, scattered: bool) -> None:
    for _ in range(2):
        memory.new_prompt(scattered=scattered)
        assert memory.verified_pages() == 0
        move(memory)
        assert memory.verified_pages() == PAGES


@pytest.mark.parametrize("part", [slice(0, PAGE), slice(0, 1), slice(PAGE - 1, PAGE)], ids=["all", "first", "last"])
def test_a_page_of_which_a_byte_was_not_moved_is_not_verified(memory: EngineMemory, part: slice) -> None:
    memory.new_prompt(scattered=True)
    move(memory)
    memory.new_prompt(scattered=True)
    move(memory, but=(1, 5, part))

    assert memory.verified_pages() == PAGES - 1


def test_stored_and_loaded_blocks_are_all_blocks_once(memory: EngineMemory) -> None:
    for scattered in (True, False):
        memory.new_prompt(scattered=scattered)
        blocks = [block for chunk in range(CHUNKS) for block in memory.stored(chunk) + memory.loaded(chunk)]
        assert sorted(blocks) == list(range(2 * CHUNKS * BLOCKS))


def test_regular_blocks_are_every_second_one_as_the_yardstick_has_them(memory: EngineMemory) -> None:
    memory.new_prompt(scattered=False)

    assert memory.stored(1) == [8, 10, 12, 14]
    assert memory.loaded(1) == [9, 11, 13, 15]


def test_pages_lie_as_an_engines_allocator_puts_them(memory: EngineMemory) -> None:
    assert {layer.ctypes.data % 4096 for layer in memory.pages.layers} == {ENGINE_ALIGNMENT}


def test_the_yardstick_moves_as_many_bytes_as_an_object_has_and_touches_no_other_cell() -> None:
    geometry = Geometry((KVGroup(GroupKind.FULL, 16, (PAGE,) * 5),))
    shape = PageShape("test", geometry, 16 * BLOCKS)
    cell = 4 * PAGE + 512  # a cell with an unused end
    arena = np.zeros(20 * cell, np.uint8)
    plain = PlainCopy(shape, [np.array([[0, 2, 4, 6, 8]]), np.array([[10, 12, 14, 16, 18]])], cell)

    plain.new_prompt()
    plain.store(arena, 0)

    assert np.count_nonzero(arena) == shape.object_bytes == 20 * PAGE
    for number in (10, 12, 14, 16, 18):
        assert arena[number * cell : number * cell + 4 * PAGE].all()
    arena[:] = 7
    plain.new_prompt()
    plain.load(arena, 0)
    assert np.count_nonzero(plain._pool == 7) == shape.object_bytes
