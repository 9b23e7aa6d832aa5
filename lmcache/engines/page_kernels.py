"""A kernel that moves pieces of pages between a device's KV cache and any memory that the device reaches. Triton.

That memory is a buffer on the device, or the arena itself where it is locked. One launch moves a whole object, however
many layers it has and wherever they were allocated. With TRITON_INTERPRET=1 it runs on tensors of the CPU.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from lmcache.geometry.layout import ObjectLayout

PROGRAMS = 32
"""Programs of one launch, each on a multiprocessor: enough to fill a PCIe link, by what others have measured with 12,
and few enough to leave most of the device to the model. Not measured by us."""

BYTES_AT_ONCE = 4096
"""Of a piece, by one program."""


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    jobs,
    count_jobs,
    ids,
    starts,
    memory,
    first,
    count,
    STORE: tl.constexpr,  # noqa: N803 - Triton's habit for what a kernel is compiled for
    ELEMENT: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
):
    """Six columns of `jobs`: address in block 0, stride of blocks, kept position, cell, bytes into it, elements."""
    lanes = tl.arange(0, LANES)
    job = tl.program_id(0)
    while job < count_jobs:
        position = tl.load(jobs + 2 * count_jobs + job) - first
        if (position >= 0) & (position < count):
            page = tl.load(jobs + job) + tl.load(ids + position) * tl.load(jobs + count_jobs + job)
            cell = tl.load(starts + tl.load(jobs + 3 * count_jobs + job))
            place = memory + cell + tl.load(jobs + 4 * count_jobs + job)
            size = tl.load(jobs + 5 * count_jobs + job)
            source = (page if STORE else place).to(tl.pointer_type(ELEMENT))
            target = (place if STORE else page).to(tl.pointer_type(ELEMENT))
            for start in range(0, size, LANES):
                at = start + lanes
                tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)
        job += tl.num_programs(0)


class PageKernel:
    """Moves objects of one group. Every address is that of `jobs`: layers must outlive this."""

    def __init__(self, layers: list[torch.Tensor], layout: ObjectLayout) -> None:
        """`layers` are `[blocks, elements of a page]`, all of one type."""
        size = layers[0].element_size()
        columns: list[list[int]] = [
            [layers[p.layer].data_ptr() + p.page_offset for p in layout.pieces],
            [layers[p.layer].stride(0) * size for p in layout.pieces],
            [p.block for p in layout.pieces],
            [p.cell for p in layout.pieces],
            [p.cell_offset for p in layout.pieces],
            [p.length // size for p in layout.pieces],
        ]
        jobs: npt.NDArray[np.int64] = np.array(columns, np.int64)
        self._layers = layers
        self._count = len(layout.pieces)
        self._jobs = torch.from_numpy(jobs).to(layers[0].device)
        self._element: Any = tl.int64 if size == 8 else tl.uint8
        self._lanes = BYTES_AT_ONCE // size

    def move(self, ids: torch.Tensor, first: int, starts: torch.Tensor, memory: int, *, store: bool) -> None:
        """Submit the pieces of kept positions `first`, … into the pages of `ids`, or out of them.

        `starts` has, for each cell of the object, where it begins in the memory at address `memory`, in bytes.
        """
        _move[(min(PROGRAMS, self._count),)](
            self._jobs,
            self._count,
            ids,
            starts,
            memory,
            first,
            len(ids),
            STORE=store,
            ELEMENT=self._element,
            LANES=self._lanes,
        )
