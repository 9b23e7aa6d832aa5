"""A link: one registration with one boot of the server, from registering to its end. What engines talk through.

A link never heals. Any error, missed deadline or end of file breaks it for good, every request in flight fails, and
`core/client.py` registers anew: so a late answer can never be taken for another's, and nothing that the server has
already given to somebody else can be read or written.
"""

import contextlib
import functools
import itertools
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import TypeVar

import attrs

from lmcache.core.arena import ArenaAttendant, MappedArena
from lmcache.core.channel import Channel, Pending
from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.mirror import Mirror
from lmcache.core.numa import ANYWHERE
from lmcache.core.pending_hit import PendingHit
from lmcache.core.protocol import (
    PROTOCOL,
    Abort,
    AskAgain,
    Commit,
    Confirm,
    Confirmed,
    Done,
    Drop,
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
)
from lmcache.errors import LinkLost, LMCacheError, ProtocolError, Refused, VersionMismatch
from lmcache.geometry.groups import Geometry

__all__ = ["Engine", "Link", "Pending"]

ReplyT = TypeVar("ReplyT", bound=Message)

HELD_SHARE = 0.25
"""Of the deadline: for so long the server may keep back what is not final. The rest is for everything else."""


@attrs.frozen
class Engine:
    """What a client tells the server of the engine process that it belongs to."""

    facts: dict[str, str]
    """The namespace in clear: everything, besides geometry and chunk size, that gives the same tokens other bytes."""
    geometry: Geometry
    role: Role
    rank: int = 0
    node: int = ANYWHERE
    """NUMA node of a worker's device."""


class Link:
    """Talks to the server over one Unix connection; any thread may call.

    The worker's half of the arena is here, too.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._channel = Channel(sock, deadline, self._tear_down_if_idle)
        self._hold = deadline * HELD_SHARE
        self.epoch = ""
        self.namespace = b""
        self.chunk_size = 0
        """Tokens."""
        self.cell_bytes = 0
        self._ids = itertools.count(1)
        self._state = threading.Lock()
        self._copies = 0
        self._closed = False
        self._arena: MappedArena | Mirror | None = None
        _links.add(self)
        _hook_fork()

    @property
    def alive(self) -> bool:
        """Whether it can be used; once False, for ever."""
        return self._channel.alive

    @property
    def why(self) -> LMCacheError:
        """Why it is not alive."""
        return self._channel.why

    def fileno(self) -> int:
        """Of the socket, for `select`: -1 once the link is torn down."""
        return self._channel.socket.fileno()

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
                remedy="run the engine on the server's host and in its network namespace",
            ) from error
        link = cls(sock, deadline)
        link._register_or_close(engine)
        return link

    def _register_or_close(self, engine: Engine) -> None:
        try:
            self._register(engine)
        except BaseException:
            self.close()
            raise

    def _register(self, engine: Engine) -> None:
        try:
            identity = (dict(engine.facts), engine.geometry, engine.role, engine.rank, engine.node)
            reply = self._call(Register(next(self._ids), PROTOCOL, *identity), Registered)
        except Refused as error:
            if error.code == ErrorCode.VERSION:
                raise VersionMismatch(error.args[0], remedy=error.remedy) from error
            raise
        self.epoch, self.namespace = reply.epoch, reply.namespace
        self.chunk_size, self.cell_bytes = reply.chunk_size, reply.cell_bytes
        self._take_arena(engine, reply)

    def _take_arena(self, engine: Engine, reply: Registered) -> None:
        if engine.role is not Role.WORKER:
            return
        descriptor = self._channel.take_descriptor()
        if descriptor is None:
            raise ProtocolError("the server registered this worker and sent no arena")
        try:
            self._map(descriptor, reply.arena_bytes)
        finally:
            os.close(descriptor)

    def _map(self, descriptor: int, size: int) -> None:
        actual = os.fstat(descriptor).st_size
        if actual != size:
            raise ProtocolError(f"the server sent an arena of {actual} bytes and said {size}")
        try:
            self._arena = MappedArena(descriptor, size)
        except (OSError, RuntimeError) as error:
            raise LinkLost(
                f"the arena of {size} bytes cannot be mapped: {error}",
                remedy="allow this process more address space and threads",
            ) from error

    # ------------------------------------------------------------------------------------------------------- requests

    def reserve(
        self, tenant: str, parent: bytes, hashes: bytes, group: int, shard: int, hints: Hints = NO_HINTS
    ) -> Reserved:
        """Ask for cells to store one shard of one group of the chunks `hashes` (joined, in chain order) in. Worker."""
        reply = self._call(Reserve(next(self._ids), tenant, parent, hashes, group, shard, hints), Reserved)
        self._backed(reply.backed)
        return reply

    def commit(self, reservation: int) -> None:
        """Every cell of the reservation is written: publish. Worker."""
        self._call(Commit(next(self._ids), reservation), Done)

    def abort(self, reservation: int) -> None:
        """Give the reservation back. Worker."""
        self._call(Abort(next(self._ids), reservation), Done)

    def lookup(
        self, tenant: str, hashes: bytes, limit: int, hints: Hints = NO_HINTS, prefill_speed: float = 0.0
    ) -> PendingHit:
        """Ask for the longest hit of at most `limit` tokens; sends and does not wait. Scheduler.

        `prefill_speed`, in tokens a second, lets the server leave in a tier what is computed sooner than read.
        """
        request = Lookup(next(self._ids), tenant, hashes, limit, hints, prefill_speed)
        pending = self._send(request, Found)
        return PendingHit(pending, lambda ticket: self._send(AskAgain(next(self._ids), ticket, self._hold), Found))

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
            self._send(Drop(next(self._ids), ticket), Done)

    def _call(self, request: Message, kind: type[ReplyT]) -> ReplyT:
        return self._send(request, kind).wait()

    def _send(self, request: Message, kind: type[ReplyT]) -> Pending[ReplyT]:
        return self._channel.send(request, kind)

    def tend(self) -> None:
        """Read answers that nobody waits for, send what the socket did not take. The client calls it now and then."""
        self._channel.pump(0.0)

    def close(self) -> None:
        """Give the link up. Copies in flight finish first; the last of them unmaps the arena. Idempotent."""
        self._channel.broken(LinkLost("the link was closed"))

    # ------------------------------------------------------------------------------------------------------ the arena

    @contextlib.contextmanager
    def copying(self) -> Iterator[memoryview]:
        """The arena's bytes, mapped until the block ends, whatever happens to the link. Worker.

        Raises LinkLost if the link has ended. Keep no view beyond the block.
        """
        with self._state:
            self._channel.check()
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

    def attend(self, attendant: ArenaAttendant) -> None:
        """Have `attendant` told what of the arena exists, and when it goes. Idempotent; nothing on an ended link."""
        with self._state:
            if isinstance(self._arena, MappedArena) and not self._closed:
                self._arena.attend(attendant)

    def _backed(self, cells: int) -> None:
        if self._arena is not None:
            self._arena.prefault(cells * self.cell_bytes)

    def _tear_down_if_idle(self) -> None:
        with self._state:
            if self.alive or self._copies or self._closed:
                return
            self._closed = True
        self._release_arena()
        # last: the connection's end is what tells the server that nobody here touches the arena any more
        self._channel.close()

    def drain(self, timeout: float) -> None:
        """Return when what was committed has left this process: it has, here. On another host up to `timeout` s."""

    def _release_arena(self) -> None:
        if self._arena is not None:
            self._arena.close()

    def forget(self) -> None:
        """In a forked child: let go of what is the parent's, without a word to the server."""
        self._closed = True
        self._channel.forget()
        if self._arena is not None:
            self._arena.forget()  # at once: the kernel has left its addresses free for others


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
