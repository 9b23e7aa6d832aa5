"""Requests and their answers over one stream socket, from any number of threads. It knows messages, not what they mean.

A channel never heals: any error, missed deadline or end of file breaks it for good, and every request in flight fails.
So a late answer can never be taken for another's.

One thread at a time reads, for all: whoever waits for an answer reads if nobody does, and hands out whatever comes.
Sending never blocks: what the socket does not take waits, and goes out with the next call.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from lmcache.core.connection import LENGTH
from lmcache.core.protocol import MAX_FRAME, Error, ErrorCode, Message, decode_reply, encode
from lmcache.errors import DeadlineExceeded, LinkLost, LMCacheError, ProtocolError, Refused

ReplyT = TypeVar("ReplyT", bound=Message)

MAX_UNSENT = 4 * MAX_FRAME
"""Bytes of requests kept for a server that does not read; more break the channel."""

_READ = 1 << 16  # larger buffers cost a memory mapping a message
_SLICE_SECONDS = 0.1  # how soon a thread that reads notices that another has broken the channel


class Pending(Generic[ReplyT]):
    """A request that was sent and not answered yet."""

    def __init__(self, channel: "Channel", kind: type[ReplyT], deadline: float) -> None:
        self._channel = channel
        self._kind = kind
        self._deadline = deadline
        self.reply: Message | None = None
        """Set by the channel."""

    def poll(self, patience: float = 0.0) -> ReplyT | None:
        """The answer if it has come, or comes within about `patience` seconds, else None.

        Raises DeadlineExceeded, LinkLost or Refused.
        """
        until = time.monotonic() + patience
        while self.reply is None:
            remaining = until - time.monotonic()
            self._channel.pump(max(0.0, remaining), self)
            if remaining <= 0 or not self._channel.alive:
                break
        if self.reply is None:
            self._channel.check()
            if time.monotonic() > self._deadline:
                raise self._channel.late()
            return None
        return self._result()

    def wait(self) -> ReplyT:
        """Block until the answer or the deadline. Raises DeadlineExceeded, LinkLost or Refused."""
        while self.reply is None:
            remaining = self._deadline - time.monotonic()
            # once more even if it is late: an engine that was stopped finds answers that came in time
            self._channel.pump(min(max(0.0, remaining), _SLICE_SECONDS), self)
            if self.reply is None:
                self._channel.check()
                if remaining <= 0:
                    raise self._channel.late()
        return self._result()

    def _result(self) -> ReplyT:
        reply = self.reply
        if isinstance(reply, Error):
            raise Refused(reply.message, code=reply.code, remedy=reply.remedy)
        if not isinstance(reply, self._kind):
            raise self._channel.broken(
                LinkLost(f"the server sent {type(reply).__name__} in answer to a request for {self._kind.__name__}")
            )
        return reply


class Channel:
    """Owns a connected socket. Any thread may call any method; `on_broken` is called in the one that notices."""

    def __init__(self, sock: socket.socket, deadline: float, on_broken: Callable[[], None]) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.alive = True
        self.why: LMCacheError = LinkLost("the link was closed")
        """Why it is not alive."""
        self._deadline = deadline
        self._on_broken = on_broken
        self._pending: dict[int, Pending[Message]] = {}
        self._received = bytearray()
        self._descriptors: list[int] = []
        self._sending = threading.Lock()  # held for moments only, never while anything waits
        self._unsent = bytearray()
        self._turn = threading.Condition(threading.Lock())
        self._reader: int | None = None  # the thread that reads

    # ------------------------------------------------------------------------------------------------------- requests

    def send(self, request: Message, kind: type[ReplyT]) -> Pending[ReplyT]:
        """Send a request and do not wait. Raises LinkLost, DeadlineExceeded, or Refused for one that is too large."""
        body = encode(request)
        if len(body) > MAX_FRAME:
            raise Refused(
                f"a {type(request).__name__} of {len(body)} bytes; {MAX_FRAME} are allowed",
                code=ErrorCode.MALFORMED,
                remedy="ask for fewer chunks at once",
            )
        pending = Pending(self, kind, time.monotonic() + self._deadline)
        with self._sending:
            self.check()
            self._pending[request.id] = cast("Pending[Message]", pending)
            self._unsent += LENGTH.pack(len(body)) + body
        self._flush()
        self.check()
        return pending

    def _flush(self) -> None:
        """Send what the socket takes."""
        failed: LMCacheError | None = None
        with self._sending:
            try:
                while self._unsent:
                    del self._unsent[: self.socket.send(self._unsent)]
            except BlockingIOError:
                if len(self._unsent) > MAX_UNSENT:
                    failed = DeadlineExceeded(f"the server leaves {len(self._unsent)} bytes of requests unread")
            except OSError as error:
                failed = LinkLost(f"the server ended the link: {error}")
        if failed:  # not under the lock: breaking waits for the thread that reads, and that one sends, too
            self.broken(failed)

    # -------------------------------------------------------------------------------------------------------- answers

    def pump(self, timeout: float, until: "Pending[ReplyT] | None" = None) -> None:
        """Read answers once, for up to `timeout` seconds or until one has come; each goes to whoever waits for it."""
        with self._turn:
            if until is not None and until.reply is not None:
                return
            if self._reader is not None:
                if timeout > 0:
                    self._turn.wait(timeout)  # another thread reads, and hands out ours as well
                return
            self._reader = threading.get_ident()
        try:
            if self.alive:
                self._exchange(timeout)
        finally:
            with self._turn:
                self._reader = None
                self._turn.notify_all()

    def _exchange(self, timeout: float) -> None:
        if timeout > 0:
            poll = select.poll()
            poll.register(self.socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poll.poll(max(1, int(timeout * 1000)))
        if self._unsent:
            self._flush()
        if self.alive:
            self._read()

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self.socket.recvmsg(_READ, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
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
            if pending is not None:
                pending.reply = reply
            elif isinstance(reply, Error) and reply.id == 0:  # it could not read a request of ours
                raise ProtocolError(reply.message, remedy=reply.remedy)
            else:
                raise ProtocolError(f"the server answered request {reply.id}, which nobody sent")

    def take_descriptor(self) -> int | None:
        """The first descriptor that came with the answers, for the caller to close; any others are closed."""
        taken = self._descriptors.pop(0) if self._descriptors else None
        self._close_descriptors()
        return taken

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    # ------------------------------------------------------------------------------------------------------ its end

    def check(self) -> None:
        """Raise why the channel is broken, if it is."""
        if not self.alive:
            raise LinkLost(f"the link to the server has ended: {self.why}") from self.why

    def late(self) -> LMCacheError:
        """Give the channel up because an answer is late; returns the error to raise."""
        return self.broken(DeadlineExceeded(f"the server did not answer within {self._deadline:g} s"))

    def broken(self, why: LMCacheError) -> LMCacheError:
        """Give the channel up; whoever waits on it is told. Returns `why`. Idempotent."""
        with self._turn:
            if self.alive:
                self.why = why
                self.alive = False
            self._turn.notify_all()
        self._on_broken()
        return why

    def close(self) -> None:
        """Close the socket, once no other thread reads from it. The channel must be broken."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        with self._turn:
            self._turn.wait_for(lambda: self._reader in (None, threading.get_ident()))
        with self._sending:
            self.socket.close()
        self._close_descriptors()

    def forget(self) -> None:
        """In a forked child, which can rely on no lock: close its copy, without a word to the server."""
        self.alive = False
        self.socket.close()
