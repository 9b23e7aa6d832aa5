"""Ways to move the pages of an object: gathered into a buffer on the device, or straight to and from the arena.

All of them submit to the calling thread's stream and wait for nothing. Imports torch, and Triton where a kernel is
asked for.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lmcache.engines.copy import Bytes
from lmcache.engines.cuda import Addresses, CopyMany
from lmcache.errors import ConfigError
from lmcache.geometry.layout import ObjectLayout

WIDE = 8
"""Bytes that kernels move at a time where everything is aligned to them."""


class Gatherer(Protocol):
    """Brings the pages of an object together in one run of bytes on the device."""

    def gather(self, payload: torch.Tensor, ids: torch.Tensor) -> None:
        """The pages of all kept positions into the payload."""

    def scatter(self, payload: torch.Tensor, ids: torch.Tensor, first: int) -> None:
        """Kept positions from `first` on out of the payload."""


class Straight(Protocol):
    """Moves pages to and from cells that the device reaches."""

    def store(self, arena: Bytes, cells: Sequence[int], ids: Sequence[int]) -> None:
        """The pages of all kept positions into cells."""

    def load(self, arena: Bytes, cells: Sequence[int], ids: Sequence[int], first: int) -> None:
        """Kept positions from `first` on out of cells."""


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Numbers for a kernel, on their way."""
    # from ordinary memory the copy would wait for everything that was submitted before
    made = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type != "cpu")
    return made.to(device, non_blocking=True)


class TorchGatherer:
    """By torch's own indexing, a call a layer."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: ObjectLayout) -> None:
        """`layers` are `[blocks, elements of a page]`."""
        self._layers = layers
        self._blocks = layout.blocks
        self._sizes = [layout.blocks * layer.shape[1] for layer in layers]

    def gather(self, payload: torch.Tensor, ids: torch.Tensor) -> None:
        """As `Gatherer`."""
        for layer, staged in zip(self._layers, self._split(payload), strict=True):
            torch.index_select(layer, 0, ids, out=staged)

    def scatter(self, payload: torch.Tensor, ids: torch.Tensor, first: int) -> None:
        """As `Gatherer`."""
        for layer, staged in zip(self._layers, self._split(payload), strict=True):
            layer.index_copy_(0, ids, staged[first : first + len(ids)])

    def _split(self, payload: torch.Tensor) -> list[torch.Tensor]:
        element = self._layers[0].dtype
        return [run.view(self._blocks, -1) for run in payload.view(element).split(self._sizes)]


class KernelMover:
    """One launch an object: `Gatherer`, and `Straight` where the arena is aligned as the kernel needs it."""

    def __init__(self, layers: list[torch.Tensor], layout: ObjectLayout, used: Sequence[int], cell_bytes: int) -> None:
        """`used` says how many bytes of each cell are payload. Raises ConfigError where there is no Triton."""
        try:
            from lmcache.engines.page_kernels import PageKernel
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ConfigError(
                "a kernel of lmcache is to copy pages, and that takes Triton",
                remedy="pip install triton, or leave LMCACHE_DEVICE_COPY unset",
            ) from None
        self._kernel = PageKernel(layers, layout)
        self._device = layers[0].device
        self._cell_bytes = cell_bytes
        self._blocks = layout.blocks
        self._packed = on_device([sum(used[:cell]) for cell in range(layout.cells)], self._device)

    def gather(self, payload: torch.Tensor, ids: torch.Tensor) -> None:
        """As `Gatherer`."""
        self._kernel.move(ids, 0, self._packed, payload.data_ptr(), store=True)

    def scatter(self, payload: torch.Tensor, ids: torch.Tensor, first: int) -> None:
        """As `Gatherer`."""
        self._kernel.move(ids, first, self._packed, payload.data_ptr(), store=False)

    def store(self, arena: Bytes, cells: Sequence[int], ids: Sequence[int]) -> None:
        """As `Straight`."""
        self._kernel.move(self._numbers(ids), 0, self._starts(cells), int(arena.ctypes.data), store=True)

    def load(self, arena: Bytes, cells: Sequence[int], ids: Sequence[int], first: int) -> None:
        """As `Straight`."""
        self._kernel.move(self._numbers(ids), first, self._starts(cells), int(arena.ctypes.data), store=False)

    def _numbers(self, ids: Sequence[int]) -> torch.Tensor:
        return on_device(ids, self._device)

    def _starts(self, cells: Sequence[int]) -> torch.Tensor:
        return on_device([cell * self._cell_bytes for cell in cells], self._device)


class PieceMover:
    """A copy a piece of a page: `Straight`, in one call where the driver takes many copies at once."""

    def __init__(
        self, layers: Sequence[torch.Tensor], layout: ObjectLayout, cell_bytes: int, many: CopyMany | None
    ) -> None:
        """`layers` are bytes, `[blocks, bytes of a page]`."""
        self._layers = layers
        self._pieces = layout.pieces
        self._cell_bytes = cell_bytes
        self._many = many
        columns = [
            (
                layers[p.layer].data_ptr() + p.page_offset,
                layers[p.layer].stride(0),
                p.block,
                p.cell,
                p.cell_offset,
                p.length,
            )
            for p in layout.pieces
        ]
        table: npt.NDArray[np.int64] = np.array(columns, np.int64)
        self._base, self._step, self._block, self._cell, self._offset, self._length = table.T

    def store(self, arena: Bytes, cells: Sequence[int], ids: Sequence[int]) -> None:
        """As `Straight`."""
        if self._many is not None:
            pages, places, sizes = self._addresses(arena, cells, ids, 0)
            self._many(places, pages, sizes)
            return
        for page, place in self._views(arena, cells, ids, 0):
            place.copy_(page, non_blocking=True)

    def load(self, arena: Bytes, cells: Sequence[int], ids: Sequence[int], first: int) -> None:
        """As `Straight`."""
        if self._many is not None:
            pages, places, sizes = self._addresses(arena, cells, ids, first)
            self._many(pages, places, sizes)
            return
        for page, place in self._views(arena, cells, ids, first):
            page.copy_(place, non_blocking=True)

    def _addresses(
        self, arena: Bytes, cells: Sequence[int], ids: Sequence[int], first: int
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Of the pages, of their places in the arena, and how many bytes."""
        chosen = (self._block >= first) & (self._block < first + len(ids))
        blocks = np.array(ids, np.int64)[self._block[chosen] - first]
        pages = self._base[chosen] + blocks * self._step[chosen]
        starts = int(arena.ctypes.data) + np.array(cells, np.int64) * self._cell_bytes
        places = starts[self._cell[chosen]] + self._offset[chosen]
        return pages.astype(np.uint64), places.astype(np.uint64), self._length[chosen].astype(np.uint64)

    def _views(
        self, arena: Bytes, cells: Sequence[int], ids: Sequence[int], first: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        memory = torch.from_numpy(arena)
        views = []
        for p in self._pieces:
            if first <= p.block < first + len(ids):
                page = self._layers[p.layer][ids[p.block - first]][p.page_offset : p.page_offset + p.length]
                place = cells[p.cell] * self._cell_bytes + p.cell_offset
                views.append((page, memory[place : place + p.length]))
        return views
