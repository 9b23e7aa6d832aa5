"""What a client on another host has to send and to fetch: which cells, from and to which places of its mirror.

Told of every message that passes between link and server, it says which bytes go next, and when a commit may follow
them. No sockets, and one thread: the carrier's. Bytes travel straight from and to the mirror, so a place goes to
others only once nothing is under way from or to it, whatever has become of its reservation or ticket.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator

import attrs
import msgspec
import xxhash

from lmcache.core.cells import pack_cells, unpack_cells
from lmcache.core.mirror import Mirror
from lmcache.core.protocol import (
    Abort,
    Commit,
    Confirm,
    Contents,
    Drop,
    Error,
    ErrorCode,
    Message,
    Opened,
    Read,
    Registered,
    Reserved,
    Taken,
    Write,
    Written,
)
from lmcache.core.rights import Piece, Rights, pieces
from lmcache.errors import LinkLost, LMCacheError, ProtocolError, Refused

WINDOW = 8
"""Pieces that are under way in each direction, of all stores or of all loads: enough to keep a fast network busy, few
enough to let others pass. A server drops a client for which it has several times as many answers.
"""


@attrs.define(eq=False)
class Parcel:
    """Cells of one reservation, or of one opening of a ticket, and the places that stand for them."""

    cells: dict[int, int]
    """Each with how many of its bytes travel."""
    places: dict[int, int]
    moving: int = 0
    """Pieces under way."""
    over: bool = False
    """Whether nobody needs it any more."""
    given: bool = False
    """Whether its places may be others'."""

    @property
    def bytes(self) -> int:
        """How much travels."""
        return sum(self.cells.values())


@attrs.define(eq=False)
class Fetch:
    """Cells of a ticket that are on their way into the mirror."""

    ticket: int
    opening: int
    """Id of the answer that opened it: the same ticket may be opened twice, by two threads at once."""
    parcel: Parcel | None = None
    wanted: deque[Piece] = attrs.field(factory=deque)
    coming: dict[int, Piece] = attrs.field(factory=dict)
    """By the id of their `Read`."""
    done: threading.Event = attrs.field(factory=threading.Event)
    failure: LMCacheError | None = None


@attrs.define(eq=False)
class _Sending:
    """Cells of a reservation that have to be sent before its commit."""

    parcel: Parcel
    wanted: deque[Piece]
    commit: Commit


class Shipments:
    """Of one conversation."""

    def __init__(self) -> None:
        self.mirror: Mirror | None = None
        self.unsent_bytes = 0
        """Granted to this worker, and not yet committed or aborted with the server's consent. Any thread may look."""
        self._rights = Rights()
        self._ids = itertools.count(-1, -1)  # the link's are positive
        self._reserved: dict[int, Parcel] = {}
        self._opened: dict[int, dict[int, Parcel]] = {}
        """By ticket and opening: it may be opened again, and whoever opened it before may still be copying."""
        self._sendings: deque[_Sending] = deque()
        self._writing: dict[int, Parcel] = {}  # by the id of a `Write` under way
        self._committing: dict[int, Parcel] = {}  # by the id of a `Commit` that is not answered
        self._fetches: list[Fetch] = []
        self.moved = time.monotonic()
        """When bytes of any fetch came last, or the first of them was begun: they take turns. Any thread may look."""

    def object_bytes(self, group: int) -> int:
        """Bytes of one object of a group. Any thread."""
        return self._rights.object_bytes(group)

    # ------------------------------------------------------------------------------------------------ what passes by

    def asked(self, request: Message) -> bool:
        """The link says something to the server. False: not now, for bytes have to go first; see `commits`."""
        match request:
            case Commit() if request.reservation in self._reserved:
                parcel = self._reserved.pop(request.reservation)
                self._sendings.append(_Sending(parcel, deque(pieces(parcel.cells)), request))
                return False
            case Abort() if request.reservation in self._reserved:
                self._sent(self._reserved.pop(request.reservation))
            case Confirm() | Drop():
                for parcel in self._opened.pop(request.ticket, {}).values():
                    self._release(parcel)
        self._rights.asked(request)
        return True

    def answered(self, reply: Message) -> Message:
        """The server says something to the link; returns what the link is told, with places where cells were."""
        ticket = reply.ticket if isinstance(reply, Taken) else self._rights.opening(reply.id)
        self._rights.answered(reply)
        committed = self._committing.pop(reply.id, None)
        if committed is not None:
            self._sent(committed)
        match reply:
            case Registered():
                if self.mirror is not None:
                    raise ProtocolError("the server registered this client twice")
                self.mirror = _make_mirror(reply)
            case Reserved() if reply.reservation:
                parcel = self._parcel(self._rights.reserved_cells(reply.reservation), reply.cells)
                if parcel is None:
                    raise LinkLost("the mirror is full: the server grants more than its arena holds")
                self._reserved[reply.reservation] = parcel
                self.unsent_bytes += parcel.bytes
                return msgspec.structs.replace(reply, cells=_translated(parcel, reply.cells))
            case Opened() | Taken() if ticket:
                return self._open(ticket, reply)
        return reply

    def _open(self, ticket: int, reply: Opened | Taken) -> Message:
        packed = [reply.cells] if isinstance(reply, Taken) else reply.cells
        parcel = self._parcel(self._rights.opened_cells(ticket), b"".join(packed), spare=self._rights.arena_cells)
        if parcel is None:
            return reply  # `fetch` says so
        self._opened.setdefault(ticket, {})[reply.id] = parcel
        cells = [_translated(parcel, each) for each in packed]
        return msgspec.structs.replace(reply, cells=cells[0] if isinstance(reply, Taken) else cells)

    def _parcel(self, cells: dict[int, int], packed: bytes, spare: int = 0) -> Parcel | None:
        """None where the mirror lacks room, and `spare` places besides: what is reserved always fits."""
        if self.mirror is None:
            raise ProtocolError("cells came before a registration")
        if len(cells) != len(unpack_cells(packed)):
            raise ProtocolError("the server named a cell twice")
        places = self.mirror.take(len(cells)) if self.mirror.free >= len(cells) + spare else None
        return None if places is None else Parcel(cells, dict(zip(sorted(cells), places, strict=True)))

    def _sent(self, parcel: Parcel) -> None:
        """The server has what was reserved, or does not want it."""
        self.unsent_bytes -= parcel.bytes
        self._release(parcel)

    def _release(self, parcel: Parcel) -> None:
        parcel.over = True
        if not parcel.moving and not parcel.given and self.mirror is not None:
            parcel.given = True
            self.mirror.give(parcel.places.values())

    def _arrived(self, parcel: Parcel) -> None:
        """A piece is not under way any more."""
        parcel.moving -= 1
        if parcel.over:
            self._release(parcel)

    # ------------------------------------------------------------------------------------------------------ to be sent

    def writes(self) -> Iterator[tuple[Write | Commit, memoryview | None]]:
        """What goes next, as far as the window allows: pieces with their bytes, and commits of what has gone."""
        while self._sendings and len(self._writing) < WINDOW:
            sending = self._sendings[0]
            if sending.wanted:
                yield self._write(sending, sending.wanted.popleft())
            if not sending.wanted:
                self._sendings.popleft()
                self._rights.asked(sending.commit)
                self._committing[sending.commit.id] = sending.parcel
                yield sending.commit, None

    def _write(self, sending: _Sending, piece: Piece) -> tuple[Write, memoryview]:
        contents = self._memory(sending.parcel, piece)
        checksum = xxhash.xxh3_64_intdigest(contents)
        request = Write(next(self._ids), sending.commit.reservation, piece.cell, piece.offset, checksum)
        self._rights.write(request, piece.length)
        self._writing[request.id] = sending.parcel
        sending.parcel.moving += 1
        return request, contents

    # --------------------------------------------------------------------------------------------------- to be fetched

    def begin(self, fetch: Fetch) -> None:
        """Fetch what a ticket has opened."""
        if not self._fetches:
            self.moved = time.monotonic()
        fetch.parcel = self._opened.get(fetch.ticket, {}).get(fetch.opening)
        if fetch.parcel:
            fetch.wanted.extend(pieces(fetch.parcel.cells))
        else:
            fetch.failure = Refused(
                "more is being loaded than the mirror holds", code=ErrorCode.FULL, remedy="load less at once"
            )
        self._fetches.append(fetch)
        self._end_if_done(fetch)

    def reads(self) -> Iterator[Read]:
        """What to ask for next, as far as the window allows."""
        coming = sum(len(fetch.coming) for fetch in self._fetches)
        for fetch in list(self._fetches):
            while fetch.wanted and fetch.parcel and coming < WINDOW:
                if fetch.parcel.over:  # its ticket has ended: the places may be others'
                    fetch.failure = Refused(
                        f"ticket {fetch.ticket} ended before it was fetched",
                        code=ErrorCode.STALE,
                        remedy="look up again",
                    )
                    fetch.wanted.clear()
                    self._end_if_done(fetch)
                    break
                coming += 1
                piece = fetch.wanted.popleft()
                request = Read(next(self._ids), fetch.ticket, piece.cell, piece.offset, piece.length)
                fetch.coming[request.id] = piece
                fetch.parcel.moving += 1
                yield request

    def note(self, reply: Message, contents: memoryview) -> None:
        """An answer to a `Write` or `Read`. Raises ProtocolError where it is none."""
        if isinstance(reply, Written) and reply.id in self._writing:
            self._arrived(self._writing.pop(reply.id))
            return
        fetch = next((each for each in self._fetches if reply.id in each.coming), None)
        if fetch is None or fetch.parcel is None:
            raise ProtocolError(f"the server answered request {reply.id} with {type(reply).__name__}")
        piece = fetch.coming[reply.id]
        self.moved = time.monotonic()
        if isinstance(reply, Contents):
            if len(contents) != piece.length or xxhash.xxh3_64_intdigest(contents) != reply.checksum:
                raise ProtocolError(f"{len(contents)} bytes for a piece of {piece.length} that are not what was sent")
            self._memory(fetch.parcel, piece)[:] = contents
        elif isinstance(reply, Error):
            fetch.failure = Refused(reply.message, code=reply.code, remedy=reply.remedy)
            fetch.wanted.clear()
        else:
            raise ProtocolError(f"the server answered a Read with {type(reply).__name__}")
        del fetch.coming[reply.id]
        self._arrived(fetch.parcel)
        self._end_if_done(fetch)

    def _end_if_done(self, fetch: Fetch) -> None:
        if fetch.wanted or fetch.coming:
            return
        self._fetches.remove(fetch)
        if fetch.failure and fetch.parcel:  # nobody will copy from it
            self._opened.get(fetch.ticket, {}).pop(fetch.opening, None)
            self._release(fetch.parcel)
        fetch.done.set()

    def fail(self, why: LMCacheError) -> None:
        """The conversation is over: whoever waits for bytes is told."""
        for fetch in self._fetches:
            fetch.failure = why
            fetch.done.set()

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return not (self._sendings or self._writing or self._fetches or self._committing)

    def _memory(self, parcel: Parcel, piece: Piece) -> memoryview:
        if self.mirror is None:
            raise ProtocolError("cells came before a registration")
        start = parcel.places[piece.cell] * self._rights.cell_bytes + piece.offset
        return self.mirror.memory[start : start + piece.length]


def _translated(parcel: Parcel, packed: bytes) -> bytes:
    return pack_cells([parcel.places[cell] for cell in unpack_cells(packed)])


def _make_mirror(reply: Registered) -> Mirror:
    """Twice as large as the arena: what is reserved, and as much that is being loaded."""
    if not 0 < reply.cell_bytes <= reply.arena_bytes:
        raise ProtocolError(f"an arena of {reply.arena_bytes} bytes in cells of {reply.cell_bytes}")
    places = 2 * (reply.arena_bytes // reply.cell_bytes)
    try:
        return Mirror(places, reply.cell_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise LinkLost(
            f"{places * reply.cell_bytes} bytes of address space for a mirror of the arena: {error}",
            remedy="allow this process more address space (ulimit -v, vm.overcommit_memory)",
        ) from error
