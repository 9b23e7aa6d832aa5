"""A peer of the bulk channel that speaks as it likes."""

from typing import Any

import zmq
from core_stand import FACTS, GEOMETRY, PATIENCE_S, RunningServer

from lmcache.core.protocol import PROTOCOL, Message, Register, Registered, Role, decode_reply, encode


class RawBulk:
    """A peer of the bulk channel that speaks as it likes."""

    def __init__(self, server: RunningServer) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{server.server.bulk_port}")

    def send(self, message: Message | bytes, *frames: bytes) -> None:
        self.socket.send_multipart([message if isinstance(message, bytes) else encode(message), *frames])

    def receive(self) -> tuple[Message | None, list[bytes]]:
        """The next message, None for the end of the conversation, and the frames behind it."""
        assert self.socket.poll(PATIENCE_S * 1000)
        body, *frames = self.socket.recv_multipart()
        return decode_reply(body) if body else None, frames

    def ask(self, message: Message, *frames: bytes) -> Any:
        self.send(message, *frames)
        return self.receive()[0]

    def register(self) -> Registered:
        reply = self.ask(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0))
        assert isinstance(reply, Registered), reply
        return reply

    def close(self) -> None:
        self.socket.close()
        self._context.term()
