"""Where the pages of one object lie in the arena's cells: the map that store and load both follow.

An object is one chunk of one KV group on one shard. Its pages are laid out layer by layer, block after block within a
layer, packed into cells of a fixed size so that no page straddles a cell; a page larger than a cell is cut into pieces
of whole cells and a rest. Server and engines compute the same layout from the same geometry, so it never travels.
"""

import attrs

from lmcache.geometry.chunking import kept_blocks
from lmcache.geometry.groups import KVGroup


@attrs.frozen
class Piece:
    """A page, or the part of one that fits a cell."""

    layer: int
    """Position in `KVGroup.page_bytes`."""
    block: int
    """Position among the blocks that the chunk keeps: 0 is the earliest."""
    page_offset: int
    """Bytes into the page; 0 unless the page is larger than a cell."""
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
            for offset in range(0, page, cell_bytes):
                length = min(cell_bytes, page - offset)
                if used + length > cell_bytes:
                    cell, used = cell + 1, 0
                pieces.append(Piece(layer, block, offset, cell, used, length))
                used += length
    return ObjectLayout(blocks, cell + 1 if pieces else 0, tuple(pieces))


def object_cells(group: KVGroup, chunk_size: int, cell_bytes: int) -> int:
    """How many cells an object takes: `object_layout(…).cells`, in time that grows with the number of layers only.

    The server sizes objects by it, so that no geometry, however absurd its sizes, costs it time or memory.
    """
    blocks = kept_blocks(group, chunk_size)
    cells, free = 0, 0
    for page in group.page_bytes:
        whole, rest = divmod(page, cell_bytes)
        if whole:
            cells += blocks * (whole + (rest > 0))
            free = cell_bytes - rest if rest else 0
            continue
        left = blocks - min(blocks, free // page)
        free -= (blocks - left) * page
        if left:
            per_cell = cell_bytes // page
            cells += -(-left // per_cell)
            free = cell_bytes - ((left - 1) % per_cell + 1) * page
    return cells
