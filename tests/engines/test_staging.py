"""Copies between a device and the arena, with CPU tensors as the device's: everything but what calls CUDA itself.

The ways that need a kernel run in Triton's interpreter, in processes of their own: Triton decides at import.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch moves pages between an accelerator and the arena, and is not installed")

import ctypes
import logging

import numpy as np
import torch
from device_scenarios import DeviceScenarios
from device_stand import STORAGES, WAYS, MemoryLocks, Site, mapped, wait_for

from lmcache.core.arena import SLAB_BYTES
from lmcache.engines import cuda, staging
from lmcache.engines.crossing import Crossing
from lmcache.engines.cuda import MEMCPY_BATCH, BatchedCopies, check_device, copy_many
from lmcache.engines.pinning import Everywhere, Pins
from lmcache.engines.staging import Way, chosen_way
from lmcache.engines.way_choice import staged_maker
from lmcache.errors import ConfigError

KERNELS = {Way.KERNEL, Way.REACH}
CHILDS_WAY = "LMCACHE_TESTED_WAY"
"""The environment variable that tells a child which of these it tries."""
INTERPRETED = os.environ.get(CHILDS_WAY)

CHOICE = f"{Path(__file__).with_name('test_way_choice.py')}::test_what_really_works_here_is_measured_and_copies"

LESS = ("-k", "not partly and not out")
"""The interpreter is slow, and what lies between is the same whoever gathers."""


class TestOnTheCPU(DeviceScenarios):
    """The scenarios, in the ways that torch alone knows; in children with Triton's interpreter, the others."""

    @pytest.fixture
    def device(self) -> str:
        return "cpu"

    @pytest.fixture(
        params=[way for way in WAYS if (way.value == INTERPRETED if INTERPRETED else way not in KERNELS)],
        ids=lambda way: way.value,
    )
    def way(self, request: pytest.FixtureRequest) -> Way:
        return request.param


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton is installed")
@pytest.mark.timeout(600)
def test_the_kernels_pass_the_same_scenarios_in_tritons_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *LESS, f"{__file__}::TestOnTheCPU"]
    children = [
        subprocess.Popen(
            [*command, CHOICE] if way is Way.KERNEL else command,
            env={**os.environ, "TRITON_INTERPRET": "1", CHILDS_WAY: way.value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for way in KERNELS  # side by side: nothing is timed, and each takes half a minute
    ]
    outputs = [child.communicate()[0] for child in children]
    for child, output in zip(children, outputs, strict=True):
        assert child.returncode == 0, output[-4000:]
        assert "skipped" not in output.splitlines()[-1]


# -------------------------------------------------------------------------------------------------- many copies at once


@pytest.fixture
def batches() -> tuple[BatchedCopies, list[int]]:
    """What would call the driver, calling a function of the same signature that copies with the CPU."""
    counts: list[int] = []

    @MEMCPY_BATCH
    def copy(targets, sources, sizes, count, attributes, first, numbers, failed, stream):  # type: ignore[no-untyped-def]
        order = ctypes.c_uint.from_address(attributes).value
        if (order, ctypes.c_size_t.from_address(first).value, numbers, stream) != (1, 0, 1, 77):
            return 1
        words = [(ctypes.c_uint64 * count).from_address(address) for address in (targets, sources, sizes)]
        for target, source, size in zip(*words, strict=True):
            ctypes.memmove(target, source, size)
        counts.append(count)
        return 0

    many = BatchedCopies(ctypes.cast(copy, ctypes.c_void_p).value or 0, lambda: contextlib.nullcontext(77))
    many.function = copy  # type: ignore[attr-defined]  # it goes with its last reference, and a driver's does not
    return many, counts


@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage.__name__)
def test_a_batch_moves_every_piece_of_an_object_in_one_call(
    batches: tuple[BatchedCopies, list[int]], storage: staging.Any
) -> None:
    many, counts = batches
    site = Site(*storage("cpu", [656, 132]), 4, 1024, way=Way.BATCH, reach=Everywhere(), many=many)
    arena = np.zeros(site.arena_bytes, np.uint8)
    expected, memory = arena.copy(), site.memory()
    cells = site.cells(np.random.default_rng(1), 1)[0]
    site.oracle(memory).store(expected, cells, [9, 2, 5, 1])
    site.copier.store(arena, cells, [9, 2, 5, 1])
    assert arena.tobytes() == expected.tobytes()
    site.oracle(memory).load(expected, cells, [7, 8], 1)
    site.copier.load(arena, cells, [7, 8], 1)
    assert {at: w.tobytes() for at, w in site.memory().items()} == {at: w.tobytes() for at, w in memory.items()}
    assert counts == [len(site.layout.pieces), sum(piece.block in {1, 2} for piece in site.layout.pieces)]


class Streams:
    """As `torch.cuda`, for a stream that is the default one if its number is 0."""

    def __init__(self, current: int) -> None:
        self.order: list[str] = []
        self.current = self.stream(current)

    def stream(self, number: int) -> SimpleNamespace:
        made = SimpleNamespace(cuda_stream=number)
        made.wait_stream = lambda other: self.order.append(f"{number} waits for {other.cuda_stream}")
        return made

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return self.current

    def Stream(self, device: torch.device) -> SimpleNamespace:  # noqa: N802 - torch's name
        return self.stream(5)


@pytest.mark.parametrize(
    ("current", "order"),
    [(3, ["batch on 3"]), (0, ["5 waits for 0", "batch on 5", "0 waits for 5"])],
    ids=["a stream", "the default stream"],
)
def test_a_batch_never_goes_to_the_default_stream(
    current: int, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams(current)
    monkeypatch.setattr(torch, "get_device_module", lambda _: streams)
    named = cuda.NamedStreams(torch.device("cuda", 0))
    for _ in range(2):
        with named() as number:
            streams.order.append(f"batch on {number}")
    assert streams.order == order * 2


def test_pieces_that_may_lie_in_two_locks_of_memory_are_not_copied_one_by_one(
    batches: tuple[BatchedCopies, list[int]],
) -> None:
    many, counts = batches
    for cell, used in ((1 << 20, True), (3 << 20, False)):  # the latter divides no slab
        site = Site(*STORAGES[2]("cpu", [4096] * 2), 4, cell, way=Way.BATCH, reach=Everywhere(), many=many)
        arena = np.zeros(site.arena_bytes, np.uint8)
        site.copier.store(arena, [0], [9, 2, 5, 1])
        assert bool(counts) is used
        counts.clear()


def test_a_batch_that_the_driver_refuses_is_an_error() -> None:
    refuse = MEMCPY_BATCH(lambda *_: 700)
    many = BatchedCopies(ctypes.cast(refuse, ctypes.c_void_p).value or 0, lambda: contextlib.nullcontext(7))
    one = np.ones(1, np.uint64)
    with pytest.raises(OSError, match="cuMemcpyBatchAsync says 700, at copy 0 of 1"):
        many(one, one, one)


# ------------------------------------------------------------------------------------------------------------ the arena


def test_an_arena_is_locked_slab_by_slab_in_the_background_and_unlocked_before_it_goes() -> None:
    locks = MemoryLocks()
    pins = Pins(locks)
    size = SLAB_BYTES + (4 << 20)
    with mapped(size, pins) as arena:
        address = ctypes.addressof(ctypes.c_char.from_buffer(arena.memory))
        wait_for(lambda: pins.reaches(address, size))
        assert locks.held == {address: SLAB_BYTES, address + SLAB_BYTES: 4 << 20}
        assert locks.threads == {"lmcache-prefault"}
        assert not pins.reaches(address, size + 1)
        assert not pins.reaches(address + 4096, 1), "another arena's bytes are not this one's"
    assert locks.held == {}
    assert not pins.reaches(address, 1)


def test_half_a_slab_is_not_locked_before_the_other_half_is_there() -> None:
    locks = MemoryLocks()
    pins = Pins(locks)
    seen: list[tuple[int, int]] = []
    locks.lock = lambda address, length: seen.append((address, length))  # type: ignore[method-assign]
    size = 3 * SLAB_BYTES
    counts = []
    for stop in (1 << 20, SLAB_BYTES - 1, SLAB_BYTES + 5, 2 * SLAB_BYTES + 5, size):
        pins.mapped(1 << 30, stop, size)
        counts.append(len(seen))
    assert counts == [0, 0, 1, 2, 3]
    assert seen == [((1 << 30) + number * SLAB_BYTES, SLAB_BYTES) for number in range(3)]


def test_where_the_limit_is_reached_what_is_locked_stays_so_and_one_warning_says_what_to_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    locks = MemoryLocks(refuse_from=SLAB_BYTES)
    pins = Pins(locks)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # the second arena, after a restart of the server, is refused from the start
            with mapped(2 * SLAB_BYTES, pins) as arena:
                address = ctypes.addressof(ctypes.c_char.from_buffer(arena.memory))
                wait_for(lambda: address in pins._refused)  # noqa: B023
                reached = pins.reaches(address, SLAB_BYTES), pins.reaches(address, SLAB_BYTES + 1)
                assert reached == (bool(locks.held), False)
    assert locks.held == {}
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning == (
        "lmcache: 64 of 128 MiB of the cache's memory are locked for the device, and no more can be: the limit is "
        "reached. The rest is copied through buffers, which is slower. Raise the limit on locked memory of this "
        "process (`ulimit -l unlimited`; for a container `--ulimit memlock=-1`), or give the server a smaller L1"
    )


@pytest.mark.parametrize(
    ("used", "cells", "runs"),
    [
        ([64, 64, 64, 10], [3, 4, 5, 6], [(192, 0, 202)]),
        ([64, 64, 64, 10], [6, 5, 4, 3], [(384, 0, 64), (320, 64, 64), (256, 128, 64), (192, 192, 10)]),
        ([60, 60, 10], [0, 1, 2], [(0, 0, 60), (64, 60, 60), (128, 120, 10)]),
    ],
    ids=["adjacent", "backwards", "with gaps"],
)
def test_cells_that_follow_each_other_without_a_gap_cross_in_one_copy(
    used: list[int], cells: list[int], runs: list[tuple[int, int, int]]
) -> None:
    crossing = Crossing(torch.device("cpu"), Everywhere(), used, 64)
    assert [(run.place, run.start, run.length) for run in crossing._runs(cells)] == runs


def test_no_copy_crosses_from_one_lock_of_memory_to_the_next() -> None:
    cell = 3 << 20  # no divisor of a slab
    crossing = Crossing(torch.device("cpu"), Everywhere(), [cell, cell], cell)
    last = SLAB_BYTES // cell
    assert [(run.place, run.start, run.length) for run in crossing._runs([last, last + 1])] == [
        (last * cell, 0, SLAB_BYTES - last * cell),
        (SLAB_BYTES, SLAB_BYTES - last * cell, (last + 2) * cell - SLAB_BYTES),
    ]


# ------------------------------------------------------------------------------------------------------ what is refused


def test_accelerators_that_nobody_has_tried_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_device(torch.device("cpu"))
    check_device(torch.device("cuda", 1))
    with pytest.raises(ConfigError) as refused:
        check_device(torch.device("xpu", 0))
    assert str(refused.value) == (
        "the KV caches are on xpu:0, a kind of device that lmcache has not been tried on; "
        "run without the connector; CUDA devices and CPUs are served"
    )
    monkeypatch.setattr(torch.version, "hip", "7.2")
    with pytest.raises(ConfigError, match=r"on cuda:0 of ROCm 7\.2, which lmcache has not been tried on"):
        check_device(torch.device("cuda", 0))


@pytest.mark.parametrize("word", ["", "batch", "measure"])
@pytest.mark.parametrize(
    ("kind", "hip", "told"), [("xpu", None, "xpu:0, a kind of device"), ("cuda", "7.2", "cuda:0 of ROCm 7.2")]
)
def test_pages_on_accelerators_that_nobody_has_tried_are_refused_before_anything_is_done(
    kind: str, hip: str | None, told: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setenv("LMCACHE_DEVICE_COPY", word)
    tensor = SimpleNamespace(device=torch.device(kind, 0))  # whatever else is asked of it would raise
    with pytest.raises(ConfigError, match=f"the KV caches are on {told}.*run without the connector"):
        staged_maker([tensor], [staging.PageView(0, 64, 64)], 4)  # type: ignore[list-item]


def test_the_way_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_DEVICE_COPY", raising=False)
    assert chosen_way() is Way.GATHER
    monkeypatch.setenv("LMCACHE_DEVICE_COPY", "reach")
    assert chosen_way() is Way.REACH
    monkeypatch.setenv("LMCACHE_DEVICE_COPY", "fast")
    with pytest.raises(ConfigError) as refused:
        chosen_way()
    assert str(refused.value) == (
        "LMCACHE_DEVICE_COPY is 'fast'; known are gather, kernel, reach, batch, measure; or leave it unset"
    )
    monkeypatch.setenv("LMCACHE_DEVICE_COPY", "measure")
    assert chosen_way() is None


def test_a_cpu_has_no_batched_copies_and_no_node_of_its_own() -> None:
    assert copy_many(torch.device("cpu")) is None
    assert staging.Device(torch.device("cpu")).memory_node == -1


@pytest.mark.parametrize(
    ("slot", "text", "node"),
    [
        ("0000:c1:00.0", "1\n", 1),
        ("0000:c1:00.0", "-1\n", -1),  # a host of one node, or a firmware that does not tell
        ("0000:c2:00.0", "1\n", -1),  # another card's
    ],
)
def test_the_node_of_a_device_is_what_the_kernel_says_of_its_slot(
    slot: str, text: str, node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(cuda, "PCI_DEVICES", tmp_path)
    (tmp_path / slot).mkdir()
    (tmp_path / slot / "numa_node").write_text(text)
    assert cuda.device_node(torch.device("cuda", 0)) == node
    del card.pci_domain_id  # as with older versions of torch
    assert cuda.device_node(torch.device("cuda", 0)) == -1


def test_a_device_without_a_number_is_the_one_that_its_thread_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(current_device=lambda: 3))
    assert staging.Device(torch.device("cuda")).device == torch.device("cuda", 3)
    assert staging.Device(torch.device("cuda", 1)).device == torch.device("cuda", 1)


def test_memory_that_torch_fails_to_lock_costs_speed_only(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(address: int, size: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    locks = MemoryLocks()
    locks.lock = refuse  # type: ignore[method-assign]
    pins = Pins(locks)
    pins.mapped(1 << 30, SLAB_BYTES, SLAB_BYTES)
    assert not pins.reaches(1 << 30, 1)
    assert "no more can be: CUDA error: out of memory" in caplog.text
