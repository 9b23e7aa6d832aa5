"""The server: one thread that waits for messages on both transports, answers each, and notices who dies.

`Server(config, policy)` opens everything or raises; `run()` serves until `stop()`; nothing is left behind after it, and
what has a name (a socket under `--socket-dir`) is cleaned up by the next start.

One module, though a long one: whatever ends a connection has to undo what any other method did for it.
"""

import contextlib
import functools
import logging
import math
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import zmq

from lmcache import __version__
from lmcache.core.arena import SLAB_BYTES, Backer, Mapping, create_segment
from lmcache.core.cache import Cache
from lmcache.core.config import ServerConfig
from lmcache.core.connection import Connection, ConnectionEnded
from lmcache.core.control import ServerAddress
from lmcache.core.held_answers import HeldAnswers
from lmcache.core.huge_pages import available_bytes, shortage
from lmcache.core.interpreter import collector_off, lock_handed_over_after
from lmcache.core.l1_only import L1Only
from lmcache.core.listeners import bind_router, listen
from lmcache.core.numa import Placement, nodes_with_memory
from lmcache.core.policy import EvictionPolicy
from lmcache.core.protocol import (
    PROTOCOL,
    AskAgain,
    Error,
    ErrorCode,
    Hello,
    Lookup,
    Message,
    Pin,
    Ping,
    Pong,
    Register,
    Registered,
    Request,
    Reserve,
    Role,
    Status,
    StatusReport,
    Unpin,
    Welcome,
    decode_request,
    encode,
)
from lmcache.core.service import HANDLERS, Service, check_version
from lmcache.core.voices import Speakers
from lmcache.errors import ConfigError, LMCacheError, ProtocolError, Refused

if TYPE_CHECKING:  # most servers neither record nor have tiers or keys, and start without what that takes
    from lmcache.core.blob import BlobStore
    from lmcache.core.curve import ServerKeys
    from lmcache.core.gateway import Gateway
    from lmcache.core.observing import Observer
    from lmcache.core.recording import Recorder
    from lmcache.core.tier_url import TierSettings
    from lmcache.core.tiering import Tiering

log = logging.getLogger("lmcache.server")

PARK_SECONDS = 0.5
"""A store waits this long, at most, for memory to be put behind the arena; then it is placed in what there is."""

DRAIN_SECONDS = 2.0
"""A stopping server waits this long, at most, for stores in flight."""

TCP_MESSAGES_A_TURN = 8
"""Messages that are answered on TCP before the Unix connections have their turn."""

TOLD_REFUSALS = 100
"""Engines that were refused, of which the log has a line: anybody may ask with any words."""

TURN_SECONDS = 0.0005
"""Threads of tiers wait this long, at most, for their turn to run Python (docs/decisions/0036)."""

ACCEPT_PAUSE_SECONDS = 1.0
"""Pause after a client could not be accepted, for want of descriptors as a rule."""


class Server:
    """Opens port, socket and arena; raises ConfigError or MemoryLimitError before anything is served.

    `recorder`, if there is one, hears of every lookup and store, `observer` of what plugins want to hear of; whoever
    made them closes them, after `run`. `speakers` are the admission and retention policies that were chosen; `tiers`
    stand behind L1, and are closed with the server.
    """

    def __init__(
        self,
        config: ServerConfig,
        policy: EvictionPolicy,
        recorder: "Recorder | None" = None,
        speakers: Speakers | None = None,
        tiers: "Sequence[tuple[BlobStore, TierSettings]]" = (),
        observer: "Observer | None" = None,
    ) -> None:
        config.check_memory()
        self.config = config
        self.epoch = os.urandom(8).hex()
        self._resources = contextlib.ExitStack()
        self._connections: dict[int, Connection] = {}
        self._parked: list[tuple[float, Connection, Reserve]] = []
        self._held = HeldAnswers()
        self._stopping = 0.0
        self._waking = False
        """Whether the loop has been told to look around, and has not begun to."""
        self._retry = False
        """Whether memory has come, or has failed to, since those who wait for it were asked last."""
        self._behind: dict[int, Connection] = {}
        """Connections with messages that wait for their next turn."""
        self._accept_again = 0.0
        self._refusals: set[str] = set()
        self._admitted: deque[Connection] = deque()
        """Clients of the gateway that the loop has not taken in yet."""
        with contextlib.ExitStack() as opened:
            try:
                self._open(opened, policy, recorder, speakers, tiers, observer)
            except (OSError, OverflowError, ValueError) as error:
                if isinstance(error, LMCacheError):
                    raise
                raise ConfigError(
                    f"this host does not give the server what it needs: {error}",
                    remedy="look at the limits of the process (ulimit -a) and at --l1-size-gb",
                ) from error
            self._resources = opened.pop_all()

    def _open(
        self,
        opened: contextlib.ExitStack,
        policy: EvictionPolicy,
        recorder: "Recorder | None",
        speakers: Speakers | None,
        tiers: "Sequence[tuple[BlobStore, TierSettings]]",
        observer: "Observer | None",
    ) -> None:
        config = self.config
        self._has_tiers = bool(tiers)
        keys = _server_keys(config)
        self._router, self.port = opened.enter_context(bind_router(config.host, config.port, keys))
        self._listener, self.socket_address = opened.enter_context(listen(config.socket_dir, self.port, self.epoch))
        self._wake_receiver, self._wake_sender = socket.socketpair()
        opened.enter_context(self._wake_receiver)
        opened.enter_context(self._wake_sender)
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._segment = create_segment(config.arena_bytes, config.huge_page_bytes)
        opened.callback(os.close, self._segment)
        mapping = Mapping(self._segment, config.arena_bytes, reserve=bool(config.huge_page_bytes))
        opened.callback(mapping.close)
        backer = self._backer(mapping)
        opened.callback(backer.close)
        # ids of one boot never meet those of another, should a client mix them up in spite of the epoch
        self.service = Service(
            *(config, policy, backer, self.epoch),
            first_id=int.from_bytes(os.urandom(5), "little") << 20,
            recorder=recorder,
            observer=observer,
            speakers=speakers,
            make_tiering=functools.partial(self._tiering, tiers, mapping) if tiers else L1Only,
        )
        # before the mapping is closed: until then their calls may read and write there
        opened.callback(self.service.tiering.close)
        self._gateway = None
        if config.bulk:
            self._gateway = self._open_gateway(opened, keys, mapping)
        self._selector = opened.enter_context(selectors.DefaultSelector())
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._woken)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._router.fileno(), selectors.EVENT_READ, _nothing)

    def _backer(self, mapping: Mapping) -> Backer:
        config = self.config
        placement = Placement(nodes_with_memory())
        if not config.huge_page_bytes:
            return Backer(mapping, config.max_workers, self.wake, placement=placement)
        if not mapping.reserved:
            log.warning("%s", shortage(config.arena_bytes))
        available = (lambda: mapping.size) if mapping.reserved else available_bytes
        slab = max(SLAB_BYTES, config.huge_page_bytes)
        return Backer(mapping, config.max_workers, self.wake, available=available, slab_bytes=slab, placement=placement)

    def _open_gateway(self, opened: contextlib.ExitStack, keys: "ServerKeys | None", mapping: Mapping) -> "Gateway":
        from lmcache.core.gateway import Gateway  # only where there may be engines on other hosts

        config = self.config
        port = config.bulk_port if config.bulk_port is not None else self.port + 1 if config.port else 0
        memory = mapping.memory
        opened.callback(memory.release)
        gateway = Gateway(self._router.context, config.host, port, keys, memory, self._admit, self._router)
        opened.callback(gateway.close)
        return gateway

    @property
    def bulk_port(self) -> int:
        """TCP port of the bulk channel; 0 where there is none."""
        return self._gateway.port if self._gateway else 0

    def _tiering(self, tiers: "Sequence[tuple[BlobStore, TierSettings]]", mapping: Mapping, cache: Cache) -> "Tiering":
        from lmcache.core.tiering import Tiering

        for blobs, _ in tiers:
            blobs.begin(self.epoch)
        return Tiering(
            *(cache, tiers, functools.partial(mapping.pieces, self.config.cell_bytes), self.wake),
            deadline_s=self.config.l2_deadline_s,
            min_speedup=self.config.l2_min_speedup,
        )

    @property
    def address(self) -> str:
        """`host:port`, the port being the one that was bound."""
        return str(ServerAddress(self.config.host, self.port))

    # ------------------------------------------------------------------------------------------------------- the loop

    def run(self) -> None:
        """Serve until `stop`, then drain and close everything. Call once, from any one thread."""
        log.info(
            "lmcache %s (pid %d, epoch %s) serves %s and %s; policy %s, L1 %d cells of %d KiB",
            *(__version__, os.getpid(), self.epoch, self._listens_on, self.socket_address),
            *(self.service.cache.policy.name, self.config.cells, self.config.cell_bytes >> 10),
        )
        with contextlib.ExitStack() as interpreter:
            interpreter.enter_context(collector_off())
            if self._has_tiers:  # their threads start the next call of a drive before the loop has ended its turn
                interpreter.enter_context(lock_handed_over_after(TURN_SECONDS))
            try:
                self.service.keep_ahead()
                while not self._finished():
                    self._turn()
            finally:
                log.info("stopping, with %d stores in flight", len(self.service.cache.reservations))
                self.close()

    def _turn(self) -> None:
        """Wait until there is something to do, and do it."""
        behind, self._behind = self._behind, {}
        for key, mask in self._selector.select(0 if behind else self._timeout()):
            key.data(mask)
        for connection in behind.values():
            if connection.owner in self._connections and connection.owner not in self._behind:
                self._ready(connection, selectors.EVENT_READ)
        self._retry_parked()
        self._answer_router()
        self.service.advance()
        self._answer_held()
        self._listen_again()

    @property
    def _listens_on(self) -> str:
        return f"{self.address} (bulk channel: port {self.bulk_port})" if self._gateway else self.address

    @property
    def wake_descriptor(self) -> int:
        """What makes the loop look around when something is written there; it does not block, and ends with `close`."""
        return self._wake_sender.fileno()

    def stop(self) -> None:
        """Ask the loop to end; safe in a signal handler and from any thread."""
        self._stopping = self._stopping or time.monotonic()
        self.wake()

    def close(self) -> None:
        """Close everything. Clients see the end of their connections. Idempotent."""
        for connection in list(self._connections.values()):
            self._end(connection, "the server is stopping")
        self._resources.close()
        while self._admitted:
            self._admitted.popleft().close()

    def wake(self) -> None:
        """Make the loop look around; from any thread."""
        if self._waking:
            return  # it has yet to look, at this as well
        self._waking = True
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake; closed: it has ended
            self._wake_sender.send(b"w")

    def _woken(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)
        self._waking = False  # before anything is looked at: whoever has seen True before has left it there by now
        self.service.collect_backed()
        self._retry = True
        self._take_in()

    def _finished(self) -> bool:
        if not self._stopping:
            return False
        return not self.service.cache.reservations or time.monotonic() > self._stopping + DRAIN_SECONDS

    def _timeout(self) -> float | None:
        if self._router_waits():
            return 0.0
        times = [until for until, _, _ in self._parked]
        times += [self._accept_again] if self._accept_again else []
        times += [self._held.next_due] if self._held.next_due < math.inf else []
        times += [time.monotonic() + 0.05] if self._stopping else []
        pause = self.service.pause
        times += [time.monotonic() + pause] if pause is not None else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    # ------------------------------------------------------------------------------------------------ TCP: who is there

    def _router_waits(self) -> bool:
        # its descriptor is edge-triggered: ZeroMQ is asked before every wait, or the loop would sleep over a message
        return bool(int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _answer_router(self) -> None:
        for _ in range(TCP_MESSAGES_A_TURN):
            if not self._router_waits():
                return
            frames = self._router.recv_multipart()
            if len(frames) == 2:
                self._send_tcp(frames[0], *self._answer_tcp(frames[1]))
            else:
                self.service.cache.counters.messages_malformed += 1

    def _send_tcp(self, peer: bytes, _reply: Message, body: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer has gone, or does not read
            self._router.send_multipart([peer, body], zmq.NOBLOCK)

    def _answer_tcp(self, data: bytes) -> tuple[Message, bytes]:
        try:
            request = decode_request(data)
        except ProtocolError as error:
            self.service.cache.counters.messages_malformed += 1
            unread = Error(0, ErrorCode.MALFORMED, str(error), "speak the lmcache protocol")
            return unread, encode(unread)
        # None stands for a store that waits for memory, and there are none on TCP
        return cast("tuple[Message, bytes]", self._guarded(request, self._tcp_reply))

    def _tcp_reply(self, request: Request) -> Message:
        match request:
            case Hello():
                check_version(request.protocol, request.version)
                return Welcome(request.id, PROTOCOL, __version__, self.epoch, self.socket_address, self.bulk_port)
            case Ping():
                return Pong(request.id, self.epoch)
            case Status():
                return StatusReport(request.id, self._report())
            case Pin():
                return self.service.pin(request)
            case Unpin():
                return self.service.unpin(request)
        raise Refused(
            f"{type(request).__name__} is for the Unix socket",
            code=ErrorCode.UNREGISTERED,
            remedy="on another host engines use the bulk channel",
        )

    def _report(self) -> dict[str, Any]:
        clients = [
            {
                "role": c.role.value,
                "rank": c.rank,
                "pid": c.pid,
                "host": c.origin,
                "namespace": c.namespace.digest.hex(),
            }
            for c in self._connections.values()
            if c.namespace
        ]
        if self._gateway:
            self._gateway.count_into(self.service.cache.counters)
        return {
            "address": self.address,
            "bulk_port": self.bulk_port,
            "pid": os.getpid(),
            **self.service.report(clients),
        }

    # -------------------------------------------------------------------------------------------- Unix: who does things

    def _accept(self, _: int) -> None:
        try:
            accepted, _address = self._listener.accept()
        except OSError as error:  # it went away again, or descriptors have run out: others must be served
            log.warning("a client could not be accepted: %s; trying again in %g s", error, ACCEPT_PAUSE_SECONDS)
            self._selector.unregister(self._listener)
            self._accept_again = time.monotonic() + ACCEPT_PAUSE_SECONDS
            return
        connection = Connection(accepted)
        self._join(connection)
        if not connection.trusted:
            self.service.cache.counters.clients_refused += 1
            self._end(connection, f"its user {connection.uid} is not the server's")

    def _join(self, connection: Connection) -> None:
        self._connections[connection.owner] = connection
        self._selector.register(connection.socket, selectors.EVENT_READ, lambda mask: self._ready(connection, mask))

    def _admit(self, sock: socket.socket, origin: str, cut: Callable[[], None]) -> None:
        """In the gateway's thread: a client on another host has come."""
        connection = Connection(sock, origin)
        connection.cut = cut
        self._admitted.append(connection)
        self.wake()

    def _take_in(self) -> None:
        while self._admitted:
            self._join(self._admitted.popleft())

    def _listen_again(self) -> None:
        if self._accept_again and time.monotonic() >= self._accept_again:
            self._accept_again = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _ready(self, connection: Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                connection.flush()
            if mask & selectors.EVENT_READ:
                for data in connection.receive():
                    self._answer_unix(connection, data)
                if connection.behind:
                    self._behind[connection.owner] = connection
            self._watch(connection)
        except ConnectionEnded as error:
            self._end(connection, str(error))
        except ProtocolError as error:
            self.service.cache.counters.messages_malformed += 1
            with contextlib.suppress(ConnectionEnded):
                connection.send(encode(Error(0, ErrorCode.MALFORMED, str(error), "speak the lmcache protocol")))
            self._end(connection, str(error))

    def _watch(self, connection: Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if connection.owner in self._connections and self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, self._selector.get_key(connection.socket).data)

    def _answer_unix(self, connection: Connection, data: bytes) -> None:
        request = decode_request(data)
        answer = self._guarded(request, functools.partial(self._unix_reply, connection))
        if answer is not None:
            reply, body = answer
            gets_arena = isinstance(reply, Registered) and connection.role is Role.WORKER and not connection.origin
            connection.send(body, self._segment if gets_arena else None)

    def _unix_reply(self, connection: Connection, request: Request) -> Message | None:
        if self._stopping and isinstance(request, Register | Reserve | Lookup):
            raise Refused("the server is stopping", code=ErrorCode.STOPPING, remedy="wait for its successor")
        if isinstance(request, Reserve):
            return self._reserve(connection, request)
        if isinstance(request, AskAgain):
            return self._ask_again(connection, request)
        handler = HANDLERS.get(type(request))
        if handler is None:
            return self._tcp_reply(request)
        reply: Message = handler(self.service, connection, request)
        if isinstance(request, Register):
            log.info("%s registered", connection)
        return reply

    def _reserve(self, connection: Connection, request: Reserve) -> Message | None:
        reply = self.service.reserve(connection, request, final=False)
        if reply is None:
            self._parked.append((time.monotonic() + PARK_SECONDS, connection, request))
        return reply

    def _retry_parked(self) -> None:
        if not (self._retry or self._stopping or any(time.monotonic() >= until for until, _, _ in self._parked)):
            return  # every message brings the loop here: only what has changed is worth a look
        self._retry = False
        parked, self._parked = self._parked, []
        for until, connection, request in parked:
            if connection.owner not in self._connections:
                continue
            final = time.monotonic() >= until or bool(self._stopping)
            again = functools.partial(self.service.reserve, connection, final=final)
            answer = self._guarded(request, again)
            if answer is None:
                self._parked.append((until, connection, request))
                continue
            self._send_late(connection, answer[1])

    def _ask_again(self, connection: Connection, request: AskAgain) -> Message | None:
        reply = self.service.ask_again(connection, request)
        held = reply.again and not self._stopping and self._held.hold(connection, request)
        return None if held else reply

    def _answer_held(self) -> None:
        undecided = self.service.tiering.undecided
        for connection, request in self._held.due(undecided, everything=bool(self._stopping)):
            if connection.owner in self._connections:
                answer = self._guarded(request, functools.partial(self.service.ask_again, connection))
                if answer:
                    self._send_late(connection, answer[1])

    def _send_late(self, connection: Connection, body: bytes) -> None:
        """Answer a request that was not answered when it came."""
        try:
            connection.send(body)
            self._watch(connection)
        except ConnectionEnded as error:
            self._end(connection, str(error))

    def _guarded(self, request: Request, answer: Callable[[Any], Message | None]) -> tuple[Message, bytes] | None:
        """The answer, and its bytes, or the error that the request has met: one request can never hurt another.

        None: there is no answer yet.
        """
        counters = self.service.cache.counters
        try:
            self.service.advance()
            reply = answer(request)
            # encoded in here, for what a reply is made of may come from a peer
            return None if reply is None else (reply, encode(reply))
        except Refused as error:
            counters.requests_refused += 1
            if isinstance(request, Register) and error.code != ErrorCode.STOPPING:
                self._tell_refused(request, error)
            reply = Error(request.id, error.code, error.args[0], error.remedy)
        except Exception as error:  # whatever it is, it is logged in full, counted, and answered
            counters.internal_errors += 1
            log.exception("%s failed", type(request).__name__)
            reply = Error(request.id, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}", "see the server's log")
        return reply, encode(reply)

    def _tell_refused(self, request: Register, error: Refused) -> None:
        """Once for each engine and reason: it tries again and again, and whoever reads this may not see its log."""
        text = f"{request.facts.get('model', '') or 'an engine'} ({request.role.value}) is refused: {error}"
        if text not in self._refusals and len(self._refusals) < TOLD_REFUSALS:
            self._refusals.add(text)
            log.warning("%s", text)

    def _end(self, connection: Connection, reason: str) -> None:
        if self._connections.pop(connection.owner, None) is None:
            return
        self._selector.unregister(connection.socket)
        connection.close()
        connection.cut()
        # only now, with the liveness channel ended, may what it was writing go to others
        self.service.owner_gone(connection.owner)
        self.service.forget_unused({id(other.namespace) for other in self._connections.values()})
        log.info("%s left: %s", connection, reason)


def _server_keys(config: ServerConfig) -> "ServerKeys | None":
    if config.keys is None:
        return None
    from lmcache.core.curve import read_server_keys

    return read_server_keys(config.keys)


def _nothing(_: int) -> None:
    """The loop asks ZeroMQ itself, after every wake-up."""
