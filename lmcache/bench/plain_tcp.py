"""The other end of a plain TCP copy, in a process of its own: takes bytes into memory, or sends some, and does no more.

Says its port on standard output. A conversation is one order after another: so many bytes, and which way.
"""

import mmap
import socket
import struct
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

ORDER = struct.Struct("<QB")
PIECE = 1 << 20
_BUFFER = 64 << 20


class PlainTCP:
    """What the bulk channel is compared with. A context manager: the process is gone after it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True)
        port = int(self._process.stdout.readline()) if self._process.stdout else 0
        self._socket = socket.create_connection(("127.0.0.1", port))

    @property
    def pid(self) -> int:
        """Of the other end."""
        return self._process.pid

    def send(self, memory: memoryview) -> float:
        """Seconds until the other end has all of it."""
        started = time.perf_counter()
        self._socket.sendall(ORDER.pack(len(memory), 0))
        for start in range(0, len(memory), PIECE):
            self._socket.sendall(memory[start : start + PIECE])
        self._socket.recv(1)
        return time.perf_counter() - started

    def receive(self, memory: memoryview) -> float:
        """Seconds until all of it has come."""
        started = time.perf_counter()
        self._socket.sendall(ORDER.pack(len(memory), 1))
        _fill(self._socket, memory)
        return time.perf_counter() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


def _fill(sock: socket.socket, memory: memoryview) -> None:
    filled = 0
    while filled < len(memory):
        got = sock.recv_into(memory[filled:])
        if not got:
            raise ConnectionError("the other end has gone")
        filled += got


def _serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        sock, _ = server.accept()
    buffer = memoryview(mmap.mmap(-1, _BUFFER))
    buffer[:] = b"\1" * _BUFFER  # all of it has memory now
    with sock:
        while len(order := sock.recv(ORDER.size, socket.MSG_WAITALL)) == ORDER.size:
            length, sends = ORDER.unpack(order)
            for start in range(0, length, PIECE):
                place = start % _BUFFER
                piece = buffer[place : place + min(PIECE, length - start)]
                if sends:
                    sock.sendall(piece)
                else:
                    _fill(sock, piece)
            if not sends:
                sock.sendall(b"!")


if __name__ == "__main__":
    _serve()
