"""Which cells of the arena are free. Pure bookkeeping: it neither maps nor touches memory."""

import struct
from collections.abc import Sequence

CELL_NUMBER = struct.Struct("<I")
"""How a cell number travels and is kept: objects hold their cells as joined little-endian 32-bit numbers."""


def pack_cells(cells: Sequence[int]) -> bytes:
    """Join cell numbers."""
    return struct.pack(f"<{len(cells)}I", *cells)


def unpack_cells(packed: bytes) -> tuple[int, ...]:
    """Split joined cell numbers."""
    return struct.unpack(f"<{len(packed) // CELL_NUMBER.size}I", packed)


class CellAllocator:
    """Hands out cells and takes them back. Only cells below `backed` have memory and are handed out.

    Cells that came back together go out together, last in first out, so objects of one size keep their runs of adjacent
    cells; cells never used before go out in order.
    """

    def __init__(self, cells: int) -> None:
        self.cells = cells
        """Cells of the whole arena."""
        self.backed = 0
        """Cells from 0 that have memory."""
        self._fresh = 0  # cells below it have been handed out at least once
        self._returned: list[int] = []

    @property
    def free(self) -> int:
        """Cells that can be handed out now."""
        return len(self._returned) + self.backed - self._fresh

    @property
    def used(self) -> int:
        """Cells that are handed out."""
        return self._fresh - len(self._returned)

    def back(self, cells: int) -> None:
        """Memory now stands behind the first `cells` cells."""
        if not self.backed <= cells <= self.cells:
            raise ValueError(f"cannot back {cells} of {self.cells} cells: {self.backed} are backed already")
        self.backed = cells

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """`count` cells in ascending order, or None when fewer are free."""
        if count > self.free:
            return None
        returned = min(count, len(self._returned))
        taken = self._returned[len(self._returned) - returned :]
        del self._returned[len(self._returned) - returned :]
        fresh = count - returned
        taken.extend(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        taken.sort()
        return tuple(taken)

    def release(self, cells: Sequence[int]) -> None:
        """Take back what `allocate` gave."""
        self._returned.extend(cells)

    def validate(self) -> None:
        """Raise if a cell was taken back twice, or was never handed out.

        For tests: takes time in the number of cells.
        """
        if len(set(self._returned)) != len(self._returned):
            raise RuntimeError("a cell was released twice")
        if any(not 0 <= cell < self._fresh for cell in self._returned):
            raise RuntimeError("a cell was released that was never allocated")
