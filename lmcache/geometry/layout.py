"""Where the pages of one object lie in the arena's cells: the map that store and load both follow.

An object is one chunk of one KV group on one shard. Its pages are laid out layer by layer, block after block within a
layer, packed into cells of a fixed size. A small page never straddles two cells, so that it is one piece. A large one
is cut where a cell ends: state snapshots of a little more than a cell, or than half of one, would otherwise leave half
of the memory unused. Server and engines compute the same layout from the same geometry, so it never travels.
"""

import attrs

from lmcache.geometry.chunking import kept_blocks
from lmcache.geometry.groups import KVGroup

SMALL = 8
"""A page of up to an eighth of a cell is small: more than seven eighths of every cell but an object's last are used."""


@attrs.frozen
class Piece:
    """A page, or the part of one that lies in one cell."""

    layer: int
    """Position in `KVGroup.page_bytes`."""
    block: int
    """Position among the blocks that the chunk keeps: 0 is the earliest."""
    page_offset: int
    """Bytes into the page; 0 unless the page is cut."""
    cell: int
    """Position in the object's list of cells."""
    cell_offset: int
    """Bytes into that cell."""
    length: int
    """Bytes."""


@attrs.frozen
class ObjectLayout:
    """The pieces of every object of one group, in arena order."""

    blocks: int
    """Blocks that a chunk keeps of this group."""
    cells: int
    """Cells that an object takes."""
    pieces: tuple[Piece, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of pages in one object, without the unused ends of cells."""
        return sum(piece.length for piece in self.pieces)


def object_layout(group: KVGroup, chunk_size: int, cell_bytes: int) -> ObjectLayout:
    """Pack what a chunk of `chunk_size` tokens keeps of `group` into cells of `cell_bytes`.

    For the engine that owns the pages: it lists every piece. A server asks `object_cells`.
    """
    blocks = kept_blocks(group, chunk_size)
    pieces: list[Piece] = []
    cell, used = 0, 0
    for layer, page in enumerate(group.page_bytes):
        for block in range(blocks):
            offset = 0
            while offset < page:
                if used == cell_bytes or (_small(page, cell_bytes) and used + page > cell_bytes):
                    cell, used = cell + 1, 0
                length = min(cell_bytes - used, page - offset)
                pieces.append(Piece(layer, block, offset, cell, used, length))
                used, offset = used + length, offset + length
    return ObjectLayout(blocks, cell + 1 if pieces else 0, tuple(pieces))


def _small(page: int, cell_bytes: int) -> bool:
    return page <= cell_bytes // SMALL


def object_cells(group: KVGroup, chunk_size: int, cell_bytes: int) -> int:
    """How many cells an object takes: `object_layout(…).cells`, in time that grows with the number of layers only.

    The server sizes objects by it, so that no geometry, however absurd its sizes, costs it time or memory.
    """
    return _extent(group, chunk_size, cell_bytes)[0]


def object_bytes(group: KVGroup, chunk_size: int, cell_bytes: int) -> int:
    """Bytes from an object's first cell to the end of its last page: what has to be kept of its cells elsewhere."""
    cells, free = _extent(group, chunk_size, cell_bytes)
    return cells * cell_bytes - free


def _extent(group: KVGroup, chunk_size: int, cell_bytes: int) -> tuple[int, int]:
    """Cells of an object, and bytes of the last one that it does not use."""
    blocks = kept_blocks(group, chunk_size)
    cells, free = 0, 0
    for page in group.page_bytes:
        if not _small(page, cell_bytes):
            lacking = max(blocks * page - free, 0)
            more = -(-lacking // cell_bytes)
            cells, free = cells + more, free + more * cell_bytes - blocks * page
            continue
        left = blocks - min(blocks, free // page)
        free -= (blocks - left) * page
        if left:
            per_cell = cell_bytes // page
            cells += -(-left // per_cell)
            free = cell_bytes - ((left - 1) % per_cell + 1) * page
    return cells, free
