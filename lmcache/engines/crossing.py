"""The payload of an object between a buffer on the device and the cells of the arena. Imports torch.

Straight, one copy a run of adjacent cells, where the device reaches the arena; else through a ring of buffers that it
does reach, so that the CPU fills one while the device empties another.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from lmcache.core.arena import SLAB_BYTES
from lmcache.engines.copy import Bytes
from lmcache.engines.pinning import Reach

RING_BUFFERS = 4
"""Each of a cell: as many copies may be on their way where the arena is out of reach."""


@attrs.frozen
class Run:
    """Bytes that lie one after another on both sides."""

    place: int
    """In the arena."""
    start: int
    """In the payload."""
    length: int


@attrs.define
class _Buffer:
    """One of the ring."""

    memory: torch.Tensor
    done: Any = None
    """When the device has read or written it; None before its first use."""
    arrived: tuple[Bytes, Run] | None = None
    """Where its bytes belong in the arena, once they are here."""


class Crossing:
    """Moves the payloads of one layout. For one thread: the ring is used by every call."""

    def __init__(self, device: torch.device, reach: Reach, used: Sequence[int], cell_bytes: int) -> None:
        """`used` says how many bytes of each cell are payload: they lie at its beginning."""
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._reach = reach
        self._used = tuple(used)
        self._cell_bytes = cell_bytes
        self._buffers: deque[_Buffer] = deque()

    def reaches(self, arena: Bytes, cells: Sequence[int]) -> bool:
        """Whether the device may be given these cells as they are."""
        return self._reach.reaches(int(arena.ctypes.data), (max(cells) + 1) * self._cell_bytes)

    def store(self, payload: torch.Tensor, arena: Bytes, cells: Sequence[int]) -> None:
        """Submit the copy of the payload, bytes on the device, into `cells`. They hold it when `finish` returns."""
        if self.reaches(arena, cells):
            memory = torch.from_numpy(arena)
            for run in self._runs(cells):
                target = memory[run.place : run.place + run.length]
                target.copy_(payload[run.start : run.start + run.length], non_blocking=True)
            return
        for run in self._pieces(cells):
            buffer = self._next_buffer()
            buffer.memory[: run.length].copy_(payload[run.start : run.start + run.length], non_blocking=True)
            buffer.arrived = arena, run
            self._used_until_now(buffer)

    def load(self, payload: torch.Tensor, arena: Bytes, cells: Sequence[int]) -> None:
        """Submit the copy of `cells` into the payload on the device."""
        if self.reaches(arena, cells):
            memory = torch.from_numpy(arena)
            for run in self._runs(cells):
                source = memory[run.place : run.place + run.length]
                payload[run.start : run.start + run.length].copy_(source, non_blocking=True)
            return
        for run in self._pieces(cells):
            buffer = self._next_buffer()
            host = np.asarray(buffer.memory.numpy())
            host[: run.length] = arena[run.place : run.place + run.length]
            payload[run.start : run.start + run.length].copy_(buffer.memory[: run.length], non_blocking=True)
            self._used_until_now(buffer)

    def finish(self) -> None:
        """Bring into the arena what is still in the ring. The caller waits for the device itself."""
        for buffer in self._buffers:
            self._empty(buffer)

    def _next_buffer(self) -> _Buffer:
        if len(self._buffers) < RING_BUFFERS:
            memory = torch.empty(self._cell_bytes, dtype=torch.uint8, pin_memory=self._device.type != "cpu")
            return _Buffer(memory)
        buffer = self._buffers.popleft()
        self._empty(buffer)
        return buffer

    def _used_until_now(self, buffer: _Buffer) -> None:
        buffer.done = self._module.Event()
        buffer.done.record()
        self._buffers.append(buffer)

    def _empty(self, buffer: _Buffer) -> None:
        """Wait until the device has done with a buffer, and take out what it brought."""
        arrived, buffer.arrived = buffer.arrived, None
        buffer.done.synchronize()
        if arrived is not None:
            arena, run = arrived
            arena[run.place : run.place + run.length] = np.asarray(buffer.memory.numpy())[: run.length]

    def _pieces(self, cells: Sequence[int]) -> Iterator[Run]:
        """A run a cell."""
        start = 0
        for cell, used in zip(cells, self._used, strict=True):
            yield Run(cell * self._cell_bytes, start, used)
            start += used

    def _runs(self, cells: Sequence[int]) -> Iterator[Run]:
        """Cells that follow each other without a gap are one run; none crosses from one lock of memory to the next."""
        place = start = length = 0
        for run in self._pieces(cells):
            if length and run.place == place + length:
                length += run.length
                continue
            yield from _cut(place, start, length)
            place, start, length = run.place, run.start, run.length
        yield from _cut(place, start, length)


def _cut(place: int, start: int, length: int) -> Iterator[Run]:
    """A run, cut where slabs of the arena meet."""
    while length > 0:
        part = min(length, SLAB_BYTES - place % SLAB_BYTES)
        yield Run(place, start, part)
        place, start, length = place + part, start + part, length - part
