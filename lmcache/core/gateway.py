"""The bulk channel: serves clients that cannot reach the Unix socket, in a thread beside the server's loop.

To the loop each of them is a connection like any other: the gateway holds the other end, and relays what passes. What
it serves itself is the arena's bytes, straight between frames and cells, once `core/rights.py` has agreed. A client
that leaves, falls silent or breaks a rule has its connection closed; what follows from that is the loop's business,
as for any client that dies.
"""

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable

import attrs
import xxhash
import zmq

from lmcache.core.connection import ConnectionEnded, Stream
from lmcache.core.curve import ServerKeys, lock_server
from lmcache.core.door import REFUSED, Door, events_of, readable
from lmcache.core.listeners import bind_tcp
from lmcache.core.malloc import keep_freed_memory
from lmcache.core.metrics import Counters
from lmcache.core.protocol import (
    PIECE_BYTES,
    Contents,
    Error,
    ErrorCode,
    Message,
    Opened,
    Read,
    Register,
    Registered,
    Reserved,
    Taken,
    Write,
    Written,
    decode_reply,
    decode_request,
    encode,
)
from lmcache.core.rights import Rights
from lmcache.errors import LMCacheError, ProtocolError

log = logging.getLogger("lmcache.server")

MAX_BULK_FRAME = 2 * PIECE_BYTES
"""Bytes of one frame: a piece of a cell, or the hashes of the longest request that a server takes."""

PEER_BACKLOG = 32
"""Messages kept for one peer, in either direction."""

MOST_PEERS = 1024
"""Clients at once."""

MESSAGES_A_TURN = 16
"""Messages from the network before answers of the loop have their turn."""

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
"""A peer from which nothing comes for so long, though it is asked every second, is gone."""

HANDSHAKE_SECONDS = 5.0

SWITCH_SECONDS = 0.0005
"""How long the gateway's thread keeps the interpreter to itself, at most, while the loop waits for it."""


def tune(sock: "zmq.Socket[bytes]") -> None:
    """Notice at either end when the other one falls silent. Before binding or connecting."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_SECONDS * 1000))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENT_SECONDS * 1000))
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_BULK_FRAME)


@attrs.define(eq=False)
class _Peer:
    """A client on another host."""

    identity: bytes
    stream: Stream
    """To the loop."""
    origin: str
    descriptor: int
    """Of its TCP connection, as ZeroMQ's monitor names it."""
    rights: Rights = attrs.field(factory=Rights)
    waiting: list[list[bytes]] = attrs.field(factory=list)
    """Answers that ZeroMQ does not take."""
    cut: bool = False
    """Whether the loop has ended the connection: not a byte of this client may be written any more."""


class Gateway:
    """Listens on a port of its own from the moment it is made. `close` ends its thread."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        host: str,
        port: int,
        keys: ServerKeys | None,
        arena: memoryview,
        admit: Callable[[socket.socket, str, Callable[[], None]], None],
        watched: "zmq.Socket[bytes] | None" = None,
    ) -> None:
        """`admit` is called in the gateway's thread with the loop's end of a new client's connection, its address, and
        what the loop has to call when it ends that connection itself, before it gives the client's cells to others.

        `watched` is the socket of the control port, whose refusals are counted, too. Raises ConfigError.
        """
        keep_freed_memory()
        self._switch_seconds = sys.getswitchinterval()
        self._arena = arena
        self._admit = admit
        self._peers: dict[bytes, _Peer] = {}
        self._by_descriptor: dict[int, _Peer] = {}
        self._by_stream: dict[int, _Peer] = {}
        self.refused = 0
        """Handshakes that failed: wrong keys, or none. Only ever grows."""
        self.malformed = 0
        self._failures = self._failures_counted = 0  # conversations that ended by a fault of ours
        self._takes_in = True  # whether the newest client could be taken in
        self.bytes_in = self.bytes_out = 0
        self._writing = threading.Lock()
        self._closing = False
        self._opened = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:
            self._router = opened.enter_context(context.socket(zmq.ROUTER))
            tune(self._router)
            self._router.setsockopt(zmq.RCVHWM, PEER_BACKLOG)
            self._router.setsockopt(zmq.SNDHWM, PEER_BACKLOG)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or it would drop answers in silence
            self._door = None
            if keys:
                self._door = Door(context, keys)
                opened.callback(self._door.close)
                lock_server(self._router, keys)
            self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED | REFUSED)
            opened.callback(self._monitor.close)
            opened.callback(self._router.disable_monitor)
            self._control = watched.get_monitor_socket(REFUSED) if watched else None
            if self._control is not None and watched is not None:
                opened.callback(self._control.close)
                opened.callback(watched.disable_monitor)
            self.port = bind_tcp(self._router, host, port, "--bulk-port")
            self._woken, self._waker = socket.socketpair()
            opened.callback(self._woken.close)
            opened.callback(self._waker.close)
            self._poller = zmq.Poller()
            for sock in (self._router, self._monitor, self._control, self._door and self._door.socket, self._woken):
                if sock is not None:
                    self._poller.register(sock, zmq.POLLIN)
            self._opened = opened.pop_all()
        sys.setswitchinterval(min(SWITCH_SECONDS, self._switch_seconds))
        self._thread = threading.Thread(target=self._run, name="lmcache-bulk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all conversations and the thread. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join()
        sys.setswitchinterval(self._switch_seconds)
        self._opened.close()

    def count_into(self, counters: Counters) -> None:
        """Report what has been counted. From the loop's thread."""
        counters.peers_refused = self.refused
        counters.bulk_messages_malformed = self.malformed
        failures = self._failures
        counters.internal_errors += failures - self._failures_counted
        self._failures_counted = failures
        counters.bulk_bytes_in, counters.bulk_bytes_out = self.bytes_in, self.bytes_out

    # ------------------------------------------------------------------------------------------------------- the loop

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception:
            log.exception("the bulk channel has failed: clients on other hosts are not served any more")
        for peer in list(self._peers.values()):
            self._end(peer, "the server is stopping")

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._pause()))
        if self._door is not None:
            self._door.answer()
        self._look_around()
        for _ in range(MESSAGES_A_TURN):
            if not readable(self._router):
                break
            frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            self._look_around()  # what happened before this message is known now
            self._from_network(frames)
        for descriptor, events in ready.items():
            peer = self._by_stream.get(descriptor) if isinstance(descriptor, int) else None
            if peer is not None:
                self._from_loop(peer, events)
        for peer in [each for each in self._peers.values() if each.waiting]:
            self._deliver(peer)

    def _pause(self) -> int | None:
        """Milliseconds. ZeroMQ does not say when a peer reads again, so those with answers waiting are tried often."""
        if any(peer.waiting for peer in self._peers.values()):
            return 2
        return None

    def _look_around(self) -> None:
        for event, value in events_of(self._monitor):
            if event == zmq.EVENT_DISCONNECTED:
                peer = self._by_descriptor.get(value)
                if peer is not None:
                    self._end(peer, "its connection has ended")
            else:
                self.refused += 1
        if self._control is not None:
            self.refused += sum(1 for _ in events_of(self._control))

    # --------------------------------------------------------------------------------------------- from the other host

    def _from_network(self, frames: "list[zmq.Frame]") -> None:
        identity = frames[0].bytes
        peer = self._peers.get(identity)
        try:
            request, payload = self._parsed(frames[1:])
            if peer is None:
                peer = self._greet(identity, request, frames[1])
            self._serve(peer, request, frames[1], payload)
        except ProtocolError as error:
            self.malformed += 1
            with contextlib.suppress(ConnectionEnded):
                self._send(identity, [encode(Error(0, ErrorCode.MALFORMED, str(error), "speak the lmcache protocol"))])
            if peer is not None:
                self._end(peer, str(error))
        except ConnectionEnded as error:
            if peer is not None:
                self._end(peer, str(error))
        except Exception as error:  # whatever it is, it is logged, counted, and costs nobody else anything
            log.exception("a conversation on the bulk channel failed")
            self._fail(self._peers.get(identity), error)

    @staticmethod
    def _parsed(frames: "list[zmq.Frame]") -> tuple[Message, memoryview | None]:
        if not 1 <= len(frames) <= 2:
            raise ProtocolError(f"a message of {len(frames)} frames")
        return decode_request(frames[0].buffer), frames[1].buffer if len(frames) == 2 else None

    def _greet(self, identity: bytes, request: Message, frame: "zmq.Frame") -> _Peer:
        """Make a connection to the loop for a client that begins as one does."""
        if not isinstance(request, Register):
            raise ProtocolError(f"{type(request).__name__} from a client that is not registered")
        if len(self._peers) >= MOST_PEERS:
            raise ProtocolError(f"there are {MOST_PEERS} clients on the bulk channel already")
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # descriptors have run out: the client tries again, and others must be served
            if self._takes_in:
                log.warning("clients on other hosts cannot be taken in for now: %s", error)
            self._takes_in = False
            self._send(identity, [b""])
            raise ConnectionEnded(str(error)) from error
        self._takes_in = True
        origin = str(frame.get("Peer-Address"))
        peer = _Peer(identity, Stream(ours), origin, int(frame.get(zmq.SRCFD)))
        self._peers[identity] = peer
        self._by_stream[ours.fileno()] = peer
        self._by_descriptor[peer.descriptor] = peer
        self._poller.register(ours.fileno(), zmq.POLLIN)
        self._admit(theirs, origin, lambda: self._cut(peer))
        return peer

    def _cut(self, peer: _Peer) -> None:
        """In the loop's thread."""
        with self._writing:
            peer.cut = True

    def _serve(self, peer: _Peer, request: Message, frame: "zmq.Frame", payload: memoryview | None) -> None:
        if isinstance(request, Write):
            self._write(peer, request, payload)
        elif payload is not None:
            raise ProtocolError(f"{type(request).__name__} with a frame of bytes")
        elif isinstance(request, Read):
            self._read(peer, request)
        else:
            peer.rights.asked(request)
            peer.stream.send(frame.bytes)
            self._watch(peer)

    def _write(self, peer: _Peer, request: Write, payload: memoryview | None) -> None:
        if payload is None:
            raise ProtocolError("Write without a frame of bytes")
        piece = peer.rights.write(request, len(payload))
        if xxhash.xxh3_64_intdigest(payload) != request.checksum:
            raise ProtocolError(f"{len(payload)} bytes for cell {piece.cell} have another checksum than they should")
        start = piece.cell * peer.rights.cell_bytes + piece.offset
        with self._writing:
            if not peer.cut:
                self._arena[start : start + piece.length] = payload
        self.bytes_in += piece.length
        self._answer(peer, [encode(Written(request.id))])

    def _read(self, peer: _Peer, request: Read) -> None:
        try:
            piece = peer.rights.read(request)
        except ProtocolError as error:
            refused = Error(request.id, ErrorCode.STALE, str(error), "open the ticket again")
            self._answer(peer, [encode(refused)])
            return
        start = piece.cell * peer.rights.cell_bytes + piece.offset
        # a copy: the cell may be somebody else's before it is sent, and the checksum must be of what is sent
        contents = bytes(self._arena[start : start + piece.length])
        self.bytes_out += piece.length
        self._answer(peer, [encode(Contents(request.id, xxhash.xxh3_64_intdigest(contents))), contents])

    # -------------------------------------------------------------------------------------------------- from the loop

    def _from_loop(self, peer: _Peer, events: int) -> None:
        try:
            if events & zmq.POLLOUT:
                peer.stream.flush()
            if events & ~zmq.POLLOUT:
                self._relay(peer)
                while peer.stream.behind:
                    self._relay(peer)
            self._watch(peer)
        except (ConnectionEnded, LMCacheError) as error:
            self._end(peer, str(error))
        except Exception as error:  # as above
            log.exception("a conversation on the bulk channel failed")
            self._fail(peer, error)

    def _relay(self, peer: _Peer) -> None:
        for body in peer.stream.receive():
            reply = decode_reply(body)
            if isinstance(reply, Registered | Reserved | Opened | Taken | Error):
                peer.rights.answered(reply)
            self._answer(peer, [body])

    def _watch(self, peer: _Peer) -> None:
        if peer.identity in self._peers:
            self._poller.modify(peer.stream.socket.fileno(), zmq.POLLIN | (zmq.POLLOUT if peer.stream.unsent else 0))

    # ------------------------------------------------------------------------------------------------------- answering

    def _answer(self, peer: _Peer, frames: list[bytes]) -> None:
        if peer.waiting or not self._send(peer.identity, frames):
            peer.waiting.append(frames)
            if len(peer.waiting) > PEER_BACKLOG:
                raise ConnectionEnded(f"{PEER_BACKLOG} answers unread")

    def _deliver(self, peer: _Peer) -> None:
        try:
            while peer.waiting and self._send(peer.identity, peer.waiting[0]):
                del peer.waiting[0]
        except ConnectionEnded as error:
            self._end(peer, str(error))

    def _send(self, identity: bytes, frames: list[bytes]) -> bool:
        """False: the peer does not read, for now. Raises ConnectionEnded for one that has gone.

        The monitor does not tell of all of them: what a client had said before it left is read after that.
        """
        try:
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise ConnectionEnded(f"it has gone: {error.strerror}") from error
        return True

    def _fail(self, peer: _Peer | None, error: Exception) -> None:
        """A fault of our own in one conversation."""
        self._failures += 1
        if peer is not None:
            self._end(peer, f"{type(error).__name__}: {error}")

    def _end(self, peer: _Peer, reason: str) -> None:
        if self._peers.pop(peer.identity, None) is None:
            return
        log.debug("the bulk channel ends its conversation with %s: %s", peer.origin, reason)
        with contextlib.suppress(ConnectionEnded):
            self._send(peer.identity, [b""])
        if self._by_descriptor.get(peer.descriptor) is peer:
            del self._by_descriptor[peer.descriptor]
        del self._by_stream[peer.stream.socket.fileno()]
        self._poller.unregister(peer.stream.socket.fileno())
        peer.stream.close()
