"""Pages on a device, an arena on the host, and what a copy between the two has to come to, byte for byte."""

import contextlib
import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import torch
from last_seen import last_seen

from lmcache.core.arena import MappedArena, create_segment
from lmcache.engines.copy import Bytes, Copier, Pages
from lmcache.engines.copying import PageView, page_array
from lmcache.engines.pinning import Everywhere, HostLocks, Reach
from lmcache.engines.staging import StagedCopier, StagedPages, Way
from lmcache.geometry.groups import GroupKind, KVGroup
from lmcache.geometry.layout import object_layout

BLOCKS = 24
"""Blocks of every engine here."""

OBJECTS = 5
"""That fit into every arena here."""


class Nowhere:
    """A device that reaches no byte of any arena, as where nothing may be locked."""

    attendant = None

    def reaches(self, address: int, stop: int) -> bool:
        return False


@attrs.frozen
class Partly:
    """A device that reaches the beginning of every arena, as while it is being locked."""

    limit: int
    attendant = None

    def reaches(self, address: int, stop: int) -> bool:
        return stop <= self.limit


class MemoryLocks:
    """Keeps book of what it is asked to lock; `refuse_from` bytes on, it refuses."""

    def __init__(self, refuse_from: int = 1 << 62) -> None:
        self._left = refuse_from
        self.held: dict[int, int] = {}
        self.threads: set[str] = set()

    def lock(self, address: int, size: int) -> None:
        self.threads.add(threading.current_thread().name)
        if size > self._left:
            raise OSError("the limit is reached")
        self._left -= size
        self.held[address] = size

    def unlock(self, address: int) -> None:
        ctypes.string_at(address + self.held.pop(address) - 1, 1)  # the end of this process, were it not mapped


_locks: HostLocks = MemoryLocks()  # the protocol, checked

Storage = Callable[[str, Sequence[int]], tuple[list[torch.Tensor], list[PageView]]]


def _raw(device: str, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)


def contiguous(device: str, sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[PageView]]:
    """Layers one after another in one storage."""
    memory = _raw(device, BLOCKS * sum(sizes))
    starts = itertools.accumulate((BLOCKS * size for size in sizes), initial=0)
    return [memory] * len(sizes), [PageView(at, size, size) for at, size in zip(starts, sizes, strict=False)]


def block_major(device: str, sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[PageView]]:
    """A block's pages of all layers are neighbours."""
    memory, step = _raw(device, BLOCKS * sum(sizes)), sum(sizes)
    starts = itertools.accumulate(sizes, initial=0)
    return [memory] * len(sizes), [PageView(at, step, size) for at, size in zip(starts, sizes, strict=False)]


def separate(device: str, sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[PageView]]:
    """An allocation for each layer, as vLLM makes them."""
    return [_raw(device, BLOCKS * size) for size in sizes], [PageView(0, size, size) for size in sizes]


def padded(device: str, sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[PageView]]:
    """Blocks further apart than their pages are long, in words."""
    step = max(sizes) + 24
    return [_raw(device, BLOCKS * step) for _ in sizes], [PageView(8, step, size) for size in sizes]


def unaligned(device: str, sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[PageView]]:
    """Pages that begin at odd bytes."""
    step = max(sizes) + 3
    return [_raw(device, 1 + BLOCKS * step) for _ in sizes], [PageView(1, step, size) for size in sizes]


def overlapping(device: str, sizes: Sequence[int]) -> tuple[list[torch.Tensor], list[PageView]]:
    """Pages at the ends of larger ones, whose other bytes are another group's."""
    step = 2 * max(sizes)
    memory = _raw(device, BLOCKS * step)
    return [memory] * len(sizes), [PageView(step - size, step, size) for size in sizes]


STORAGES: tuple[Storage, ...] = (contiguous, block_major, separate, padded, unaligned, overlapping)

SHAPES: dict[str, tuple[Sequence[int], int, int]] = {
    "one layer": ([512], 4, 2048),
    "equal pages that leave cells' ends unused": ([1152] * 5, 4, 4096),
    "pages larger than a cell": ([2560] * 2, 3, 1024),
    "pages that fill cells": ([1024] * 4, 2, 1024),
    "mixed pages": ([656, 132, 656, 132], 4, 4096),
    "odd pages": ([7, 5], 4, 11),
}
"""Page bytes of each layer, blocks an object, bytes of a cell."""


def storages_of(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """All bytes behind tensors, by where they are."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return found


class Site:
    """An engine's pages of one group on a device, and the copier under test beside one that is known to be right."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], views: Sequence[PageView], blocks: int, cell: int, **options: object
    ) -> None:
        self.group = KVGroup(GroupKind.FULL, 16, tuple(view.page_bytes for view in views))
        self.layout = object_layout(self.group, 16 * blocks, cell)
        self.cell = cell
        self.tensors, self.views = tensors, views
        pages = StagedPages(tensors, views, BLOCKS, **options)  # type: ignore[arg-type]
        self.copier = StagedCopier(pages, self.layout, cell)

    @property
    def arena_bytes(self) -> int:
        return OBJECTS * self.layout.cells * self.cell

    def memory(self) -> dict[int, Bytes]:
        """Every byte of the engine, now."""
        return {at: whole.cpu().numpy().copy() for at, whole in storages_of(self.tensors).items()}

    def oracle(self, memory: dict[int, Bytes]) -> Copier:
        """The CPU's copier, on such a copy of the engine's bytes."""
        places = [tensor.untyped_storage().data_ptr() for tensor in self.tensors]
        arrays = [page_array(memory[at], view, BLOCKS) for at, view in zip(places, self.views, strict=True)]
        return Copier(Pages(arrays), self.layout, self.cell)

    def cells(self, random: np.random.Generator, count: int) -> list[list[int]]:
        """For each of `count` objects cells of its own: some adjacent, some not, in any order."""
        pairs = np.arange(OBJECTS * self.layout.cells // 2 * 2).reshape(-1, 2)
        taken = random.permutation(pairs).reshape(-1).tolist()
        taken += list(range(OBJECTS * self.layout.cells // 2 * 2, OBJECTS * self.layout.cells))
        size = self.layout.cells
        return [taken[number * size : (number + 1) * size] for number in range(count)]


def poisoned(size: int) -> Bytes:
    """An arena in which no byte is right by chance."""
    return np.random.default_rng(3).integers(0, 256, size, np.uint8)


@contextlib.contextmanager
def mapped(size: int, reach: Reach) -> Iterator[MappedArena]:
    """A real arena of a worker, known to what the device reaches, all of its slabs mapped."""
    descriptor = create_segment(size)
    try:
        arena = MappedArena(descriptor, size)
    finally:
        os.close(descriptor)
    try:
        if reach.attendant is not None:
            arena.attend(reach.attendant)
        arena.prefault(size)
        yield arena
    finally:
        arena.close()


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, f"not within 30 s: {last_seen(condition)}"
        time.sleep(0.01)


REACHES: dict[str, Callable[[int], Reach]] = {
    "in reach": lambda _: Everywhere(),
    "out of reach": lambda _: Nowhere(),
    "partly in reach": lambda size: Partly(size // 2),
}

WAYS = tuple(Way)
