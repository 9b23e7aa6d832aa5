"""Copies between pages on an accelerator and the arena, through a buffer on the device and one on the host.

An object is gathered on the device, layer by layer, into one run of bytes, crosses in one transfer, and is cut into the
arena's cells. Loading is the same backwards. Nothing is left in flight: a store returns when the bytes are in the
arena, a load when they are in the pages. Works on any device that torch knows; on the CPU too, where it can be proved.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lmcache.engines.copy import Bytes
from lmcache.engines.copying import PageView
from lmcache.geometry.layout import ObjectLayout

WIDE = 8
"""Bytes that kernels move at a time where everything is aligned to them."""


class Device:
    """Where the pages are, and how to wait for the kernels that read and write them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)

    def settle(self) -> None:
        """Return when every kernel that was submitted has ended: pages hold what the step computed."""
        self._module.synchronize(self.device)

    def mark(self) -> Any:
        """A point behind everything that this thread has submitted so far; pass it to `reached`."""
        event = self._module.Event()
        event.record()
        return event

    def reached(self, mark: Any) -> None:
        """Return when the device has come to `mark`: what the engine did to newly allocated blocks is done."""
        mark.synchronize()

    def own_stream(self) -> Any:
        """A context in which the calling thread submits to a stream of its own on this device."""
        where = () if self.device.type == "cpu" else (self.device,)
        return self._module.stream(self._module.Stream(*where))

    def finish(self) -> None:
        """Return when the stream that the calling thread submits to is done."""
        if self.device.type != "cpu":
            self._module.current_stream(self.device).synchronize()


class StagedPages:
    """The pages of one KV group of one rank, on one device."""

    def __init__(self, tensors: Sequence[torch.Tensor], views: Sequence[PageView], blocks: int) -> None:
        self.device = Device(tensors[0].device)
        self.blocks = blocks
        aligned = math.gcd(
            WIDE,
            *(n for view in views for n in (view.offset, view.stride, view.page_bytes)),
            *(tensor.untyped_storage().nbytes() for tensor in tensors),
        )
        self.element = torch.int64 if aligned == WIDE else torch.uint8
        self.layers = [_page_rows(t, view, blocks, self.element) for t, view in zip(tensors, views, strict=True)]
        """For each layer `[blocks, elements of a page]`."""


class StagedCopier:
    """Copies objects of one group; as `engines.copy.Copier`. For one thread: its buffers are used by every call."""

    def __init__(self, pages: StagedPages, layout: ObjectLayout, cell_bytes: int) -> None:
        self._pages = pages
        self._layout = layout
        self._cell_bytes = cell_bytes
        # pieces are packed layer by layer, without gaps but at cell ends: each cell holds one run of the payload
        self._used = [0] * layout.cells
        for piece in layout.pieces:
            self._used[piece.cell] += piece.length
        device = pages.device.device
        elements = layout.payload_bytes // pages.element.itemsize
        self._on_device = torch.empty(elements, dtype=pages.element, device=device)
        self._on_host = torch.empty(elements, dtype=pages.element, pin_memory=device.type != "cpu")
        self._payload: Bytes = np.asarray(self._on_host.view(torch.uint8).numpy())
        sizes = [layout.blocks * layer.shape[1] for layer in pages.layers]
        self._staged = [run.view(layout.blocks, -1) for run in self._on_device.split(sizes)]

    def store(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy the pages of `block_ids` into an object's cells. Returns when they are there."""
        ids = self._ids(block_ids, self._layout.blocks)
        for layer, staged in zip(self._pages.layers, self._staged, strict=True):
            torch.index_select(layer, 0, ids, out=staged)
        self._on_host.copy_(self._on_device, non_blocking=True)
        self._pages.device.finish()
        start = 0
        for cell, used in zip(cells, self._used, strict=True):
            arena[cell * self._cell_bytes :][:used] = self._payload[start : start + used]
            start += used

    def load(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int], first: int = 0) -> None:
        """Copy kept positions from `first` on into the pages of `block_ids`. Returns when they are there."""
        ids = self._ids(block_ids, len(block_ids))
        start = 0
        for cell, used in zip(cells, self._used, strict=True):
            self._payload[start : start + used] = arena[cell * self._cell_bytes :][:used]
            start += used
        self._on_device.copy_(self._on_host, non_blocking=True)
        for layer, staged in zip(self._pages.layers, self._staged, strict=True):
            layer.index_copy_(0, ids, staged[first : first + len(block_ids)])
        self._pages.device.finish()

    def _ids(self, block_ids: Sequence[int], wanted: int) -> torch.Tensor:
        # a kernel that is given a wrong id moves a foreign page, or ends the process
        if len(block_ids) != wanted or min(block_ids) < 0 or max(block_ids) >= self._pages.blocks:
            raise IndexError(f"block ids {list(block_ids)} of an engine with {self._pages.blocks} blocks")
        return torch.tensor(block_ids, dtype=torch.int64, device=self._pages.device.device)


def _page_rows(tensor: torch.Tensor, view: PageView, blocks: int, element: torch.dtype) -> torch.Tensor:
    size = element.itemsize
    storage = torch.empty(0, dtype=element, device=tensor.device).set_(tensor.untyped_storage())
    return storage.as_strided((blocks, view.page_bytes // size), (view.stride // size, 1), view.offset // size)
