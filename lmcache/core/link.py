"""A link: one registration with one boot of the server, from registering to its end. What engines talk through.

A link never heals. Any error, missed deadline or end of file breaks it for good, every request in flight fails, and
`core/client.py` registers anew: so a late answer can never be taken for another's, and nothing that the server has
already given to somebody else can be read or written.
"""

import contextlib
import functools
import itertools
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar, cast

import attrs

from lmcache.core.arena import MappedArena
from lmcache.core.connection import LENGTH
from lmcache.core.protocol import (
    MAX_FRAME,
    PROTOCOL,
    Abort,
    Commit,
    Confirm,
    Confirmed,
    Done,
    Drop,
    Error,
    ErrorCode,
    Found,
    Lookup,
    Message,
    Open,
    Opened,
    Register,
    Registered,
    Reserve,
    Reserved,
    Role,
    decode_reply,
    encode,
)
from lmcache.errors import DeadlineExceeded, LinkLost, LMCacheError, ProtocolError, Refused, VersionMismatch
from lmcache.geometry.groups import Geometry

ReplyT = TypeVar("ReplyT", bound=Message)

_READ = 1 << 16  # a buffer of more than 128 KiB costs a memory mapping, and 25 µs, for every message


@attrs.frozen
class Engine:
    """What a client tells the server of the engine process that it belongs to."""

    facts: dict[str, str]
    """The namespace in clear: everything, besides geometry and chunk size, that gives the same tokens other bytes."""
    geometry: Geometry
    role: Role
    rank: int = 0


class Pending(Generic[ReplyT]):
    """A request that was sent and not answered yet."""

    def __init__(self, link: "Link", kind: type[ReplyT], deadline: float) -> None:
        self._link = link
        self._kind = kind
        self._deadline = deadline
        self.reply: Message | None = None
        """Set by the link."""

    def poll(self) -> ReplyT | None:
        """The answer if it has come, else None; never blocks. Raises DeadlineExceeded, LinkLost or Refused."""
        if self.reply is None:
            self._link.pump(0.0)
        if self.reply is None:
            if time.monotonic() > self._deadline:
                raise self._link.late()
            self._link.check()
            return None
        return self._result()

    def wait(self) -> ReplyT:
        """Block until the answer or the deadline. Raises DeadlineExceeded, LinkLost or Refused."""
        while self.reply is None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise self._link.late()
            self._link.pump(remaining, self)
            if self.reply is None:
                self._link.check()
        return self._result()

    def _result(self) -> ReplyT:
        reply = self.reply
        if isinstance(reply, Error):
            raise Refused(reply.message, code=reply.code, remedy=reply.remedy)
        if not isinstance(reply, self._kind):
            raise self._link.broken(
                ProtocolError(f"{type(reply).__name__} in answer to a request for {self._kind.__name__}")
            )
        return reply


class Link:
    """Talks to the server over one Unix connection; any thread may call.

    The worker's half of the arena is here, too.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.alive = True
        self.epoch = ""
        self.namespace = b""
        self.chunk_size = 0
        """Tokens."""
        self.cell_bytes = 0
        self._deadline = deadline
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending[Message]] = {}
        self._received = bytearray()
        self._descriptors: list[int] = []
        # reentrant: whoever finds the link broken while sending or reading tears it down under both
        self._sending = threading.RLock()
        self._receiving = threading.RLock()
        self._state = threading.Lock()
        self._copies = 0
        self._closed = False
        self._why: LMCacheError = LinkLost("the link was closed")
        self._arena: MappedArena | None = None
        _links.add(self)
        _hook_fork()

    @classmethod
    def register(cls, address: str, engine: Engine, deadline: float) -> "Link":
        """Connect to the server's Unix socket and register.

        Raises LinkLost, DeadlineExceeded, Refused, VersionMismatch.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline)
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:
            sock.close()
            raise LinkLost(
                f"the server's Unix socket {address} cannot be reached: {error}",
                remedy="run the engine on the server's host and in its network namespace, or share a --socket-dir",
            ) from error
        link = cls(sock, deadline)
        try:
            link._register(engine)
        except BaseException:
            link.close()
            raise
        return link

    def _register(self, engine: Engine) -> None:
        try:
            reply = self._call(
                Register(next(self._ids), PROTOCOL, dict(engine.facts), engine.geometry, engine.role, engine.rank),
                Registered,
            )
        except Refused as error:
            if error.code == ErrorCode.VERSION:
                raise VersionMismatch(error.args[0], remedy=error.remedy) from error
            raise
        self.epoch, self.namespace = reply.epoch, reply.namespace
        self.chunk_size, self.cell_bytes = reply.chunk_size, reply.cell_bytes
        if engine.role is Role.WORKER:
            if not self._descriptors:
                raise ProtocolError("the server registered this worker and sent no arena")
            try:
                self._arena = MappedArena(self._descriptors[0], reply.arena_bytes)
            finally:
                self._close_descriptors()

    # ------------------------------------------------------------------------------------------------------- requests

    def reserve(self, tenant: str, parent: bytes, hashes: bytes, group: int, shard: int) -> Reserved:
        """Ask for cells to store one shard of one group of the chunks `hashes` (joined, in chain order) in. Worker."""
        reply = self._call(Reserve(next(self._ids), tenant, parent, hashes, group, shard), Reserved)
        self._backed(reply.backed)
        return reply

    def commit(self, reservation: int) -> None:
        """Every cell of the reservation is written: publish. Worker."""
        self._call(Commit(next(self._ids), reservation), Done)

    def abort(self, reservation: int) -> None:
        """Give the reservation back. Worker."""
        self._call(Abort(next(self._ids), reservation), Done)

    def lookup(self, tenant: str, hashes: bytes, limit: int) -> Pending[Found]:
        """Ask for the longest hit of at most `limit` tokens; sends and does not wait. Scheduler."""
        return self._send(Lookup(next(self._ids), tenant, hashes, limit), Found, wait=False)

    def open(self, ticket: int) -> Opened:
        """Where this rank's part of a hit lies. Worker."""
        reply = self._call(Open(next(self._ids), ticket, self.epoch), Opened)
        self._backed(reply.backed)
        return reply

    def confirm(self, ticket: int) -> bool:
        """This rank has copied; False: what it copied must not be used. Worker."""
        return self._call(Confirm(next(self._ids), ticket, self.epoch), Confirmed).held

    def drop(self, ticket: int) -> None:
        """Give a ticket up; does not wait, and raises nothing: should the link be lost, so is the ticket. Scheduler."""
        with contextlib.suppress(LMCacheError):
            self._send(Drop(next(self._ids), ticket), Done, wait=False)
            self.pump(0.0)  # nobody waits for the answers: read those that have come

    def _call(self, request: Message, kind: type[ReplyT]) -> ReplyT:
        return self._send(request, kind, wait=True).wait()

    def _send(self, request: Message, kind: type[ReplyT], *, wait: bool) -> Pending[ReplyT]:
        deadline = time.monotonic() + self._deadline
        pending = Pending(self, kind, deadline)
        body = encode(request)
        with self._sending:
            self.check()
            self._pending[request.id] = cast("Pending[Message]", pending)
            self._write(LENGTH.pack(len(body)) + body, deadline if wait else 0.0)
        return pending

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self.socket.send(view) :]
            except BlockingIOError:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not _ready(self.socket, select.POLLOUT, remaining):
                    # half a message may be out, so nothing can follow it
                    raise self.late() from None
            except OSError as error:
                raise self.broken(LinkLost(f"the server ended the link: {error}")) from error

    # -------------------------------------------------------------------------------------------------------- answers

    def pump(self, timeout: float, until: "Pending[ReplyT] | None" = None) -> None:
        """Read answers and give each to whoever waits for it, for up to `timeout` seconds or until one has come."""
        if not self._receiving.acquire(timeout=timeout if timeout > 0 else -1, blocking=timeout > 0):
            return  # another thread reads, and hands out ours as well
        try:
            if until is not None and until.reply is not None:
                return
            if self.alive and (timeout <= 0 or _ready(self.socket, select.POLLIN, timeout)):
                self._read()
        finally:
            self._receiving.release()

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self.socket.recvmsg(_READ, socket.CMSG_SPACE(4))
        except BlockingIOError:
            return
        except OSError as error:
            self.broken(LinkLost(f"the server ended the link: {error}"))
            return
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors += struct.unpack(f"{len(value) // 4}i", value[: len(value) // 4 * 4])
        if not data:
            self.broken(LinkLost("the server ended the link"))
            return
        self._received += data
        try:
            self._hand_out()
        except ProtocolError as error:
            self.broken(error)

    def _hand_out(self) -> None:
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            if length > MAX_FRAME:
                raise ProtocolError(f"the server sent a frame of {length} bytes; {MAX_FRAME} are allowed")
            if len(self._received) < LENGTH.size + length:
                return
            reply = decode_reply(bytes(self._received[LENGTH.size : LENGTH.size + length]))
            del self._received[: LENGTH.size + length]
            pending = self._pending.pop(reply.id, None)
            if pending is None:
                raise ProtocolError(f"the server answered request {reply.id}, which nobody sent")
            pending.reply = reply

    def check(self) -> None:
        """Raise why the link is broken, if it is."""
        if not self.alive:
            raise LinkLost(f"the link to the server has ended: {self._why}") from self._why

    def late(self) -> LMCacheError:
        """Give the link up because an answer is late; returns the error to raise."""
        return self.broken(DeadlineExceeded(f"the server did not answer within {self._deadline:g} s"))

    def broken(self, why: LMCacheError) -> LMCacheError:
        """Give the link up; whoever waits on it is told. Returns `why`. Idempotent."""
        with self._state:
            if self.alive:
                self.alive = False
                self._why = why
        self._tear_down_if_idle()
        return why

    def close(self) -> None:
        """Give the link up. Copies in flight finish first; the last of them unmaps the arena. Idempotent."""
        self.broken(LinkLost("the link was closed"))

    # ------------------------------------------------------------------------------------------------------ the arena

    @contextlib.contextmanager
    def copying(self) -> Iterator[memoryview]:
        """The arena's bytes, mapped until the block ends, whatever happens to the link. Worker.

        Raises LinkLost if the link has ended. Keep no view beyond the block.
        """
        with self._state:
            self.check()
            if self._arena is None:
                raise LinkLost("this link has no arena: only workers map it")
            self._copies += 1
        memory = self._arena.memory
        try:
            yield memory
        finally:
            with contextlib.suppress(BufferError):  # the caller's array outlives the block by an instruction or two
                memory.release()
            with self._state:
                self._copies -= 1
            self._tear_down_if_idle()

    def _backed(self, cells: int) -> None:
        if self._arena is not None:
            self._arena.prefault(cells * self.cell_bytes)

    def _tear_down_if_idle(self) -> None:
        with self._state:
            if self.alive or self._copies or self._closed:
                return
            self._closed = True
        if self._arena is not None:
            self._arena.close()
        self._close_descriptors()
        # last: the connection's end is what tells the server that nobody here touches the arena any more
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads, so that it lets go of its lock
        with self._sending, self._receiving:
            self.socket.close()

    def forget(self) -> None:
        """In a forked child: let go of what is the parent's, without a word to the server."""
        self.alive, self._closed = False, True
        self.socket.close()
        if self._arena is not None:
            self._arena.forget()  # at once: the kernel has left its addresses free for others

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def _ready(sock: socket.socket, event: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(max(1, int(timeout * 1000))))


_links: "weakref.WeakSet[Link]" = weakref.WeakSet()
"""Every link of this process, for `_close_in_child`."""


@functools.cache
def _hook_fork() -> None:
    """Once a process, with its first link: importing must have no effect."""
    os.register_at_fork(after_in_child=_close_in_child)


def _close_in_child() -> None:
    """A forked child that kept the descriptor would hide the engine's death from the server."""
    for link in list(_links):
        link.forget()
