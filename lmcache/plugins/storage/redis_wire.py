"""Conversations with redis servers, each with an end: connections that keep a deadline, and large values on them.

redis-py connects, encrypts, logs in and reads small replies. What it is not used for is what it does by copying: the
bytes of a blob go from the caller's buffers to the socket and back as they are, with the interpreter's lock released.
"""

import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from lmcache.core.tier import Buffer
from lmcache.errors import TierError

CONNECT_S = 2.0
"""Seconds that connecting, the TLS handshake and logging in may each wait for the server."""
_LINE_END = b"\r\n"
_HEAD_BYTES = 4096
"""Read at once at the beginning of a value: its length and, of a small one, all of it."""


@attrs.frozen
class Address:
    """Where a redis server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TimedSocket:
    """A connected socket, as redis-py uses one, that waits no longer than until `deadline`, however often it waits."""

    def __init__(self, inner: socket.socket, deadline: float) -> None:
        self.deadline = deadline
        self.heard = False
        """Whether anything has come since this was last set to False."""
        self._inner = inner
        self._timeout = inner.gettimeout()

    def settimeout(self, seconds: float | None) -> None:
        """As of a socket; the deadline counts as well."""
        self._timeout = seconds

    def recv(self, size: int) -> bytes:
        """As of a socket."""
        self._limit()
        data = self._inner.recv(size)
        self.heard = True
        return data

    def recv_into(self, buffer: memoryview | bytearray, *size: int) -> int:
        """As of a socket."""
        self._limit()
        count = self._inner.recv_into(buffer, *size)
        self.heard = True
        return count

    def sendall(self, data: Buffer) -> None:
        """As of a socket."""
        with memoryview(data) as whole, whole.cast("B") as view:
            sent = 0
            while sent < len(view):
                self._limit()
                sent += self._inner.send(view[sent:])

    def fill(self, view: memoryview) -> None:
        """Receive as many bytes as `view` has."""
        received = 0
        while received < len(view):
            count = self.recv_into(view[received:])
            if not count:
                raise ConnectionError("the server closed the connection in the middle of a value")
            received += count

    def getpeername(self) -> Any:
        """As of a socket."""
        return self._inner.getpeername()

    def fileno(self) -> int:
        """As of a socket."""
        return self._inner.fileno()

    def shutdown(self, how: int) -> None:
        """As of a socket."""
        self._inner.shutdown(how)

    def close(self) -> None:
        """As of a socket."""
        self._inner.close()

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if self._timeout == 0:  # a look, not a wait
            self._inner.settimeout(0)
            return
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._inner.settimeout(left if self._timeout is None else min(left, self._timeout))


class Line:
    """One connection: redis-py's, with a socket that keeps deadlines."""

    socket: TimedSocket

    def __init__(self, address: Address, make: Callable[..., Any], deadline: float) -> None:
        """Connect. `make` is a class of redis-py's connections with its keyword arguments bound."""
        patience = max(0.001, min(CONNECT_S, deadline - time.monotonic()))
        self._deadline = deadline
        self.connection = make(
            host=address.host,
            port=address.port,
            socket_timeout=patience,
            socket_connect_timeout=patience,
            redis_connect_func=self._log_in,
        )
        self.connection.connect()
        self.connection.redis_connect_func = None  # which would keep a cycle alive

    def _log_in(self, connection: Any) -> None:
        self.socket = TimedSocket(connection._sock, self._deadline)  # noqa: SLF001 - redis-py has no other way in
        connection._sock = self.socket  # noqa: SLF001
        connection.on_connect()
        self.socket.settimeout(None)  # from here on only the deadline counts
        self.socket.heard = False

    def usable(self) -> bool:
        """Whether the server has neither closed this idle connection nor said anything that nobody asked for."""
        try:
            return not self.connection.can_read()
        except Exception:  # noqa: BLE001 - whatever it is, a new connection is better
            return False
        finally:
            self.socket.settimeout(None)  # redis-py leaves what was left when the connection was made

    def close(self) -> None:
        """End the connection; further calls of this do nothing."""
        self.connection.disconnect()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or redis-py gave the connection up."""
        return self.connection._sock is None  # noqa: SLF001

    def ask(self, words: Sequence[bytes | str | int]) -> Any:
        """Send one command, return the reply; an error that the server replies is raised."""
        self.connection.send_command(*words)
        return self.connection.read_response()

    def ask_all(self, commands: Sequence[Sequence[bytes]]) -> list[Any]:
        """Send all commands at once, then read their replies, errors among them: one round trip."""
        from redis.exceptions import ResponseError

        self.connection.send_packed_command(self.connection.pack_commands(commands))
        replies = []
        for _ in commands:
            try:
                replies.append(self.connection.read_response(disconnect_on_error=False))
            except ResponseError as error:
                replies.append(error)
        return replies

    def put(self, key: bytes, parts: Sequence[Buffer], options: Sequence[bytes]) -> None:
        """SET the value that is `parts` joined, without joining them."""
        views = [memoryview(part).cast("B") for part in parts]
        length = sum(len(view) for view in views)
        begin = b"*%d\r\n" % (3 + len(options)) + _bulk(b"SET") + _bulk(key) + b"$%d\r\n" % length
        end = b"\r\n" + b"".join(_bulk(option) for option in options)
        self.connection.send_packed_command([begin, *views, end])
        self.connection.read_response()

    def get(self, key: bytes, into: Sequence[memoryview]) -> int:
        """GET a value straight into the buffers; returns its length, 0 if there is none. What does not fit is lost."""
        from redis.connection import DefaultParser

        self.connection.send_command("GET", key)
        head = bytearray(_HEAD_BYTES)
        begin, filled = self._first_line(head)
        if head[:1] == b"-":
            error: Exception = DefaultParser.parse_error(head[1 : begin - 2].decode(errors="replace"))
            raise error
        told = re.fullmatch(rb"\$(-1|\d{1,12})\r\n", head[:begin])
        if not told:
            raise ConnectionError(f"the server answered GET with {bytes(head[:16])!r}")
        length = int(told[1])
        if length < 0:
            return 0
        self._receive(memoryview(head)[begin:filled], into, length)
        return length

    def _first_line(self, head: bytearray) -> tuple[int, int]:
        """Fill `head` with what has come; returns where the first line ends, and how much there is."""
        filled = 0
        while (end := head.find(b"\r\n", 0, filled)) < 0:
            count = self.socket.recv_into(memoryview(head)[filled:])
            if not count:
                raise ConnectionError("the server closed the connection instead of answering")
            filled += count
        return end + 2, filled

    def _receive(self, early: memoryview, into: Sequence[memoryview], length: int) -> None:
        """Distribute a value of `length` bytes, of which `early` has come already, and read the line's end after it."""
        left = length
        for part in into:
            view = part.cast("B")[:left]
            copied = min(len(early), len(view))
            view[:copied] = early[:copied]
            early = early[copied:]
            self.socket.fill(view[copied:])
            left -= len(view)
        left += len(_LINE_END) - len(early)
        if left > len(
            _LINE_END
        ):  # more than was asked for, so somebody else's: a new connection costs less than its rest
            self.close()
        else:
            self.socket.fill(memoryview(bytearray(left)))


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(word), word)


def trouble(address: Address, error: Exception) -> TierError:
    """What to tell of an error that redis-py raised, or that a server replied."""
    from redis import exceptions

    text = " ".join(str(error).split()) or type(error).__name__
    for kind, fact, remedy in (
        (exceptions.OutOfMemoryError, "is at its maxmemory", "raise it, or set maxmemory-policy allkeys-lru"),
        (exceptions.ReadOnlyError, "is a read-only replica", "name the primary in --l2"),
        (exceptions.BusyLoadingError, "is still loading its data", ""),
        (exceptions.MovedError, "is part of a cluster", "add cluster=on to the tier's URL"),
        (exceptions.ClusterDownError, "says that its cluster is down", ""),
        (exceptions.NoPermissionError, "does not permit the user to do that", "give it +@read +@write on the prefix"),
        (exceptions.AuthenticationError, "does not let us in", "name the secrets with username_env and password_env"),
        (exceptions.TimeoutError, "did not answer in time", ""),
        (TimeoutError, "did not answer in time", ""),
        (exceptions.ResponseError, "refused", ""),
    ):
        if isinstance(error, kind):
            return TierError(f"redis server {address} {fact}: {text}", remedy=remedy)
    return TierError(f"redis server {address} cannot be reached: {text}")
