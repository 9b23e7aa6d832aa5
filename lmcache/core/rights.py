"""Which cells a client on another host may write or read: told by the messages that pass between it and the server.

Both ends keep this book, the gateway to hold the client to it, the client to know what has to travel. No sockets here.
"""

import attrs

from lmcache.core.cells import unpack_cells
from lmcache.core.protocol import (
    PIECE_BYTES,
    Abort,
    Commit,
    Confirm,
    Drop,
    Message,
    Open,
    Opened,
    Read,
    Register,
    Registered,
    Reserve,
    Reserved,
    Take,
    Taken,
    Write,
)
from lmcache.errors import ProtocolError
from lmcache.geometry.groups import Geometry
from lmcache.geometry.layout import object_bytes, object_cells

MOST_OPEN = 256
"""Tickets of one client that are remembered as open: loads that failed are never confirmed."""


@attrs.frozen
class Piece:
    """A part of one cell, small enough for a message."""

    cell: int
    offset: int
    """Bytes into the cell."""
    length: int


@attrs.define
class _Object:
    """How an object of one group fills its cells."""

    cells: int
    bytes: int


class Rights:
    """Of one client. Messages are told in the order in which they pass."""

    def __init__(self) -> None:
        self.cell_bytes = 0
        self.arena_cells = 0
        self._geometry: Geometry | None = None
        self._objects: list[_Object] = []
        self._groups: dict[int, int] = {}  # of `Reserve` that are not answered, by id
        self._opening: dict[int, int] = {}  # tickets of `Open` that are not answered, by id
        self._lacking: dict[int, dict[int, tuple[int, int]]] = {}  # reservation → cell → written, and to be written
        self._readable: dict[int, dict[int, int]] = {}  # ticket → cell → bytes

    # ------------------------------------------------------------------------------------------------ what passes by

    def asked(self, request: Message) -> None:
        """A request is on its way to the server. ProtocolError for one that must not get there."""
        if request.id in self._groups or request.id in self._opening:
            raise ProtocolError(f"request {request.id} while another of that number is not answered")
        match request:
            case Register():
                if self._geometry is not None:  # the cells that are granted are of the first one's sizes
                    raise ProtocolError("a second registration")
                self._geometry = request.geometry
            case Reserve() | Take():
                self._groups[request.id] = request.group
            case Open():
                self._opening[request.id] = request.ticket
            case Commit():
                lacking = self._lacking.pop(request.reservation, None)
                # one that is not known may be granted already: its answer is on its way, and nothing of it is written
                if lacking is None or any(written < wanted for written, wanted in lacking.values()):
                    raise ProtocolError(f"a commit of reservation {request.reservation}, which is not written")
            case Abort():
                self._lacking.pop(request.reservation, None)
            case Confirm() | Drop():
                self._readable.pop(request.ticket, None)

    def answered(self, reply: Message) -> None:
        """An answer is on its way to the client. ProtocolError for one to a request that is not in the book."""
        group = self._groups.pop(reply.id, None)
        ticket = self._opening.pop(reply.id, None)
        match reply:
            case Registered() if self._geometry is not None:
                self.cell_bytes = reply.cell_bytes
                self.arena_cells = reply.arena_bytes // reply.cell_bytes
                sizes = (self._geometry.groups, reply.chunk_size, reply.cell_bytes)
                self._objects = [
                    _Object(object_cells(each, *sizes[1:]), object_bytes(each, *sizes[1:])) for each in sizes[0]
                ]
            case Reserved() if reply.reservation:
                cells = self._sized(reply.cells, _asked_for(group, reply))
                self._lacking[reply.reservation] = {cell: (0, length) for cell, length in cells.items()}
            case Taken() if reply.ticket:
                self._open(reply.ticket, self._sized(reply.cells, _asked_for(group, reply)))
            case Opened():
                groups = [self._sized(packed, number) for number, packed in enumerate(reply.cells)]
                self._open(
                    _asked_for(ticket, reply), {cell: length for sized in groups for cell, length in sized.items()}
                )

    def _open(self, ticket: int, cells: dict[int, int]) -> None:
        while len(self._readable) >= MOST_OPEN:
            del self._readable[next(iter(self._readable))]
        self._readable[ticket] = cells

    def _sized(self, packed: bytes, group: int) -> dict[int, int]:
        """Cells of whole objects of a group, each with how many of its bytes are used."""
        each = self._objects[group]
        last = each.bytes - (each.cells - 1) * self.cell_bytes
        return {
            cell: last if position % each.cells == each.cells - 1 else self.cell_bytes
            for position, cell in enumerate(unpack_cells(packed))
        }

    # -------------------------------------------------------------------------------------------------- what it allows

    def write(self, request: Write, length: int) -> Piece:
        """Where these bytes go. ProtocolError unless they are the next ones of a cell that was granted."""
        lacking = self._lacking.get(request.reservation, {})
        written, wanted = lacking.get(request.cell, (0, 0))
        if not 0 < length <= min(PIECE_BYTES, wanted - written) or request.offset != written:
            raise ProtocolError(
                f"{length} bytes at {request.offset} of cell {request.cell}, which reservation {request.reservation} "
                f"lacks {wanted - written} of from {written} on"
            )
        lacking[request.cell] = written + length, wanted
        return Piece(request.cell, written, length)

    def read(self, request: Read) -> Piece:
        """What to send. ProtocolError unless it is part of a cell of a ticket that is open."""
        used = self._readable.get(request.ticket, {}).get(request.cell, 0)
        if not 0 < request.length <= PIECE_BYTES or not 0 <= request.offset <= used - request.length:
            raise ProtocolError(
                f"{request.length} bytes at {request.offset} of cell {request.cell}, of which ticket {request.ticket} "
                f"opens {used}"
            )
        return Piece(request.cell, request.offset, request.length)

    # --------------------------------------------------------------------------------------- what a client has to send

    def reserved_cells(self, reservation: int) -> dict[int, int]:
        """Cells that wait to be written, each with its number of bytes."""
        return {cell: wanted for cell, (_, wanted) in self._lacking.get(reservation, {}).items()}

    def opening(self, request: int) -> int:
        """The ticket of an `Open` that is not answered yet."""
        return self._opening.get(request, 0)

    def opened_cells(self, ticket: int) -> dict[int, int]:
        """Cells that may be read, each with its number of bytes."""
        return self._readable.get(ticket, {})

    def object_bytes(self, group: int) -> int:
        """Bytes of one object of a group, as far as they travel."""
        return self._objects[group].bytes


def _asked_for(known: int | None, reply: Message) -> int:
    """What the request named, by the book."""
    if known is None:
        raise ProtocolError(f"an answer to request {reply.id}, whose number was used for another one, too")
    return known


def pieces(cells: dict[int, int]) -> list[Piece]:
    """Cells with their numbers of bytes, cut for messages."""
    return [
        Piece(cell, offset, min(PIECE_BYTES, length - offset))
        for cell, length in cells.items()
        for offset in range(0, length, PIECE_BYTES)
    ]
