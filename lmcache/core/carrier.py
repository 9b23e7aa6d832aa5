"""A client's end of the bulk channel: carries messages between its link and a server on another host, and the bytes.

The link talks to a socket as it would to the server's own. The carrier's thread holds the other end, relays what
passes, and makes a `Commit` wait until the bytes of its cells have been sent. Nothing here heals: whatever goes wrong
ends the link, and the client registers anew.
"""

import contextlib
import logging
import socket
import threading
from collections import deque

import zmq

from lmcache.core.connection import ConnectionEnded, Stream
from lmcache.core.control import ServerAddress
from lmcache.core.curve import ClientKeys, unlock_client
from lmcache.core.door import Knock, readable
from lmcache.core.gateway import tune
from lmcache.core.malloc import keep_freed_memory
from lmcache.core.mirror import Mirror
from lmcache.core.protocol import decode_reply, decode_request, encode
from lmcache.core.shipments import Fetch, Shipments
from lmcache.errors import LinkLost, LMCacheError

log = logging.getLogger("lmcache.client")

MESSAGES_A_TURN = 64

IDLE_SECONDS = 5.0
"""After so long without a message the mirror keeps no memory for what comes next."""


class Carrier:
    """One conversation with a server's bulk port. `link_end` is for the link's channel; the rest is the thread's."""

    def __init__(self, address: ServerAddress, keys: ClientKeys | None, deadline: float) -> None:
        """Connect. Raises LinkLost, ServerUnavailable, within `deadline` s."""
        keep_freed_memory()
        self._shipments = Shipments()
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
            self._wants_to_write = False
            self._poller = zmq.Poller()
            for sock in (self._dealer, self._knock.monitor, self._woken, ours):
                self._poller.register(sock, zmq.POLLIN)
            self._opened = opened.pop_all()
        self._thread = threading.Thread(target=self._run, name="lmcache-carrier", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._opened.close()
            self.link_end.close()
            raise LinkLost("this process gets no more threads") from error

    # ------------------------------------------------------------------------------------------------ the link's calls

    def fetch(self, ticket: int, opening: int) -> Fetch:
        """Bring the cells that an answer has just opened into the mirror. Does not wait."""
        fetch = Fetch(ticket, opening)
        self._new_fetches.append(fetch)
        self._wake()
        return fetch

    @property
    def mirror(self) -> Mirror | None:
        """Where the cells are that were granted or opened; None before a registration."""
        return self._shipments.mirror

    @property
    def unsent_bytes(self) -> int:
        """Granted to this worker, and not yet all sent and committed, or aborted."""
        return self._shipments.unsent_bytes

    @property
    def moved(self) -> float:
        """When bytes of any fetch came last."""
        return self._shipments.moved

    def object_bytes(self, group: int) -> int:
        """Bytes of one object of a group."""
        return self._shipments.object_bytes(group)

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
        self._closing = True
        ended = LinkLost(f"the link ended while cells were on their way: {why}")
        self._shipments.fail(ended)
        for fetch in self._new_fetches:
            fetch.failure = ended
            fetch.done.set()
        self._opened.close()  # the link sees the end of its connection

    def _turn(self) -> None:
        own = self._stream.socket
        if bool(self._stream.unsent) is not self._wants_to_write:
            self._wants_to_write = self._stream.unsent
            self._poller.modify(own, zmq.POLLIN | (zmq.POLLOUT if self._stream.unsent else 0))
        ready = dict(self._poller.poll(self._pause()))
        if not ready and self.mirror is not None:
            self.mirror.cool()
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        while self._new_fetches:
            self._shipments.begin(self._new_fetches.popleft())
        if ready.get(own.fileno(), 0) & zmq.POLLOUT:
            self._stream.flush()
        if ready.get(own.fileno(), 0) & ~zmq.POLLOUT:
            self._from_link()
        self._from_server()
        if self._knock.monitor in ready:
            self._knock.look()
        if self._knock.gone:
            raise LinkLost("the server ended the connection, or has fallen silent")
        self._send_pieces()

    def _pause(self) -> int | None:
        """Milliseconds; None where there is nothing to be done, however long nobody says anything."""
        keeps = self.mirror is not None and self.mirror.warm
        return int(IDLE_SECONDS * 1000) if keeps and self._shipments.idle else None

    def _from_link(self) -> None:
        for body in self._stream.receive():
            if self._shipments.asked(decode_request(body)):
                self._dealer.send(body)

    def _from_server(self) -> None:
        for _ in range(MESSAGES_A_TURN):
            if not readable(self._dealer):
                return
            frames = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            body = frames[0].buffer
            if not len(body):
                raise LinkLost("the server ended the link")
            reply = decode_reply(body)
            if reply.id < 0:
                self._shipments.note(reply, frames[1].buffer if len(frames) > 1 else memoryview(b""))
                self._send_pieces()  # the next ones are on their way while others are copied
            else:
                told = self._shipments.answered(reply)
                self._stream.send(frames[0].bytes if told is reply else encode(told))

    def _send_pieces(self) -> None:
        for request, contents in self._shipments.writes():
            if contents is None:
                self._dealer.send(encode(request))
            else:
                # straight from the mirror, where it stays until the server has it
                self._dealer.send_multipart([encode(request), contents], copy=False)
        for read in self._shipments.reads():
            self._dealer.send(encode(read))
