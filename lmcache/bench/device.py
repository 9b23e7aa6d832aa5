"""Row 10: pages between a device and the arena, in every way there is, against one large pinned copy of the same bytes.

Nothing but the copies: no server, no messages. The pages of every layer are an allocation of their own, as vLLM's are,
and blocks are at random places. `cpu` as the device shows that the bench works; its figures mean nothing.
"""

import contextlib
import functools
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs
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
LOCK_SECONDS = 15.0
"""An arena that is not locked by then is measured as it is, and the notes say so."""
FIGURE_SECONDS = 2.5
"""A figure takes so long at most, once it has three samples."""
BUDGET_SECONDS = 240.0
"""No way is begun after it: a machine with a GPU may be lent for minutes."""
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


@attrs.define
class DeviceRun:
    """What has been measured so far, and what went otherwise."""

    device: torch.device
    quick: bool
    step: Step
    progress: Callable[["DeviceRun"], None]
    """Called whenever there is more, so that a run that is cut short has not been in vain."""
    figures: list[Figure] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    clock: Callable[[], float] = time.monotonic
    _began: float = 0.0

    def measure(self) -> None:
        """At most about `BUDGET_SECONDS`. Raises nothing of what a way does wrong: the notes have it."""
        self._began = self.clock()
        budget = (4 if self.quick else 256) * MIB
        for shape in device_shapes():
            objects = max(2, budget // shape.object_bytes)
            cells = object_layout(shape.group, shape.chunk_size, CELL_BYTES).cells
            with self._arena(objects * cells * CELL_BYTES, f"{shape}") as arena:
                for way in self._ways():
                    self._try(f"{shape}, {way.value}", functools.partial(self._copies, shape, way, arena, objects))
        # the first shape, all ways
        shape = device_shapes()[0]
        cells = object_layout(shape.group, shape.chunk_size, CELL_BYTES).cells
        with self._arena(4 * cells * CELL_BYTES, "a matrix product") as arena:
            for way in self._ways():
                self._try(f"a matrix product beside {way.value}", functools.partial(self._slowed, shape, way, arena))

    def _copies(self, shape: PageShape, way: Way, arena: Bytes, objects: int) -> Iterator[Figure]:
        return _Bench(self.device, shape, way, arena, objects).measure(2 if self.quick else 15)

    def _slowed(self, shape: PageShape, way: Way, arena: Bytes) -> Iterator[Figure]:
        bench = _Bench(self.device, shape, way, arena, 4)
        yield _slowed(bench, self.device, f"{shape}, {way.value}", 2 if self.quick else 9, quick=self.quick, way=way)

    def _try(self, what: str, measure: Callable[[], Iterator[Figure]]) -> None:
        if self.clock() - self._began > BUDGET_SECONDS:
            self._note(f"{what}: left out, {BUDGET_SECONDS:g} s were over")
            return
        self.step(what)
        began = self.clock()
        try:
            self.figures += measure()
        except Exception as error:  # noqa: BLE001 - on a machine that is lent for minutes the others still count
            text = " ".join(str(error).split())[:300]
            self._note(f"{what}: FAILED after {self.clock() - began:.1f} s, {type(error).__name__}: {text}")
        self.progress(self)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _ways(self) -> Iterator[Way]:
        """The ways that can run here."""
        interpreted = os.environ.get("TRITON_INTERPRET")
        kernels = importlib.util.find_spec("triton") and (self.device.type != "cpu" or interpreted)
        for way in Way:
            if way in {Way.KERNEL, Way.REACH} and not kernels:
                self._note(f"{way.value}: left out, it takes Triton, and a GPU or TRITON_INTERPRET=1")
            else:
                yield way

    @contextlib.contextmanager
    def _arena(self, size: int, what: str) -> Iterator[Bytes]:
        with _arena(self.device, size, self.step) as (arena, locked):
            if not locked:
                self._note(
                    f"{what}: the arena of {size >> 20} MiB could not be locked whole within {LOCK_SECONDS:g} s, so "
                    "`reach` and `batch` went through buffers"
                )
            yield arena


@contextlib.contextmanager
def _arena(device: torch.device, size: int, step: Step) -> Iterator[tuple[Bytes, bool]]:
    """An arena as a worker maps it, locked for the device if that is allowed; whether it is."""
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
        yield arena, reach.reaches(int(arena.ctypes.data), size)
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
        times: list[tuple[float, float]] = []
        until = time.monotonic() + FIGURE_SECONDS
        while len(times) < min(3, samples) or (len(times) < samples and time.monotonic() < until):
            times.append((self._seconds(copy), self._seconds(plain)))
        samples = len(times)
        speeds = {"GiB/s": 1 / median(t for t, _ in times), "one pinned copy, GiB/s": 1 / median(t for _, t in times)}
        return figure(
            ROW,
            what,
            f"{self._shape}, {self._way.value}",
            [of_plain / of_copy for of_copy, of_plain in times],
            "× one pinned copy",
            # the others are there to be compared with the one that is used
            target=TARGET if self._way is _default() else None,
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


def _slowed(bench: _Bench, device: torch.device, subject: str, samples: int, *, quick: bool, way: Way) -> Figure:
    """By how much a matrix product takes longer while objects are stored and loaded."""
    size = 64 if quick else 8192 if device.type == "cuda" else 512
    one = torch.rand(size, size, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    kernels = Device(device)

    def product() -> float:
        kernels.settle()
        began = time.perf_counter()
        for _ in range(20):
            torch.mm(one, one)
        kernels.reached(kernels.mark())
        return time.perf_counter() - began

    product()  # what is made at first use is made now
    pairs = [_beside(bench, kernels, product) for _ in range(samples)]
    return figure(
        ROW,
        "a matrix product is slowed by",
        subject,
        [100 * (beside / alone - 1) for alone, beside, _ in pairs],
        "%",
        target=SLOWED if way is _default() else None,
        counts={"objects_moved_meanwhile": sum(moved for _, _, moved in pairs)},
    )


def _default() -> Way:
    """The way that is used without a word, or that the environment names."""
    return chosen_way() or Way.GATHER


def _beside(bench: _Bench, kernels: Device, product: Callable[[], float]) -> Sequence[Any]:
    """Seconds of the product alone, beside stores and loads, and how many objects went meanwhile."""
    alone = product()
    stop, going, moved = threading.Event(), threading.Event(), [0]

    failed: list[Exception] = []

    def copy() -> None:
        try:
            with kernels.own_stream():
                while not stop.is_set():
                    bench.store()
                    bench.load()
                    moved[0] += 8
                    going.set()
        except Exception as error:  # noqa: BLE001 - raised again below, in the thread that waits
            failed.append(error)
            going.set()

    thread = threading.Thread(target=copy, name="lmcache-bench-copies")
    thread.start()
    try:
        going.wait()
        beside = product()
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
    return alone, beside, moved[0]
