"""Who is let in on TCP: answers ZeroMQ's question about each peer that knocks (ZAP, https://rfc.zeromq.org/spec/27).

And what becomes of handshakes: ZeroMQ keeps silent about those that fail, but to who listens to a socket's monitor.
"""

import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import zmq

from lmcache.errors import LinkLost, ServerUnavailable

if TYPE_CHECKING:
    from lmcache.core.curve import ClientKeys, ServerKeys

_EVENT = struct.Struct("=Hi")
"""A monitor's message without the address. PyZMQ's own parser would bring asyncio into every server and command."""

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Events at a server: a peer without its keys, or with those of another, and one whose key is not let in."""

_FAILED = REFUSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED


class Door:
    """Lets in whose key is known. One thread's; it answers when `answer` is called."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: "ServerKeys") -> None:
        self._clients = keys.clients
        self.socket = context.socket(zmq.REP)
        """Readable when somebody has knocked."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ADDRESS)

    def answer(self) -> None:
        """Answer all who have knocked."""
        while readable(self.socket):
            _, request, *rest = self.socket.recv_multipart(zmq.NOBLOCK)
            # of the rest: domain, address, identity, mechanism, and with CURVE the client's public key
            known = len(rest) == 5 and rest[3] == b"CURVE" and rest[4] in self._clients
            status, text, user = (b"200", b"OK", b"client") if known else (b"400", b"no such key", b"")
            self.socket.send_multipart([_VERSION, request, status, text, user, b""])

    def close(self) -> None:
        """Close the socket: from now on nobody is let in."""
        self.socket.close()


def events_of(monitor: "zmq.Socket[bytes]") -> Iterator[tuple[int, int]]:
    """What a monitor has to tell now: event and value (a descriptor, or a code)."""
    while readable(monitor):
        yield _EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])


def readable(sock: "zmq.Socket[bytes]") -> bool:
    """Whether a message is there: twenty times as fast as to be told by an exception that none is."""
    return bool(int(sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class Knock:
    """A client's side of one handshake: whether the server has let it in."""

    def __init__(self, socket: "zmq.Socket[bytes]", where: str, keys: "ClientKeys | None") -> None:
        """Before `socket` is connected."""
        self._socket = socket
        self._where = where
        self._keys = keys
        self.monitor = socket.get_monitor_socket(_FAILED | _GONE | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.let_in = False
        self.gone = False

    def look(self) -> None:
        """Take note of what has happened. Raises ServerUnavailable when the server does not let us in."""
        for event, value in events_of(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.let_in = True
            elif event & _FAILED:
                raise self._refused(event, value)
            elif event & _GONE:
                self.gone = True

    def wait(self, deadline: float) -> None:
        """Return once the server has let us in. Raises ServerUnavailable, or LinkLost after `deadline` s of silence."""
        until = time.monotonic() + deadline
        while not self.let_in:
            remaining = until - time.monotonic()
            if self.gone or remaining <= 0 or not self.monitor.poll(int(remaining * 1000) + 1):
                raise LinkLost(f"{self._where} cannot be reached", remedy="let the port through every firewall between")
            self.look()

    def close(self) -> None:
        """Stop listening."""
        if not self._socket.closed:
            self._socket.disable_monitor()
        self.monitor.close()

    def _refused(self, event: int, value: int) -> ServerUnavailable:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            what = f"the lmcache server at {self._where} knows no client with the keys in {self._source}"
            return ServerUnavailable(what, remedy="use client.key of the folder whose server.key the server uses")
        if self._keys is None:
            what = f"what listens at {self._where} did not answer as an lmcache server: it ended the handshake"
            return ServerUnavailable(
                what,
                remedy="if it wants keys, give its client.key with --keys, LMCACHE_KEYS or lmcache.mp.keys, of a tier "
                "with peer://…?keys=PATH; else it is another program",
            )
        what = f"what listens at {self._where} is no lmcache server with the keys that {self._source} is for"
        return ServerUnavailable(
            what, remedy="use client.key of the folder whose server.key the server uses, or none if it uses none"
        )

    @property
    def _source(self) -> str:
        return self._keys.source if self._keys else ""
