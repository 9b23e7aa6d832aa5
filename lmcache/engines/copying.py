"""What stores and loads of a worker share: copiers, a mapped arena, and how to wait for the device.

For any engine; imports neither an engine nor torch.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import attrs
import numpy as np

from lmcache.core.arena import ArenaAttendant
from lmcache.core.client import Link
from lmcache.core.numa import ANYWHERE
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


@runtime_checkable
class OverlappingCopier(ObjectCopier, Protocol):
    """A copier that can begin the next object before the last one is done, in one thread."""

    def begin_store(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int]) -> None: ...
    def begin_load(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int], first: int = 0) -> None: ...
    def finish(self) -> None: ...


MakeCopier = Callable[[ObjectLayout, int], ObjectCopier]
"""Makes the copier of one group for a layout and a cell size in bytes."""


class Kernels(Protocol):
    """How to wait for what the engine has submitted to its device.

    That is to the stream that is current where the adapter is called, and to others that the engine may name.
    """

    @property
    def memory_node(self) -> int:
        """NUMA node of the host's memory that is near the device; -1 where nobody knows."""

    def settle(self) -> None: ...
    def mark(self, *streams: Any) -> Any: ...
    def reached(self, mark: Any) -> None: ...
    def behind_step(self, *streams: Any) -> AbstractContextManager[Any]: ...
    def own_stream(self) -> AbstractContextManager[Any]: ...


class NoKernels:
    """An engine whose steps are done when they return, as on CPU."""

    memory_node = ANYWHERE

    def settle(self) -> None:
        """Nothing to wait for."""

    def mark(self, *streams: Any) -> None:
        """Nothing to wait for later."""

    def reached(self, mark: None) -> None:
        """It is done."""

    def behind_step(self, *streams: Any) -> AbstractContextManager[None]:
        """There are no streams."""
        return contextlib.nullcontext()

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
        self._attendants: set[ArenaAttendant] = set()

    def of(self, link: Link, group: int) -> tuple[ObjectCopier, int]:
        """The copier, and how many cells one object of the group takes."""
        key = (link.chunk_size, link.cell_bytes, group)
        if key not in self._made:
            layout = object_layout(self._geometry.groups[group], link.chunk_size, link.cell_bytes)
            copier = self._makers[group](layout, link.cell_bytes)
            self._made[key] = copier, layout.cells
            if (attendant := getattr(copier, "attendant", None)) is not None:
                self._attendants.add(attendant)
        for attendant in self._attendants:
            # with the first copy, and not when an engine registers: locking memory would break a CUDA graph's capture
            link.attend(attendant)
        return self._made[key]


def store_objects(copier: ObjectCopier, arena: Bytes, objects: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
    """Copy objects, each its cells and block ids, one begun before the last is done where the copier can.

    When this returns or raises, nothing is in flight.
    """
    if not isinstance(copier, OverlappingCopier):
        for cells, ids in objects:
            copier.store(arena, cells, ids)
        return
    try:
        for cells, ids in objects:
            copier.begin_store(arena, cells, ids)
    finally:
        copier.finish()


def load_objects(arena: Bytes, copies: Iterable[tuple[ObjectCopier, Sequence[int], Sequence[int], int]]) -> None:
    """Copy objects, each its copier, cells, block ids and the first kept position of these; as `store_objects`."""
    begun: list[OverlappingCopier] = []
    try:
        for copier, cells, ids, first in copies:
            if isinstance(copier, OverlappingCopier):
                if copier not in begun:
                    begun.append(copier)
                copier.begin_load(arena, cells, ids, first)
            else:
                copier.load(arena, cells, ids, first)
    finally:
        with contextlib.ExitStack() as stack:  # every one of them, though another's fails
            for copier in begun:
                stack.callback(copier.finish)


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
