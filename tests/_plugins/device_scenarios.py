"""What copies between a device and the arena come to, whatever the device and the way: subclass `DeviceScenarios`.

Every comparison is of all bytes, those that must not change included, with what the CPU's copier makes of the same.
"""

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from device_stand import (
    BLOCKS,
    OBJECTS,
    REACHES,
    SHAPES,
    STORAGES,
    MemoryLocks,
    Nowhere,
    Site,
    Storage,
    mapped,
    poisoned,
)

from lmcache.bench.subject import ServerUnderTest, links
from lmcache.core.cells import unpack_cells
from lmcache.core.keys import HASH_BYTES
from lmcache.engines import staging
from lmcache.engines.copying import CopyPlans, load_objects, mapped_arena, store_objects
from lmcache.engines.crossing import RING_BUFFERS
from lmcache.engines.pinning import Pins
from lmcache.engines.staging import Device, StagedCopier, StagedPages, Way
from lmcache.errors import LinkLost
from lmcache.geometry.groups import Geometry

LAYERS = [1152] * 3
"""Page bytes of the scenarios that need no particular shape."""


class DeviceScenarios:
    """Fixtures `device` and `way` say what is tried."""

    # ------------------------------------------------------------------------------------------------------ bytes

    @pytest.mark.parametrize("reach", REACHES)
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage.__name__)
    def test_every_byte_is_where_the_cpus_copier_puts_it(
        self, device: str, way: Way, storage: Storage, shape: str, reach: str
    ) -> None:
        sizes, blocks, cell = SHAPES[shape]
        site = Site(*storage(device, sizes), blocks, cell, way=way)
        random = np.random.default_rng(5)
        arena = poisoned(site.arena_bytes)
        with pinned(device, arena) as arena:
            site = Site(site.tensors, site.views, blocks, cell, way=way, reach=REACHES[reach](len(arena)))
            objects = [(cells, blocks_of(random, blocks)) for cells in site.cells(random, OBJECTS)]

            before, expected = site.memory(), arena.copy()
            for cells, ids in objects:
                site.oracle(before).store(expected, cells, ids)
            store_objects(site.copier, arena, objects)
            assert arena.tobytes() == expected.tobytes()
            assert same(site.memory(), before), "a store wrote to pages"

            # all parts of a chunk, into any blocks: pages that are not asked for keep what they hold
            for (cells, _), (first, count) in zip(itertools.cycle(objects), parts(blocks), strict=False):
                into = blocks_of(random, count)
                oracle = site.oracle(before)
                oracle.load(expected, cells, into, first)
                load_objects(arena, [(site.copier, cells, into, first)])
                assert same(site.memory(), before)
            assert arena.tobytes() == expected.tobytes(), "a load wrote to the arena"

    def test_groups_in_the_same_memory_leave_each_others_pages_alone(self, device: str, way: Way) -> None:
        memory = torch.randint(0, 256, (BLOCKS * 4096,), dtype=torch.uint8, device=device)
        # pages of two sizes begin at the same bytes, as where hybrid models' groups share tensors
        large = Site([memory], [staging.PageView(0, 4096, 4096)], 2, 8192, way=way)
        small = Site([memory] * 2, [staging.PageView(at, 4096, 512) for at in (0, 1024)], 2, 8192, way=way)
        arena = poisoned(large.arena_bytes)
        with pinned(device, arena) as arena:
            large.copier.store(arena, [1], [3, 4])
            small.copier.store(arena, [4], [7, 8])
            before = large.memory()
            large.oracle(before).load(arena, [1], [9, 10])
            small.oracle(before).load(arena, [4], [11, 12])
            large.copier.load(arena, [1], [9, 10])
            small.copier.load(arena, [4], [11, 12])
        assert same(small.memory(), before)

    def test_loading_nothing_changes_nothing(self, device: str, way: Way) -> None:
        site = Site(*STORAGES[0](device, LAYERS), 4, 4096, way=way)
        before = site.memory()
        with pinned(device, poisoned(site.arena_bytes)) as arena:
            site.copier.load(arena, site.cells(np.random.default_rng(1), 1)[0], [], 2)
        assert same(site.memory(), before)

    # ---------------------------------------------------------------------------------------- failed and cancelled

    def test_what_is_not_there_is_refused_before_a_byte_moves(self, device: str, way: Way) -> None:
        site = Site(*STORAGES[2](device, LAYERS), 4, 4096, way=way)
        cells = site.cells(np.random.default_rng(1), 1)[0]
        before = site.memory()
        with pinned(device, poisoned(site.arena_bytes)) as arena:
            kept = arena.copy()
            for ids in ([0, 1, 2, BLOCKS], [0, 1, 2, -1], [0, 1, 2], [0] * 5):
                with pytest.raises(IndexError):
                    site.copier.store(arena, cells, ids)
                with pytest.raises(IndexError):
                    site.copier.load(arena, cells, ids, 2)
            for wrong in (cells[1:], [*cells[1:], -1], [*cells[1:], OBJECTS * len(cells)]):
                with pytest.raises(IndexError):
                    site.copier.store(arena, wrong, [0, 1, 2, 3])
                with pytest.raises(IndexError):
                    site.copier.load(arena, wrong, [0, 1, 2, 3])
            assert arena.tobytes() == kept.tobytes()
        assert same(site.memory(), before)

    @pytest.mark.parametrize("reach", REACHES)
    def test_a_transfer_that_fails_half_way_leaves_nothing_in_flight(self, device: str, way: Way, reach: str) -> None:
        with mapped(Site(*STORAGES[2](device, LAYERS), 4, 4096).arena_bytes, Nowhere()) as worker:
            memory = worker.memory
            arena = np.frombuffer(memory, np.uint8)
            with locked(device, arena):
                site = Site(*STORAGES[2](device, LAYERS), 4, 4096, way=way, reach=REACHES[reach](len(arena)))
                whole = [(cells, [1, 2, 3, 4]) for cells in site.cells(np.random.default_rng(1), OBJECTS)]
                broken = [*whole[:3], (whole[3][0], [1, 2, 3, BLOCKS]), whole[4]]
                expected = arena.copy()
                for cells, ids in whole[:3]:
                    site.oracle(site.memory()).store(expected, cells, ids)
                with pytest.raises(IndexError):
                    store_objects(site.copier, arena, broken)
                # cells may be given to somebody else from here on: what was begun before is done
                assert arena.tobytes() == expected.tobytes()
                before = site.memory()
                for cells, ids in whole[:3]:
                    site.oracle(before).load(expected, cells, [block + 5 for block in ids])
                with pytest.raises(IndexError):
                    load_objects(
                        arena, [(site.copier, cells, [block + 5 for block in ids], 0) for cells, ids in broken]
                    )
                assert same(site.memory(), before)
            del arena, expected
            gc.collect()
            memory.release()
            # `mapped` unmaps next; a view that some copier kept would show in the leak check

    def test_a_link_that_ends_while_copies_are_in_flight_unmaps_the_arena_after_them(
        self, device: str, way: Way
    ) -> None:
        pins = Pins(MemoryLocks()) if device == "cpu" else staging.reach_of(torch.device(device))
        tensors, views = STORAGES[2](device, LAYERS)
        site = Site(tensors, views, 4, 4096)
        geometry = Geometry((site.group,))
        with (
            ServerUnderTest("--l1-size-gb", "0.0625", "--chunk-size", "64") as server,
            links(server.address, geometry) as (_, worker),
        ):
            pages = StagedPages(tensors, views, BLOCKS, way=way, reach=pins)
            copier, per_object = CopyPlans(geometry, {0: lambda layout, cell: StagedCopier(pages, layout, cell)}).of(
                worker, 0
            )
            reserved = worker.reserve("", b"", bytes(range(3 * HASH_BYTES)), 0, 0)
            cells = unpack_cells(reserved.cells)
            assert len(cells) == 3 * per_object
            objects = [(cells[number * per_object :][:per_object], [number, 9, 5, 7]) for number in range(3)]
            with mapped_arena(worker) as arena:
                address = int(arena.ctypes.data)
                assert isinstance(copier, StagedCopier)
                copier.begin_store(arena, *objects[0])
                worker.close()
                for each in objects[1:]:
                    copier.begin_store(arena, *each)
                copier.finish()
                first = [int(arena[cell * worker.cell_bytes]) for cell in cells[::per_object]]
                del arena
            assert first == [int(tensors[0][number * LAYERS[0]]) for number in range(3)]
            with pytest.raises(LinkLost), worker.copying():
                pass
            assert not pins.reaches(address, 1), "the arena's memory stayed locked"

    # -------------------------------------------------------------------------------------------- beside the model

    def test_a_store_takes_what_the_kernels_before_it_wrote(self, device: str, way: Way) -> None:
        site = Site(*STORAGES[2](device, LAYERS), 4, 4096, way=way)
        kernels = Device(torch.device(device))
        busy = torch.rand(2048 if device != "cpu" else 64, 2048 if device != "cpu" else 64, device=device)
        with pinned(device, poisoned(site.arena_bytes)) as arena:
            for value, cells in enumerate(site.cells(np.random.default_rng(1), 3), start=1):
                for _ in range(20):
                    busy = torch.tanh(busy @ busy)
                for tensor in site.tensors:
                    tensor.fill_(value)
                with kernels.behind_step():
                    store_objects(site.copier, arena, [(cells, [1, 2, 3, 4])])
                # from here on the engine may do with its blocks what it likes
                for tensor in site.tensors:
                    tensor.fill_(255)
                expected = arena.copy()
                site_memory = {at: np.full_like(whole, value) for at, whole in site.memory().items()}
                site.oracle(site_memory).store(expected, cells, [1, 2, 3, 4])
                assert arena.tobytes() == expected.tobytes()

    def test_other_pages_may_be_written_meanwhile(self, device: str, way: Way) -> None:
        site = Site(*STORAGES[2](device, LAYERS), 4, 4096, way=way)
        kernels = Device(torch.device(device))
        others = [tensor.view(BLOCKS, -1)[BLOCKS // 2 :] for tensor in site.tensors]
        random = np.random.default_rng(2)
        with pinned(device, poisoned(site.arena_bytes)) as arena:
            for turn in range(4):
                objects = [
                    (cells, random.permutation(BLOCKS // 2)[:4].tolist()) for cells in site.cells(random, OBJECTS)
                ]
                before, expected = site.memory(), arena.copy()
                for cells, ids in objects:
                    site.oracle(before).store(expected, cells, ids)
                with kernels.behind_step():
                    for cells, ids in objects:
                        site.copier.begin_store(arena, cells, ids)
                        with self.as_the_engine(device):
                            for other in others:
                                other.add_(turn + 1)
                    site.copier.finish()
                assert arena.tobytes() == expected.tobytes()

    @staticmethod
    def as_the_engine(device: str) -> Any:
        """A context in which kernels go where a model's do."""
        module = torch.get_device_module(device)
        return module.stream(module.default_stream() if device != "cpu" else module.Stream())

    @pytest.mark.parametrize("reach", REACHES)
    def test_what_is_in_flight_is_bounded_and_the_order_kept(
        self, device: str, way: Way, reach: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = Site(*STORAGES[2](device, LAYERS), 4, 4096, way=way)
        monkeypatch.setattr(staging, "IN_FLIGHT_BYTES", 2 * site.layout.payload_bytes)
        with pinned(device, poisoned(site.arena_bytes)) as arena:
            site = Site(site.tensors, site.views, 4, 4096, way=way, reach=REACHES[reach](len(arena)))
            random = np.random.default_rng(4)
            begun, most = [], 0
            for _ in range(6):
                cells = site.cells(random, OBJECTS)[0]
                ids = blocks_of(random, 4)
                site.copier.begin_store(arena, cells, ids)
                begun.append((cells, ids))
                most = max(most, len(site.copier._begun))
            site.copier.finish()
            expected = arena.copy()
            for cells, ids in begun:  # cells of a later one may have been an earlier one's: the last one counts
                site.oracle(site.memory()).store(expected, cells, ids)
            assert arena.tobytes() == expected.tobytes()
            assert most == 2
            assert len(site.copier._crossing._buffers) <= RING_BUFFERS


def blocks_of(random: np.random.Generator, count: int) -> list[int]:
    return [int(block) for block in random.permutation(BLOCKS)[:count]]


def parts(blocks: int) -> Iterator[tuple[int, int]]:
    for first in range(blocks):
        for count in range(1, blocks - first + 1):
            yield first, count


def same(one: dict[int, Any], other: dict[int, Any]) -> bool:
    return {at: whole.tobytes() for at, whole in one.items()} == {at: whole.tobytes() for at, whole in other.items()}


def locked(device: str, arena: Any) -> Any:
    """The bytes of `arena` locked for the device, while the context lasts: only what is may be given to it."""
    import contextlib

    stack = contextlib.ExitStack()
    if device != "cpu":
        from lmcache.engines.cuda import CudaLocks

        locks = CudaLocks(torch.device(device))
        locks.lock(int(arena.ctypes.data), arena.nbytes)
        stack.callback(locks.unlock, int(arena.ctypes.data))
    return stack


class pinned:  # noqa: N801 - reads as what it is
    """An arena with these bytes, page-aligned and locked for the device."""

    def __init__(self, device: str, content: Any) -> None:
        import mmap

        self._map = mmap.mmap(-1, len(content))
        self._arena = np.frombuffer(self._map, np.uint8)
        self._arena[:] = content
        self._locked = locked(device, self._arena)

    def __enter__(self) -> Any:
        return self._arena

    def __exit__(self, *_: object) -> None:
        self._locked.close()
