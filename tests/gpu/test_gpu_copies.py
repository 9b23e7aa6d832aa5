"""The scenarios of copies between a device and the arena, on a GPU: `make test-gpu`. Torch and lmcache are enough."""

import importlib.util

import pytest

pytest.importorskip("torch", reason="torch moves pages between an accelerator and the arena, and is not installed")

import ctypes

import numpy as np
import torch
from device_scenarios import DeviceScenarios
from device_stand import BLOCKS, STORAGES, WAYS, Site, mapped, wait_for

from lmcache.core.arena import SLAB_BYTES
from lmcache.engines.copying import load_objects, store_objects
from lmcache.engines.cuda import CudaLocks, copy_many
from lmcache.engines.pinning import Everywhere, Pins
from lmcache.engines.staging import Device, Way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.may_leave("torch and CUDA keep threads, descriptors and memory for the process"),
]


@pytest.fixture(params=WAYS, ids=lambda way: way.value)
def way(request: pytest.FixtureRequest) -> Way:
    if request.param in {Way.KERNEL, Way.REACH} and importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton is installed")
    return request.param


@pytest.fixture
def device() -> str:
    return "cuda"


class TestOnAGpu(DeviceScenarios):
    """Every scenario, in every way."""


def test_an_arena_is_locked_for_the_device_and_unlocked_before_it_goes() -> None:
    pins = Pins(CudaLocks(torch.device("cuda", torch.cuda.current_device())))
    size = 2 * SLAB_BYTES + (4 << 20)
    for _ in range(2):  # the second time would fail were the first one not undone
        with mapped(size, pins) as arena:
            address = ctypes.addressof(ctypes.c_char.from_buffer(arena.memory))
            wait_for(lambda: pins.reaches(address, size))  # noqa: B023
            host = torch.from_numpy(np.frombuffer(arena.memory, np.uint8))
            assert host.is_pinned()
            del host
        assert not pins.reaches(address, 1)


def test_cells_on_both_sides_of_two_locks_cross(way: Way) -> None:
    pins = Pins(CudaLocks(torch.device("cuda", torch.cuda.current_device())))
    cell = 3 << 20  # no divisor of a slab, so one cell lies in two
    site = Site(*STORAGES[2]("cuda", [1 << 20] * 3), 2, cell, way=way, reach=pins)
    size = 2 * SLAB_BYTES
    with mapped(size, pins) as worker:
        arena = np.frombuffer(worker.memory, np.uint8)
        address = int(arena.ctypes.data)
        wait_for(lambda: pins.reaches(address, size))
        last = SLAB_BYTES // cell
        objects = [([last - 1, last], [3, 1]), ([last + 1, last + 3], [0, 2])]
        expected, before = arena.copy(), site.memory()
        for cells, ids in objects:
            site.oracle(before).store(expected, cells, ids)
        store_objects(site.copier, arena, objects)
        assert arena.tobytes() == expected.tobytes()
        for cells, ids in objects:
            site.oracle(before).load(expected, cells, [block + 4 for block in ids])
        load_objects(arena, [(site.copier, cells, [block + 4 for block in ids], 0) for cells, ids in objects])
        assert {at: w.tobytes() for at, w in site.memory().items()} == {at: w.tobytes() for at, w in before.items()}
        del arena


def test_batched_copies_are_found_where_the_driver_has_them() -> None:
    assert (copy_many(torch.device("cuda")) is not None) == (driver_version() >= 12080)


def driver_version() -> int:
    version = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
    return version.value


@pytest.mark.usefixtures("device")
def test_a_cuda_graph_replays_the_same_beside_copies(way: Way) -> None:
    site = Site(*STORAGES[2]("cuda", [4096] * 4), 4, 1 << 16, way=way, reach=Everywhere())
    kernels = Device(torch.device("cuda"))
    site_arena = torch.empty(site.arena_bytes, dtype=torch.uint8, pin_memory=True)
    arena = np.asarray(site_arena.numpy())
    site.copier.store(arena, [0], [1, 2, 3, 4])  # whatever is made at first use is made now
    value = torch.zeros(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
    for turn in range(1, 20):
        graph.replay()
        with kernels.behind_step():
            site.copier.begin_store(arena, [0], [turn % BLOCKS, 2, 3, 4])
            graph.replay()
            site.copier.finish()
    torch.cuda.synchronize()
    assert value.eq(38).all()
    expected = arena.copy()
    site.oracle(site.memory()).store(expected, [0], [19, 2, 3, 4])
    assert arena.tobytes() == expected.tobytes()
