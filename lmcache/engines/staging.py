"""Copies between pages on an accelerator and the arena. Imports torch; works on CPU tensors, where it can be proved.

Pages are gathered on the device into one run of bytes, which crosses in few large copies, or they cross one by one:
`Way` has the choices. A copier *begins* copies on the calling thread's stream, and `finish` waits for all of them, so
that the device is never idle between two objects. What calls CUDA itself is in cuda.py, the kernel in page_kernels.py.
"""

import contextlib
import enum
import functools
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lmcache.core.arena import SLAB_BYTES, ArenaAttendant
from lmcache.engines.copy import Bytes
from lmcache.engines.copying import PageView
from lmcache.engines.crossing import Crossing
from lmcache.engines.cuda import CopyMany, CudaLocks, check_device, copy_many, device_node
from lmcache.engines.moving import WIDE, Gatherer, KernelMover, PieceMover, Straight, TorchGatherer, on_device
from lmcache.engines.pinning import Everywhere, Pins, Reach
from lmcache.errors import ConfigError
from lmcache.geometry.layout import ObjectLayout

IN_FLIGHT_BYTES = 128 << 20
"""Begun by one copier and not done, before it waits for the first of them."""

SETTING = "LMCACHE_DEVICE_COPY"
"""Environment variable that chooses a `Way`, whatever the engine."""


class Way(enum.Enum):
    """How the pages of an object cross, the simplest first. Which one is the fastest has not been measured."""

    GATHER = "gather"
    """Torch gathers them on the device, a call a layer; then one copy a run of cells."""
    KERNEL = "kernel"
    """A kernel of ours gathers them, all layers in one launch; then one copy a run of cells."""
    REACH = "reach"
    """The kernel reads and writes the arena itself, where it is locked; elsewhere as KERNEL."""
    BATCH = "batch"
    """A copy a page, all in one call where the driver takes that, where the arena is locked; elsewhere as GATHER."""


MEASURE = "measure"
"""Word of the environment variable that has ways tried when pages are registered (way_choice.py)."""


def chosen_way() -> Way | None:
    """By the environment: GATHER by default, None for the fastest here. Raises ConfigError for a word that is none."""
    word = os.environ.get(SETTING, "") or Way.GATHER.value
    if word == MEASURE:
        return None
    try:
        return Way(word)
    except ValueError:
        known = ", ".join([*(way.value for way in Way), MEASURE])
        raise ConfigError(f"{SETTING} is {word!r}", remedy=f"known are {known}; or leave it unset") from None


@functools.cache
def reach_of(device: torch.device) -> Reach:
    """What of any arena the device reaches. One for each device of a process: that is what memory is locked for."""
    return Everywhere() if device.type == "cpu" else Pins(CudaLocks(device))


class Device:
    """Where the pages are, and how to wait for the kernels that read and write them."""

    def __init__(self, device: torch.device) -> None:
        """Without an index it is the calling thread's device, as torch means it."""
        self._module: Any = torch.get_device_module(device)
        if device.type != "cpu" and device.index is None:
            # now: threads of ours have chosen no device, and would take number 0
            device = torch.device(device.type, self._module.current_device())
        self.device = device
        self._beside: Any = None

    @functools.cached_property
    def memory_node(self) -> int:
        """NUMA node of the host's memory that is near the device; -1 where nobody knows."""
        return device_node(self.device)

    def settle(self) -> None:
        """Return when every kernel that was submitted has ended: pages hold what the step computed."""
        self._module.synchronize(self.device)

    def mark(self, *streams: Any) -> Any:
        """A point behind everything that was submitted so far to the current stream and `streams`, for `reached`."""
        events = []
        for stream in (None, *streams):
            event = self._module.Event()
            event.record(*([] if stream is None else [stream]))
            events.append(event)
        return events

    def reached(self, mark: Any) -> None:
        """Return when the device has come to `mark`: what the engine did to newly allocated blocks is done."""
        for event in mark:
            event.synchronize()

    @contextlib.contextmanager
    def behind_step(self, *streams: Any) -> Iterator[None]:
        """A context in which this thread submits to another stream, behind what was submitted so far; as `mark`.

        The device waits for that and the caller does not. For one thread, which takes the same stream every time.
        """
        if self._beside is None:
            self._beside = self._new_stream()
        for event in self.mark(*streams):
            self._beside.wait_event(event)
        with self._module.stream(self._beside):
            yield

    def own_stream(self) -> Any:
        """A context in which the calling thread submits to a stream of its own on this device."""
        return self._module.stream(self._new_stream())

    def finish(self) -> None:
        """Return when the stream that the calling thread submits to is done."""
        if self.device.type != "cpu":
            self._module.current_stream(self.device).synchronize()

    def _new_stream(self) -> Any:
        where = () if self.device.type == "cpu" else (self.device,)
        return self._module.Stream(*where)


class StagedPages:
    """The pages of one KV group of one rank, on one device."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        views: Sequence[PageView],
        blocks: int,
        *,
        way: Way | None = None,
        reach: Reach | None = None,
        many: CopyMany | None = None,
    ) -> None:
        """By default the way of the environment, what the device reaches, and the driver's batched copies.

        Where the environment wants ways to be measured, that is for `way_choice.staged_maker`, and GATHER here.

        Raises ConfigError for a device that lmcache has not been tried on.
        """
        device = tensors[0].device
        check_device(device)
        self.device = Device(device)
        self.way = way or chosen_way() or Way.GATHER
        self.reach = reach or reach_of(device)
        self.many = many or copy_many(device)
        self.blocks = blocks
        self._tensors, self._views = tuple(tensors), tuple(views)
        self._aligned = math.gcd(
            WIDE,
            *(n for view in views for n in (view.offset, view.stride, view.page_bytes)),
            *(tensor.untyped_storage().nbytes() for tensor in tensors),
            *(tensor.untyped_storage().data_ptr() for tensor in tensors),
        )

    def element(self, alignment: int = WIDE) -> torch.dtype:
        """What pages can be moved in, if all else is aligned to `alignment` bytes."""
        return torch.int64 if math.gcd(self._aligned, alignment) == WIDE else torch.uint8

    def layers(self, element: torch.dtype) -> list[torch.Tensor]:
        """For each layer `[blocks, elements of a page]`."""
        return [_page_rows(t, v, self.blocks, element) for t, v in zip(self._tensors, self._views, strict=True)]


class StagedCopier:
    """Copies objects of one group; as `engines.copy.Copier`. For one thread: its buffers are used by every call."""

    def __init__(self, pages: StagedPages, layout: ObjectLayout, cell_bytes: int) -> None:
        self._pages = pages
        self._layout = layout
        self._cell_bytes = cell_bytes
        # pieces are packed layer by layer, without gaps but at cell ends: each cell holds one run of the payload
        used = [0] * layout.cells
        for piece in layout.pieces:
            used[piece.cell] += piece.length
        self._crossing = Crossing(pages.device.device, pages.reach, used, cell_bytes)
        self._gatherer, self._straight = _movers(pages, layout, used, cell_bytes)
        self._begun: deque[tuple[Any, int]] = deque()

    @property
    def attendant(self) -> ArenaAttendant | None:
        """Who has to be told what of an arena exists before this may copy straight from and to it."""
        return self._pages.reach.attendant

    def store(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy the pages of `block_ids` into an object's cells. Returns when they are there."""
        try:
            self.begin_store(arena, cells, block_ids)
        finally:
            self.finish()

    def load(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int], first: int = 0) -> None:
        """Copy kept positions from `first` on into the pages of `block_ids`. Returns when they are there."""
        try:
            self.begin_load(arena, cells, block_ids, first)
        finally:
            self.finish()

    def begin_store(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int]) -> None:
        """As `store`, done when `finish` returns. Raises IndexError, with nothing submitted, for what is not there."""
        self._check(arena, cells, block_ids, self._layout.blocks)
        if self._straight is not None and self._crossing.reaches(arena, cells):
            self._straight.store(arena, cells, block_ids)
        else:
            self._gatherer.gather(self._payload, on_device(block_ids, self._payload.device))
            self._crossing.store(self._payload, arena, cells)
        self._bound()

    def begin_load(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int], first: int = 0) -> None:
        """As `load`, done when `finish` returns."""
        if not 0 <= first <= first + len(block_ids) <= self._layout.blocks:
            raise IndexError(f"kept positions {first} to {first + len(block_ids)} of {self._layout.blocks}")
        self._check(arena, cells, block_ids, len(block_ids))
        if self._straight is not None and self._crossing.reaches(arena, cells):
            self._straight.load(arena, cells, block_ids, first)
        else:
            self._crossing.load(self._payload, arena, cells)
            self._gatherer.scatter(self._payload, on_device(block_ids, self._payload.device), first)
        self._bound()

    def finish(self) -> None:
        """Return when nothing is in flight, in the thread and on the stream that began it; whatever went wrong."""
        self._begun.clear()
        try:
            self._crossing.finish()
        finally:
            self._pages.device.finish()

    @functools.cached_property
    def _payload(self) -> torch.Tensor:
        """Bytes on the device; one object after another, in the order of the stream."""
        return torch.empty(self._layout.payload_bytes, dtype=torch.uint8, device=self._pages.device.device)

    def _bound(self) -> None:
        self._begun.append((self._pages.device.mark(), self._layout.payload_bytes))
        while len(self._begun) > 1 and sum(size for _, size in self._begun) > IN_FLIGHT_BYTES:
            self._pages.device.reached(self._begun.popleft()[0])

    def _check(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int], wanted: int) -> None:
        # a kernel that is given a wrong number moves a foreign page, or ends the process
        blocks = self._pages.blocks
        if len(block_ids) != wanted or min(block_ids, default=0) < 0 or max(block_ids, default=0) >= blocks:
            raise IndexError(f"block ids {list(block_ids)} of an engine with {blocks} blocks")
        if len(cells) != self._layout.cells or min(cells) < 0 or (max(cells) + 1) * self._cell_bytes > len(arena):
            raise IndexError(
                f"cells {list(cells)} for an object of {self._layout.cells}, "
                f"of an arena with {len(arena) // self._cell_bytes}"
            )


def _movers(
    pages: StagedPages, layout: ObjectLayout, used: Sequence[int], cell_bytes: int
) -> tuple[Gatherer, Straight | None]:
    """What gathers, and what copies straight where the arena is in reach."""
    if pages.way in {Way.KERNEL, Way.REACH}:
        # a piece begins at any multiple of what divides both pages and cells; arenas begin where a memory page does
        kernel = KernelMover(pages.layers(pages.element(cell_bytes)), layout, used, cell_bytes)
        return kernel, kernel if pages.way is Way.REACH else None
    gatherer = TorchGatherer(pages.layers(pages.element()), layout)
    # a piece that lies in two slabs would cross from one lock of memory to the next, which the driver refuses
    if pages.way is Way.BATCH and SLAB_BYTES % cell_bytes == 0:
        return gatherer, PieceMover(pages.layers(torch.uint8), layout, cell_bytes, pages.many)
    return gatherer, None


def _page_rows(tensor: torch.Tensor, view: PageView, blocks: int, element: torch.dtype) -> torch.Tensor:
    size = element.itemsize
    storage = torch.empty(0, dtype=element, device=tensor.device).set_(tensor.untyped_storage())
    return storage.as_strided((blocks, view.page_bytes // size), (view.stride // size, 1), view.offset // size)
