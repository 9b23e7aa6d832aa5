"""The torch-free client of commands: asks the server over TCP, without registering.

Needs no arena and no Unix socket.
"""

import contextlib
import ipaddress
import itertools
import math
import os
import re
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import attrs
import zmq

from lmcache import __version__
from lmcache.core.door import Knock
from lmcache.core.keys import HASH_BYTES
from lmcache.core.protocol import (
    MAX_CHUNKS,
    PROTOCOL,
    Done,
    Error,
    ErrorCode,
    Hello,
    Message,
    Pin,
    Ping,
    Pinned,
    Pong,
    Status,
    StatusReport,
    Unpin,
    Welcome,
    decode_reply,
    encode,
)
from lmcache.errors import ConfigError, DeadlineExceeded, ProtocolError, Refused, ServerUnavailable, VersionMismatch

if TYPE_CHECKING:
    from lmcache.core.curve import ClientKeys

ReplyT = TypeVar("ReplyT", bound=Message)

IDLE_POLL_SECONDS = 0.01
IDLE_POLL_MAX_SECONDS = 0.1

LAST_LOOK_MILLISECONDS = 10
"""ZeroMQ's own thread fetches answers, and one that was held up as well needs a moment for what lies there."""


def client_keys(path: str) -> "ClientKeys | None":
    """Keys from a client's file or its folder, or from what LMCACHE_KEYS names; None where nobody names one.

    Raises ConfigError.
    """
    if not path and not os.environ.get("LMCACHE_KEYS"):
        return None  # most have none, and import nothing for them
    from lmcache.core.curve import read_client_keys

    return read_client_keys(path)


def check_host(host: str, option: str = "--host") -> None:
    """Raise ConfigError, in words for the user of `option`, for what is more than the name or address of a host."""
    if not host.strip() or any(mark in host for mark in "/[] ") or (":" in host and not _is_ipv6(host)):
        found = re.fullmatch(r"(?:\w+://)?(?:\[([^]]*)\]|([^:/[\] ]*))(?::(\d+))?/?", host.strip())
        bare = (found[1] or found[2]) if found else ""
        port = f" --port {found[3]}" if found and found[3] else ""
        raise ConfigError(
            f"{option} {host!r} is not just the name or address of a host",
            remedy=f"write {option} {bare}{port}" if bare else f"write something like {option} 127.0.0.1",
        )


def _is_ipv6(host: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False


@attrs.frozen
class ServerAddress:
    """Where a server's TCP port is."""

    host: str = "127.0.0.1"
    port: int = 5555

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, default_port: int = 5555) -> "ServerAddress":
        """Read `host`, `host:port`, either after `tcp://`, or an IPv6 host in brackets. Raises ConfigError."""
        rest = text.removeprefix("tcp://")
        host, colon, port = rest.rpartition(":")
        if not colon or rest.endswith("]"):
            host, port = rest, str(default_port)
        if not host or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in host and not host.startswith("[")):
            raise ConfigError(f"{text!r} is no server address", remedy="write HOST, HOST:PORT or tcp://HOST:PORT")
        return cls(host.strip("[]"), int(port))

    @property
    def endpoint(self) -> str:
        """As ZeroMQ wants it."""
        return f"tcp://{self}"


class Control:
    """One conversation over TCP. Not thread-safe.

    Every call ends within `deadline` seconds (and one last look), with an answer or an error.
    """

    def __init__(self, address: ServerAddress, deadline: float = 2.0, keys: "ClientKeys | str | None" = None) -> None:
        """`keys` are the client's, or name its file or folder; None takes what LMCACHE_KEYS names, if anything."""
        self._keys = client_keys(keys or "") if keys is None or isinstance(keys, str) else keys
        self.address = address
        self.deadline = deadline
        self._ids = itertools.count(1)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, ":" in address.host)
        if self._keys:
            from lmcache.core.curve import unlock_client

            unlock_client(self._socket, self._keys)
        self._knock = Knock(self._socket, str(address), self._keys)
        try:
            self._socket.connect(address.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"{address} is no address: {error.strerror}", remedy="write HOST:PORT") from error

    def hello(self) -> Welcome:
        """Who answers there, and where its Unix socket is. Raises ServerUnavailable, VersionMismatch, ProtocolError."""
        return self._call(Hello(next(self._ids), PROTOCOL, __version__), Welcome)

    def ping(self) -> float:
        """Seconds that a round trip took."""
        started = time.perf_counter()
        self._call(Ping(next(self._ids)), Pong)
        return time.perf_counter() - started

    def status(self) -> dict[str, Any]:
        """The server's report; `core/metrics.py` documents its numbers."""
        return self._call(Status(next(self._ids)), StatusReport).report

    def pin(self, namespace: bytes, hashes: bytes, seconds: float) -> Pinned:
        """Keep the stored part of a prompt for so long. Raises Refused when pins would hold too much."""
        if len(hashes) > MAX_CHUNKS * HASH_BYTES:  # the server would end the connection, and not say why
            raise Refused(
                f"a prompt of {len(hashes) // HASH_BYTES} chunks; {MAX_CHUNKS} can be pinned at once",
                code=ErrorCode.MALFORMED,
                remedy="pin a shorter prefix of it",
            )
        return self._call(Pin(next(self._ids), namespace, hashes, seconds), Pinned)

    def unpin(self, pin: int) -> None:
        """Let a prefix go before its time. Raises Refused when there is no such pin."""
        self._call(Unpin(next(self._ids), pin), Done)

    def wait_idle(self, timeout: float = 60.0, on_progress: Callable[[int], None] | None = None) -> None:
        """Return when no store is in flight, nor anything between L1 and tiers; `on_progress` hears how much is.

        Raises DeadlineExceeded after `timeout` s.
        """
        until = time.monotonic() + timeout
        pause = IDLE_POLL_SECONDS
        while in_flight := _in_flight(self.status()["gauges"]):
            if on_progress:
                on_progress(in_flight)
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"{in_flight} stores are still in flight at {self.address} after {timeout:g} s",
                    remedy="look for a stopped engine with lmcache status, or wait longer with --timeout",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, IDLE_POLL_MAX_SECONDS)

    def _call(self, request: Message, kind: type[ReplyT]) -> ReplyT:
        self._check_listening()  # ZeroMQ connects for ever, and never says that nobody is there
        with contextlib.suppress(zmq.Again):  # a handshake that has failed by now leaves nobody to send to
            self._socket.send(encode(request), zmq.NOBLOCK)
        until = time.monotonic() + self.deadline
        while self._readable(until):
            reply = self._read(self._socket.recv_multipart()[-1])
            # id 0: the server could not even read the request
            if reply.id == request.id or (reply.id == 0 and isinstance(reply, Error)):
                return _expect(reply, kind)
        self._check_listening()
        raise DeadlineExceeded(
            f"what listens at {self.address} did not answer as an lmcache server within {self.deadline:g} s",
            remedy="it is another program (choose another --port), or a server that has been stopped",
        )

    def _readable(self, until: float) -> bool:
        """Wait for an answer. Raises ServerUnavailable as soon as the server has refused the handshake."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._knock.monitor, zmq.POLLIN)
        while True:
            remaining = until - time.monotonic()
            # once more even if it is late: a command that was held up finds the answer that came in time
            ready = dict(poller.poll(max(LAST_LOOK_MILLISECONDS, math.ceil(remaining * 1000))))
            if self._knock.monitor in ready:
                self._knock.look()
            if self._socket in ready:
                return True
            if remaining <= 0:
                return False

    def _check_listening(self) -> None:
        try:
            socket.create_connection((self.address.host, self.address.port), timeout=self.deadline).close()
        except OSError as error:
            raise ServerUnavailable(
                f"no lmcache server at {self.address}: {error.strerror or error}",
                remedy=f"start one with `lmcache server --port {self.address.port}`, or give the address of one",
            ) from error

    def _read(self, frame: bytes) -> Message:
        try:
            return decode_reply(frame)
        except ProtocolError as error:
            raise ProtocolError(
                f"what listens at {self.address} is no lmcache server: it sent {error}",
                remedy="it is another program; choose another --port",
            ) from error

    def close(self) -> None:
        """Close the connection."""
        self._knock.close()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _in_flight(gauges: dict[str, int]) -> int:
    return gauges["reservations"] + gauges["tier_calls"]


def _expect(reply: Message, kind: type[ReplyT]) -> ReplyT:
    if isinstance(reply, Error):
        if reply.code == ErrorCode.VERSION:
            raise VersionMismatch(reply.message, remedy=reply.remedy)
        raise Refused(reply.message, code=reply.code, remedy=reply.remedy)
    if not isinstance(reply, kind):
        raise ProtocolError(f"{type(reply).__name__} in answer to a request for {kind.__name__}")
    return reply
