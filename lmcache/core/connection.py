"""One client's Unix connection, as the server sees it: framing and buffering, without a thought about content.

The connection is the client's liveness: when it ends, in whatever way, the client is dead. A client on another host has
one as well: its other end is the gateway's, which relays to the bulk channel.
"""

import array
import itertools
import os
import socket
import struct
from collections.abc import Callable

from lmcache.core.index import Namespace
from lmcache.core.protocol import MAX_FRAME, Lookup, Role
from lmcache.errors import ProtocolError

LENGTH = struct.Struct("<I")
"""Precedes every message on a stream."""

MAX_UNSENT = 4 * MAX_FRAME
"""Bytes of answers kept for a client that does not read; more ends its connection."""

_CREDENTIALS = struct.Struct("3i")
MAX_UNREGISTERED_FRAME = 1 << 19
"""Bytes of the largest message before a client has registered: thousands of layers fit."""

MESSAGES_A_TURN = 64
"""Messages of one client that are answered before others have their turn."""

_READ = 1 << 16  # a buffer of more than 128 KiB costs a memory mapping, and 25 µs, for every message
_numbers = itertools.count(1)


def _nothing() -> None:
    """A client that has the arena mapped has itself to keep from writing: that is what the trust in it means."""


class ConnectionEnded(Exception):
    """The peer closed, reset, hung up or overran its limits; the message says which."""


class Stream:
    """A non-blocking stream of messages, each preceded by its length. One thread's."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def allowed(self) -> int:
        """Bytes of the largest message."""
        return MAX_FRAME

    @property
    def unsent(self) -> bool:
        """Whether messages wait for the other side to read."""
        return bool(self._unsent)

    @property
    def behind(self) -> bool:
        """Whether whole messages have arrived that wait for the next turn."""
        return self._next_length() is not None

    def receive(self) -> list[bytes]:
        """The other side's messages of one turn, of all that have arrived.

        Raises ConnectionEnded, and ProtocolError for a frame that is too large.
        """
        if not self.behind:
            self._read()
        messages: list[bytes] = []
        start = 0
        while len(messages) < MESSAGES_A_TURN and (length := self._next_length(start)) is not None:
            start += LENGTH.size
            messages.append(bytes(self._received[start : start + length]))
            start += length
        del self._received[:start]
        return messages

    def _read(self) -> None:
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionEnded(str(error)) from error
        if not data:
            raise ConnectionEnded("closed")
        self._received += data

    def _next_length(self, start: int = 0) -> int | None:
        """Length of the message that begins at `start`; None while it has not arrived whole."""
        if len(self._received) - start < LENGTH.size:
            return None
        length = int(LENGTH.unpack_from(self._received, start)[0])
        if length > self.allowed:
            raise ProtocolError(f"a frame of {length} bytes; {self.allowed} are allowed")
        return length if len(self._received) - start - LENGTH.size >= length else None

    def send(self, body: bytes, descriptor: int | None = None) -> None:
        """Queue an encoded answer and send what the socket takes; `descriptor` rides on its first byte.

        Raises ConnectionEnded.
        """
        self._unsent += LENGTH.pack(len(body)) + body
        if descriptor is not None:
            # registration is the first answer of a connection, so nothing is queued before it
            self._sent(self._send_with(descriptor))
        self.flush()

    def _send_with(self, descriptor: int) -> int:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            return self.socket.sendmsg([self._unsent], ancillary)
        except OSError as error:
            raise ConnectionEnded(str(error)) from error

    def flush(self) -> None:
        """Send what the socket takes of what is queued. Raises ConnectionEnded."""
        try:
            while self._unsent:
                self._sent(self.socket.send(self._unsent))
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT:
                raise ConnectionEnded(f"{len(self._unsent)} bytes of answers unread") from None
        except OSError as error:
            raise ConnectionEnded(str(error)) from error

    def _sent(self, count: int) -> None:
        del self._unsent[:count]

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class Connection(Stream):
    """The stream of one client. All methods are the server thread's."""

    def __init__(self, sock: socket.socket, origin: str = "") -> None:
        """`origin` is the address of a client on another host, whose messages somebody relays over `sock`."""
        super().__init__(sock)
        self.origin = origin
        self.cut: Callable[[], None] = _nothing
        """To be called once the connection is closed, before what the client was writing goes to others."""
        self.owner = next(_numbers)
        """The server's number for this client: never used twice."""
        self.namespace: Namespace | None = None
        """Set by `Register`."""
        self.role = Role.SCHEDULER
        self.rank = 0
        self.pid, self.uid, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if origin:
            self.pid = 0  # it is our own
        self.unanswered: dict[int, Lookup] = {}
        """Lookups that tiers are being looked at for, by what they are asked for again with: to be recorded."""

    @property
    def allowed(self) -> int:
        """Bytes of the largest message: few before the client has registered."""
        return MAX_FRAME if self.namespace else MAX_UNREGISTERED_FRAME

    def __str__(self) -> str:
        if self.namespace is None:
            return f"a client ({self._who}) that has not registered"
        model = self.namespace.facts.get("model", "a model without a name")
        return f"{self.role.value} {self.rank} of {model} ({self._who}, namespace {self.namespace.digest.hex()})"

    @property
    def _who(self) -> str:
        return f"at {self.origin}" if self.origin else f"pid {self.pid}"

    @property
    def trusted(self) -> bool:
        """Whether the peer may map the arena: the server's own user, or root. Abstract sockets have no permissions."""
        return self.uid in (os.geteuid(), 0)
