"""The memory that a rank's KV lives in."""

import numpy as np
import numpy.typing as npt

from lmcache.engines.copy import Pages
from lmcache.engines.reference.shapes import ModelShape

Floats = npt.NDArray[np.float32]

ALIGNMENT = 64
"""Bytes; a cache line. NumPy alone aligns to 16, and copies then take a tenth longer."""


class PageMemory:
    """All pages of one rank, in one allocation: array after array, as engines do that share memory among groups."""

    def __init__(self, shape: ModelShape, ranks: int, blocks: int) -> None:
        groups = range(len(shape.groups))
        sizes = {group: shape.page_floats(group, ranks) for group in groups}
        memory = _aligned_zeros(blocks * sum(map(sum, sizes.values())))
        self._arrays: dict[int, list[Floats]] = {}
        start = 0
        for group in groups:
            self._arrays[group] = []
            for floats in sizes[group]:
                self._arrays[group].append(memory[start : start + blocks * floats].reshape(blocks, floats))
                start += blocks * floats
        self.tail: Floats = np.zeros((blocks, len(shape.layers), shape.index_size), np.float32)
        """Scratch: for each request's scratch block, the running sum of index keys in each layer."""

    def array(self, group: int, position: int, *page: int) -> Floats:
        """Page array number `position` of `group`, seen as `[blocks, *page]`."""
        array = self._arrays[group][position]
        return array.reshape(len(array), *page)

    def pages(self, group: int) -> Pages:
        """The pages of `group` as bytes, for the copier."""
        return Pages([array.view(np.uint8) for array in self._arrays[group]])


def _aligned_zeros(floats: int) -> Floats:
    memory = np.zeros(floats + ALIGNMENT // 4, np.float32)
    start = -memory.ctypes.data % ALIGNMENT // 4
    return memory[start : start + floats]
