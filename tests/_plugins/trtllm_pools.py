"""KV caches as TensorRT-LLM allocates them, on CPU, with a guard that sees every byte that changes.

Pages are poisoned with NaNs when they are freed, lie apart with padding between them, and belong to somebody: whoever
writes where it was not allowed to, padding included, is caught at the next check.
"""

from typing import Any

import attrs
import numpy as np
import torch
from trtllm_model import TOKEN_BYTES, LayerGroup, Toy

POISON = 0xFF
"""Four of them are a NaN."""
PADDING = 32
"""Bytes before the first page, and between two pages."""


@attrs.frozen
class Buffer:
    """`KvCacheBufferRef`."""

    layer_id: int
    role: str
    expansion: int = 1


@attrs.frozen(eq=False)
class Region:
    """`KvCacheRegion`."""

    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[Buffer, ...]
    memory: torch.Tensor

    def as_tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        assert dtype is torch.uint8
        offset = self.base - self.memory.data_ptr()
        return self.memory.as_strided((self.num_slots, self.size), (self.stride, 1), offset)


@attrs.frozen(eq=False)
class GroupLayout:
    """`KvCacheLayerGroupLayout`."""

    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[Region, ...]
    replicated_regions: tuple[Region, ...]


@attrs.frozen(eq=False)
class Layout:
    """`KvCacheLayout`."""

    tokens_per_block: int
    groups: tuple[GroupLayout, ...]
    gpu_pool_mapping_bytes: int | None = None


class GroupPool:
    """The pages of one layer group on one rank."""

    def __init__(self, group: LayerGroup, toy: Toy, slots: int, *, gap: int) -> None:
        """`gap` lies between the buffers of a page, so that regions cannot be one."""
        self.group, self.toy, self.slots = group, toy, slots
        self.page = toy.tokens_per_block * TOKEN_BYTES
        self.gap = gap
        self.stride = len(group.buffers) * (self.page + gap) + PADDING
        self.memory = torch.full((PADDING + slots * self.stride,), POISON, dtype=torch.uint8)
        self.raw = self.memory.numpy()
        self._shadow = self.raw.copy()

    def at(self, slot: int, buffer: int, raw: np.ndarray | None = None) -> np.ndarray:
        """One buffer of one page, as `[tokens, bytes]`."""
        assert 0 <= slot < self.slots, f"page {slot} of {self.slots}"
        start = PADDING + slot * self.stride + buffer * (self.page + self.gap)
        return (self.raw if raw is None else raw)[start : start + self.page].reshape(-1, TOKEN_BYTES)

    def poison(self, slot: int) -> None:
        for buffer in range(len(self.group.buffers)):
            self.at(slot, buffer)[:] = POISON
        self.accept(slot)

    def accept(self, slot: int) -> None:
        """What is in the page now was written by the engine."""
        for buffer in range(len(self.group.buffers)):
            self.at(slot, buffer, self._shadow)[:] = self.at(slot, buffer)

    def check(self, allowed: set[int], who: str) -> None:
        """Whatever has changed since the last check lies in `allowed` pages."""
        now = self.raw.copy()
        for slot in allowed:
            for buffer in range(len(self.group.buffers)):
                self.at(slot, buffer, self._shadow)[:] = self.at(slot, buffer, now)
        changed = np.flatnonzero(self._shadow != now)
        if changed.size:
            pages = sorted({int(at - PADDING) // self.stride for at in changed})
            raise AssertionError(f"{who} wrote to pages {pages}, and was allowed to write to {sorted(allowed)}")
        self._shadow = now


class FlatPool:
    """One tensor `[blocks, layers, K and V, flat]`, whose rows have padding between them."""

    def __init__(self, toy: Toy, slots: int) -> None:
        [group] = toy.groups
        self.groups = [GroupPool(group, toy, slots, gap=0)]

    def register(self, worker: Any) -> None:
        pool = self.groups[0]
        width = pool.page // 4
        layers, roles = len(pool.group.layers), len(pool.group.roles)
        worker.register_kv_caches(
            pool.memory.view(torch.float32).as_strided(
                (pool.slots, layers, roles, width),
                (pool.stride // 4, roles * width, width, 1),
                PADDING // 4,
            )
        )


class LayoutPools:
    """Pools by layer group: several regions a page, those of replicated buffers between the others."""

    def __init__(self, toy: Toy, slots: int) -> None:
        self.toy = toy
        # each group has a number of pages of its own, so that an id of one is wrong in another
        self.groups = [
            GroupPool(group, toy, slots + 3 * number, gap=PADDING) for number, group in enumerate(toy.groups)
        ]

    def register(self, worker: Any) -> None:
        worker.register_kv_cache_layout(
            Layout(
                self.toy.tokens_per_block,
                tuple(
                    GroupLayout(
                        number,
                        pool.group.layers,
                        pool.group.window or None,
                        self._regions(pool, replicated=False),
                        self._regions(pool, replicated=True),
                    )
                    for number, pool in enumerate(self.groups)
                ),
            )
        )

    def _regions(self, pool: GroupPool, *, replicated: bool) -> tuple[Region, ...]:
        return tuple(
            Region(
                pool.memory.data_ptr() + PADDING + position * (pool.page + pool.gap),
                *(pool.page, pool.stride, pool.slots, (Buffer(layer, role),), pool.memory),
            )
            for position, (layer, role) in enumerate(pool.group.buffers)
            if (role in pool.group.replicated) == replicated
        )
