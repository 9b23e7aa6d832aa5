"""Row 10: pages between a device and the arena, in every way there is, against one large pinned copy of the same bytes.

Nothing but the copies: no server, no messages. The pages of every layer are an allocation of their own, as vLLM's are,
and blocks are at random places. `cpu` as the device shows that the bench works; its figures mean nothing.
"""

import contextlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from lmcache.bench.figures import Figure, Step, at_least, at_most, figure
from lmcache.bench.shapes import PageShape, device_shapes
from lmcache.core.arena import MappedArena, create_segment
from lmcache.engines.copy import Bytes
from lmcache.engines.copying import PageView, load_objects, store_objects
from lmcache.engines.staging import Device, StagedCopier, StagedPages, Way, chosen_way, reach_of
from lmcache.errors import ConfigError, LMCacheError
from lmcache.geometry.layout import object_layout

ROW = 10
CELL_BYTES = 1 << 20
LOCK_SECONDS = 120.0
MIB = 1 << 20

TARGET = at_least(0.9)
SLOWED = at_most(5.0)


def open_device(name: str) -> torch.device:
    """The device to measure. Raises ConfigError where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} finds no CUDA device here",
            remedy="run it where an NVIDIA GPU is, with a CUDA build of torch; `--device cpu` tries the bench itself",
        )
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def describe_device(device: torch.device) -> str:
    """Card, driver and torch, for whoever reads the figures later."""
    if device.type != "cuda":
        return f"{device} in a device's place, torch {torch.__version__}"
    driver = Path("/proc/driver/nvidia/version")
    version = driver.read_text().splitlines()[0] if driver.exists() else "driver unknown"
    return f"{torch.cuda.get_device_name(device)}; {version}; torch {torch.__version__}, CUDA {torch.version.cuda}"


def measure_device(device: torch.device, quick: bool, step: Step) -> list[Figure]:
    """Some minutes on a GPU. Raises LMCacheError when a byte comes back changed."""
    budget = (4 if quick else 256) * MIB
    figures: list[Figure] = []
    for shape in device_shapes():
        objects = max(2, budget // shape.object_bytes)
        cells = object_layout(shape.group, shape.chunk_size, CELL_BYTES).cells
        with _arena(device, objects * cells * CELL_BYTES, step) as arena:
            for way in _ways(device, step):
                step(f"{shape}, {way.value}")
                figures += _Bench(device, shape, way, arena, objects).measure(2 if quick else 15)
    return [*figures, *_slowed(device, quick, step)]


def _ways(device: torch.device, step: Step) -> Iterator[Way]:
    """The ways that can run here."""
    kernels = importlib.util.find_spec("triton") and (device.type != "cpu" or os.environ.get("TRITON_INTERPRET"))
    for way in Way:
        if way in {Way.KERNEL, Way.REACH} and not kernels:
            step(f"{way.value} is left out: it takes Triton, and a GPU or TRITON_INTERPRET=1")
        else:
            yield way


@contextlib.contextmanager
def _arena(device: torch.device, size: int, step: Step) -> Iterator[Bytes]:
    """An arena as a worker maps it, locked for the device if that is allowed."""
    descriptor = create_segment(size)
    try:
        mapped = MappedArena(descriptor, size)
    finally:
        os.close(descriptor)
    try:
        reach = reach_of(device)
        if reach.attendant is not None:
            mapped.attend(reach.attendant)
        mapped.prefault(size)
        arena = np.frombuffer(mapped.memory, np.uint8)
        until = time.monotonic() + LOCK_SECONDS
        while not reach.reaches(int(arena.ctypes.data), size) and time.monotonic() < until:
            step(f"locking {size >> 20} MiB")
            time.sleep(0.05)
        arena[:] = 0
        yield arena
    finally:
        mapped.close()


class _Bench:
    """One shape in one way."""

    def __init__(self, device: torch.device, shape: PageShape, way: Way, arena: Bytes, objects: int) -> None:
        self._device, self._shape, self._way, self._arena = Device(device), shape, way, arena
        sizes = shape.group.page_bytes
        blocks = 2 * objects * shape.blocks
        self._layers = [
            torch.randint(0, 256, (blocks, size), dtype=torch.uint8, device=device).contiguous() for size in sizes
        ]
        views = [PageView(0, size, size) for size in sizes]
        layout = object_layout(shape.group, shape.chunk_size, CELL_BYTES)
        self._copier = StagedCopier(StagedPages(self._layers, views, blocks, way=way), layout, CELL_BYTES)
        ids = np.random.default_rng(0).permutation(blocks).tolist()
        of, cells = shape.blocks, layout.cells
        self._cells = [list(range(number * cells, (number + 1) * cells)) for number in range(objects)]
        self._stored = [ids[number * of : (number + 1) * of] for number in range(objects)]
        self._loaded = [ids[(objects + number) * of : (objects + number + 1) * of] for number in range(objects)]
        self._bytes = objects * shape.object_bytes
        self._host = torch.ones(self._bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
        self._plain = torch.ones(self._bytes, dtype=torch.uint8, device=device)

    def store(self) -> None:
        """Every object, pages to arena."""
        store_objects(self._copier, self._arena, list(zip(self._cells, self._stored, strict=True)))

    def load(self) -> None:
        """Every object, arena to other pages."""
        load_objects(self._arena, [(self._copier, c, i, 0) for c, i in zip(self._cells, self._loaded, strict=True)])

    def measure(self, samples: int) -> Iterator[Figure]:
        """Both directions, each sample beside its yardstick; what came back is compared byte for byte."""
        self.store()
        self.load()
        self._verify()
        yield self._figure("store", self.store, lambda: self._host.copy_(self._plain, non_blocking=True), samples)
        for layer in self._layers:
            layer[torch.tensor(self._loaded).flatten().to(layer.device)] = 0
        yield self._figure("load", self.load, lambda: self._plain.copy_(self._host, non_blocking=True), samples)
        self._verify()

    def _figure(self, what: str, copy: Callable[[], None], plain: Callable[[], Any], samples: int) -> Figure:
        times = [(self._seconds(copy), self._seconds(plain)) for _ in range(samples)]
        speeds = {"GiB/s": 1 / median(t for t, _ in times), "one pinned copy, GiB/s": 1 / median(t for _, t in times)}
        return figure(
            ROW,
            what,
            f"{self._shape}, {self._way.value}",
            [of_plain / of_copy for of_copy, of_plain in times],
            "× one pinned copy",
            # the others are there to be compared with the one that is used
            target=TARGET if self._way is chosen_way() else None,
            beside={name: self._bytes / (1 << 30) * rate for name, rate in speeds.items()},
            counts={"bytes_moved": samples * self._bytes, "object_bytes": self._shape.object_bytes},
        )

    def _seconds(self, run: Callable[[], Any]) -> float:
        self._device.settle()
        began = time.perf_counter()
        run()
        self._device.settle()
        return time.perf_counter() - began

    def _verify(self) -> None:
        stored, loaded = (torch.tensor(ids).flatten() for ids in (self._stored, self._loaded))
        for layer in self._layers:
            if not torch.equal(layer[stored.to(layer.device)], layer[loaded.to(layer.device)]):
                raise LMCacheError(f"pages came back changed, {self._way.value}: that is a bug, not a figure")


def _slowed(device: torch.device, quick: bool, step: Step) -> Iterator[Figure]:
    """By how much a matrix product takes longer while objects of the first shape are stored and loaded."""
    shape = device_shapes()[0]
    size = 64 if quick else 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    one = torch.rand(size, size, device=device, dtype=dtype)
    cells = object_layout(shape.group, shape.chunk_size, CELL_BYTES).cells
    kernels = Device(device)

    def product() -> float:
        kernels.settle()
        began = time.perf_counter()
        for _ in range(20):
            torch.mm(one, one)
        kernels.reached(kernels.mark())
        return time.perf_counter() - began

    with _arena(device, 4 * cells * CELL_BYTES, step) as arena:
        for way in _ways(device, step):
            step(f"a matrix product beside {way.value}")
            bench = _Bench(device, shape, way, arena, 4)
            pairs = [_beside(bench, kernels, product) for _ in range(2 if quick else 9)]
            yield figure(
                ROW,
                "a matrix product is slowed by",
                f"{shape}, {way.value}",
                [100 * (beside / alone - 1) for alone, beside, _ in pairs],
                "%",
                target=SLOWED if way is chosen_way() else None,
                counts={"objects_moved_meanwhile": sum(moved for _, _, moved in pairs)},
            )


def _beside(bench: _Bench, kernels: Device, product: Callable[[], float]) -> Sequence[Any]:
    """Seconds of the product alone, beside stores and loads, and how many objects went meanwhile."""
    alone = product()
    stop, going, moved = threading.Event(), threading.Event(), [0]

    def copy() -> None:
        with kernels.own_stream():
            while not stop.is_set():
                bench.store()
                bench.load()
                moved[0] += 8
                going.set()

    thread = threading.Thread(target=copy, name="lmcache-bench-copies")
    thread.start()
    try:
        going.wait()
        beside = product()
    finally:
        stop.set()
        thread.join()
    return alone, beside, moved[0]
