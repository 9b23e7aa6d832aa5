"""What stores and loads of a worker share: copiers, a mapped arena, and how to wait for the device.

For any engine; imports neither an engine nor torch.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs
import numpy as np

from lmcache.core.client import Link
from lmcache.engines.copy import Bytes
from lmcache.geometry.groups import Geometry
from lmcache.geometry.layout import ObjectLayout, object_layout


@attrs.frozen
class PageView:
    """Where the pages of one layer lie in the storage behind its tensor."""

    offset: int
    """Bytes into the storage at which block 0 starts."""
    stride: int
    """Bytes from one block to the next."""
    page_bytes: int
    kernel_blocks: int = 1
    """Blocks of the attention kernel that one block of the block table is made of."""


class ObjectCopier(Protocol):
    """`engines.copy.Copier`, or whatever reaches the pages of another kind of memory."""

    def store(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int]) -> None: ...
    def load(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int], first: int = 0) -> None: ...


MakeCopier = Callable[[ObjectLayout, int], ObjectCopier]
"""Makes the copier of one group for a layout and a cell size in bytes."""


class Kernels(Protocol):
    """How to wait for what the engine has submitted to its device."""

    def settle(self) -> None: ...
    def mark(self) -> Any: ...
    def reached(self, mark: Any) -> None: ...
    def own_stream(self) -> AbstractContextManager[Any]: ...


class NoKernels:
    """An engine whose steps are done when they return, as on CPU."""

    def settle(self) -> None:
        """Nothing to wait for."""

    def mark(self) -> None:
        """Nothing to wait for later."""

    def reached(self, mark: None) -> None:
        """It is done."""

    def own_stream(self) -> AbstractContextManager[None]:
        """There are no streams."""
        return contextlib.nullcontext()


class CopyPlans:
    """A copier for each cached group, for the chunk size and the cells of the server that a link leads to.

    Not shared between threads: a copier may have buffers of its own.
    """

    def __init__(self, geometry: Geometry, makers: Mapping[int, MakeCopier]) -> None:
        self._geometry = geometry
        self._makers = makers
        self._made: dict[tuple[int, int, int], tuple[ObjectCopier, int]] = {}

    def of(self, link: Link, group: int) -> tuple[ObjectCopier, int]:
        """The copier, and how many cells one object of the group takes."""
        key = (link.chunk_size, link.cell_bytes, group)
        if key not in self._made:
            layout = object_layout(self._geometry.groups[group], link.chunk_size, link.cell_bytes)
            self._made[key] = self._makers[group](layout, link.cell_bytes), layout.cells
        return self._made[key]


def page_array(storage: Bytes, view: PageView, blocks: int) -> Bytes:
    """A writable view `[blocks, page_bytes]` of the storage's bytes."""
    return np.ndarray((blocks, view.page_bytes), np.uint8, storage, view.offset, (view.stride, 1))


@contextlib.contextmanager
def mapped_arena(link: Link) -> Iterator[Bytes]:
    """The arena as an array, for as long as the block lasts. Raises ServerUnavailable when the link has ended."""
    with link.copying() as memory:
        arena = np.frombuffer(memory, np.uint8)
        try:
            yield arena
        finally:
            del arena
