"""A client's end of the bulk channel: carries messages between its link and a server on another host, and the bytes.

The link talks to a socket as it would to the server's own. The carrier's thread holds the other end, relays what
passes, and makes a `Commit` wait until the bytes of its cells have been sent. Nothing here heals: whatever goes wrong
ends the link, and the client registers anew.
"""

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections import deque

import attrs
import xxhash
import zmq

from lmcache.core.connection import ConnectionEnded, Stream
from lmcache.core.control import ServerAddress
from lmcache.core.curve import ClientKeys, unlock_client
from lmcache.core.door import Knock
from lmcache.core.gateway import tune
from lmcache.core.mirror import Mirror
from lmcache.core.protocol import (
    Abort,
    Commit,
    Confirm,
    Contents,
    Error,
    Message,
    Opened,
    Read,
    Registered,
    Reserved,
    Taken,
    Write,
    Written,
    decode_reply,
    decode_request,
    encode,
)
from lmcache.core.rights import Piece, Rights, pieces
from lmcache.errors import LinkLost, LMCacheError, ProtocolError, Refused

log = logging.getLogger("lmcache.client")

WINDOW = 8
"""Pieces that are under way in each direction: enough to keep a fast network busy, few enough to let others pass."""

MESSAGES_A_TURN = 64


@attrs.define(eq=False)
class Fetch:
    """Cells of a ticket that are on their way into the mirror."""

    ticket: int
    wanted: deque[Piece]
    coming: dict[int, Piece] = attrs.field(factory=dict)
    """By the id of their `Read`."""
    moved: float = attrs.field(factory=time.monotonic)
    """When the last bytes came."""
    done: threading.Event = attrs.field(factory=threading.Event)
    failure: LMCacheError | None = None


@attrs.define(eq=False)
class _Sending:
    """Cells of a reservation that have to be sent before its commit."""

    reservation: int
    wanted: deque[Piece]
    commit: bytes


class Carrier:
    """One conversation with a server's bulk port. `link_end` is for the link's channel; the rest is the thread's."""

    def __init__(self, address: ServerAddress, keys: ClientKeys | None, deadline: float) -> None:
        """Connect. Raises LinkLost, ServerUnavailable, within `deadline` s."""
        self._ids = itertools.count(-1, -1)  # the link's are positive
        self._rights = Rights()
        self.mirror: Mirror | None = None
        self._fetches: deque[Fetch] = deque()
        self._sendings: deque[_Sending] = deque()
        self._writing: dict[int, int] = {}  # id of a `Write` under way → bytes
        self._reserved: dict[int, dict[int, int]] = {}  # reservation → its cells
        self._writable: dict[int, int] = {}  # cell of a reservation of ours → reservation
        self.unsent_bytes = 0
        """Granted to this worker, and not yet all sent and committed, or aborted."""
        self._closing = False
        self._new_fetches: deque[Fetch] = deque()
        with contextlib.ExitStack() as opened:
            context = opened.enter_context(zmq.Context())
            self._dealer = opened.enter_context(context.socket(zmq.DEALER))
            tune(self._dealer)
            self._dealer.setsockopt(zmq.RECONNECT_IVL, -1)  # a link never heals
            self._dealer.setsockopt(zmq.IPV6, ":" in address.host)
            self._dealer.setsockopt(zmq.SNDTIMEO, 0)  # a connection that has ended takes nothing: never wait for one
            self._dealer.setsockopt(zmq.SNDHWM, 0)  # what is under way is bounded by what is answered
            unlock_client(self._dealer, keys)
            self._knock = Knock(self._dealer, str(address), keys)
            opened.callback(self._knock.close)
            try:
                self._dealer.connect(address.endpoint)
            except zmq.ZMQError as error:
                raise LinkLost(f"{address} is no address: {error.strerror}") from error
            self._knock.wait(deadline)
            self.link_end, ours = socket.socketpair()
            self._stream = Stream(ours)
            opened.callback(ours.close)
            self._woken, self._waker = socket.socketpair()
            opened.callback(self._woken.close)
            opened.callback(self._waker.close)
            self._woken.setblocking(False)
            self._opened = opened.pop_all()
        self._thread = threading.Thread(target=self._run, name="lmcache-carrier", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._opened.close()
            self.link_end.close()
            raise LinkLost("this process gets no more threads") from error

    # ------------------------------------------------------------------------------------------------ the link's calls

    def fetch(self, ticket: int) -> Fetch:
        """Bring the cells of a ticket that has just been opened into the mirror. Does not wait."""
        fetch = Fetch(ticket, deque())
        self._new_fetches.append(fetch)
        self._wake()
        return fetch

    def object_bytes(self, group: int) -> int:
        """Bytes of one object of a group."""
        return self._rights.object_bytes(group)

    def stop(self) -> None:
        """End the conversation and the thread; the server drops what this client held. Idempotent."""
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def forget(self) -> None:
        """In a forked child: there is no thread, and the sockets are the parent's."""
        for sock in (self._stream.socket, self._woken, self._waker):
            sock.close()
        if self.mirror:
            self.mirror.forget()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x", socket.MSG_DONTWAIT)

    # ------------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        why: LMCacheError = LinkLost("the link was closed")
        try:
            while not self._closing:
                self._turn()
        except zmq.Again:
            why = LinkLost("the server ended the connection")
        except ConnectionEnded:
            pass  # the link's end was closed
        except LMCacheError as error:
            why = error
            log.debug("the bulk channel has ended: %s", error)
        except Exception as error:
            why = LinkLost(f"{type(error).__name__}: {error}")
            log.exception("the bulk channel has failed")
        for fetch in [*self._fetches, *self._new_fetches]:
            fetch.failure = LinkLost(f"the link ended while cells were on their way: {why}")
            fetch.done.set()
        self._closing = True
        self._opened.close()  # the link sees the end of its connection

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._knock.monitor, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._stream.socket, zmq.POLLIN | (zmq.POLLOUT if self._stream.unsent else 0))
        ready = dict(poller.poll())
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
            self._begin_fetches()
        if ready.get(self._stream.socket.fileno(), 0) & zmq.POLLOUT:
            self._stream.flush()
        if ready.get(self._stream.socket.fileno(), 0) & ~zmq.POLLOUT:
            self._from_link()
        self._from_server()
        self._knock.look()
        if self._knock.gone:
            raise LinkLost("the server ended the connection, or has fallen silent")
        self._send_pieces()

    def _from_link(self) -> None:
        for body in self._stream.receive():
            request = decode_request(body)
            match request:
                case Commit() if request.reservation in self._reserved:
                    wanted = deque(pieces(self._reserved[request.reservation]))
                    self._sendings.append(_Sending(request.reservation, wanted, body))
                    continue
                case Abort():
                    self._let_go(request.reservation)
                case Confirm() if self.mirror is not None:
                    # before the server hears of it: from then on the cells may be granted to us to be written
                    self.mirror.release(self._rights.opened_cells(request.ticket))
            self._rights.asked(request)
            self._dealer.send(body)

    def _from_server(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            body = frames[0].buffer
            if not len(body):
                raise LinkLost("the server ended the link")
            reply = decode_reply(body)
            if reply.id < 0:
                self._note(reply, frames[1].buffer if len(frames) > 1 else memoryview(b""))
            else:
                self._note_passing(reply)
                self._stream.send(frames[0].bytes)

    def _note_passing(self, reply: Message) -> None:
        if isinstance(reply, Opened | Taken) and self.mirror is not None:
            ticket = reply.ticket if isinstance(reply, Taken) else self._rights.opening(reply.id)
            self.mirror.release(self._rights.opened_cells(ticket))  # of a time before: it may be opened again
            self._rights.answered(reply)
            self.mirror.hold(self._rights.opened_cells(ticket))
            return
        self._rights.answered(reply)
        if isinstance(reply, Reserved) and reply.reservation and self.mirror is not None:
            cells = self._rights.reserved_cells(reply.reservation)
            self._reserved[reply.reservation] = cells
            self._writable.update(dict.fromkeys(cells, reply.reservation))
            self.mirror.hold(cells)
            self.unsent_bytes += sum(cells.values())
        elif isinstance(reply, Registered):
            self.mirror = self._make_mirror(reply)

    @staticmethod
    def _make_mirror(reply: Registered) -> Mirror:
        try:
            return Mirror(reply.arena_bytes, reply.cell_bytes)
        except OSError as error:
            raise LinkLost(
                f"{reply.arena_bytes} bytes of address space for a mirror of the arena: {error}",
                remedy="allow this process more address space (ulimit -v, vm.overcommit_memory)",
            ) from error

    def _let_go(self, reservation: int) -> None:
        """The cells of a reservation are sent, or are not wanted."""
        cells = self._reserved.pop(reservation, {})
        for cell in cells:
            self._writable.pop(cell, None)
        self.unsent_bytes -= sum(cells.values())
        if self.mirror is not None:
            self.mirror.release(cells)

    # ------------------------------------------------------------------------------------------------------- the bytes

    def _begin_fetches(self) -> None:
        while self._new_fetches:
            fetch = self._new_fetches.popleft()
            fetch.wanted.extend(pieces(self._rights.opened_cells(fetch.ticket)))
            self._fetches.append(fetch)
            if not fetch.wanted:
                self._end_fetch(fetch)

    def _send_pieces(self) -> None:
        while self._sendings and len(self._writing) < WINDOW:
            sending = self._sendings[0]
            if sending.wanted:
                self._write(sending.reservation, sending.wanted.popleft())
            if not sending.wanted:
                self._sendings.popleft()
                self._let_go(sending.reservation)
                self._rights.asked(decode_request(sending.commit))
                self._dealer.send(sending.commit)
        for fetch in self._fetches:
            while fetch.wanted and len(fetch.coming) < WINDOW:
                self._read(fetch, fetch.wanted.popleft())

    def _write(self, reservation: int, piece: Piece) -> None:
        contents = bytes(self._piece(piece))
        request = Write(next(self._ids), reservation, piece.cell, piece.offset, xxhash.xxh3_64_intdigest(contents))
        self._rights.write(request, piece.length)
        self._writing[request.id] = piece.length
        self._dealer.send_multipart([encode(request), contents], copy=False)

    def _read(self, fetch: Fetch, piece: Piece) -> None:
        request = Read(next(self._ids), fetch.ticket, piece.cell, piece.offset, piece.length)
        fetch.coming[request.id] = piece
        self._dealer.send(encode(request))

    def _note(self, reply: Message, contents: memoryview) -> None:
        """An answer to a request of our own."""
        if isinstance(reply, Written) and self._writing.pop(reply.id, 0):
            return
        fetch = next((each for each in self._fetches if reply.id in each.coming), None)
        if fetch is None:
            raise ProtocolError(f"the server answered request {reply.id} with {type(reply).__name__}")
        piece = fetch.coming.pop(reply.id)
        fetch.moved = time.monotonic()
        if isinstance(reply, Contents):
            if len(contents) != piece.length or xxhash.xxh3_64_intdigest(contents) != reply.checksum:
                raise ProtocolError(f"{len(contents)} bytes for a piece of {piece.length} that are not what was sent")
            if piece.cell in self._writable:
                # the ticket cannot hold any more: its cell is another chunk's, which is being written here
                fetch.failure = Refused("the ticket did not hold while it was fetched", code="stale")
            else:
                self._piece(piece)[:] = contents
        elif isinstance(reply, Error):
            fetch.failure = Refused(reply.message, code=reply.code, remedy=reply.remedy)
        else:
            raise ProtocolError(f"the server answered a Read with {type(reply).__name__}")
        if fetch.failure:
            fetch.wanted.clear()
        if not fetch.wanted and not fetch.coming:
            self._end_fetch(fetch)

    def _end_fetch(self, fetch: Fetch) -> None:
        self._fetches.remove(fetch)
        fetch.done.set()

    def _piece(self, piece: Piece) -> memoryview:
        if self.mirror is None:
            raise ProtocolError("cells came before a registration")
        start = piece.cell * self._rights.cell_bytes + piece.offset
        return self.mirror.memory[start : start + piece.length]
