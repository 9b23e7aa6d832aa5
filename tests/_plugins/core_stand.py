"""What tests of the core share: a server in a thread or a process, raw connections, and waiting for what must come."""

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from last_seen import last_seen

from lmcache.core.client import ClientSettings, ServerAddress
from lmcache.core.config import ServerConfig
from lmcache.core.control import Control
from lmcache.core.keys import ChainHash
from lmcache.core.observing import Observer
from lmcache.core.protocol import (
    PROTOCOL,
    Message,
    Register,
    Registered,
    Role,
    decode_reply,
    encode,
)
from lmcache.core.recording import Recorder
from lmcache.core.server import Server
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.eviction.lru import LRU

PATIENCE_S = 60
"""How long a condition may take to come true: never asserted, only given up on."""

CELL = 4096
CHUNK = 16
GEOMETRY = Geometry((KVGroup(GroupKind.FULL, CHUNK, (CELL,)),))
"""One cell a chunk."""
FACTS = {"model": "m"}
SETTINGS = ClientSettings(deadline=5.0, retry_min=0.01, retry_max=0.1)


def wait_until(condition: Callable[[], Any], what: str = "") -> Any:
    """Return the condition's value once it is true."""
    end = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"never came true: {what and f'{what}: '}{last_seen(condition)}"
        time.sleep(0.01)
    return value


def prompt(number: int, chunks: int) -> list[ChainHash]:
    return [ChainHash(struct.pack("<QQ", number, chunk)) for chunk in range(chunks)]


class RunningServer:
    """A server in a thread of this process."""

    def __init__(
        self,
        *,
        backed: bool = True,
        recorder: Recorder | None = None,
        observer: Observer | None = None,
        **settings: Any,
    ) -> None:
        """With `backed`, all of its arena has memory before the test begins."""
        settings = {"port": 0, "l1_bytes": 64 * CELL, "cell_bytes": CELL, "chunk_size": CHUNK, **settings}
        self.server = Server(ServerConfig(**settings), LRU(), recorder, observer=observer)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server")
        self._thread.start()
        if backed:
            wait_until(lambda: self.gauge("cells_backed") == self.server.config.cells)

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:  # noqa: BLE001 - whatever ended it, the test shall hear of it
            self.failure = error

    @property
    def address(self) -> ServerAddress:
        return ServerAddress(self.server.config.host, self.server.port)

    @property
    def cache(self) -> Any:
        """For looking, not for touching: it belongs to the server's thread."""
        return self.server.service.cache

    def status(self) -> dict[str, Any]:
        with Control(self.address, deadline=PATIENCE_S) as control:
            return control.status()

    def gauge(self, name: str) -> int:
        return int(self.status()["gauges"][name])

    def counter(self, name: str) -> int:
        return int(self.status()["counters"][name])

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self.server.stop()
        self._thread.join(PATIENCE_S)
        assert not self.running
        if self.failure:
            raise self.failure


PATIENT = f"""
import sys
import lmcache.core.server as server
from lmcache.cli.main import main
server.DRAIN_SECONDS = {PATIENCE_S}
sys.exit(main())
"""
"""A server that waits for stores in flight until a busy machine has got to finishing them."""


class ServerProcess:
    """`lmcache server` as users run it."""

    READY = re.compile(rb"lmcache server ready on 127\.0\.0\.1:(\d+): .* epoch (\w+)")

    def __init__(self, port: int = 0, *options: str, launcher: tuple[str, ...] = ("-m", "lmcache")) -> None:
        command = [
            "server",
            "--port",
            str(port),
            "--l1-size-gb",
            "0.001",
            "--l1-cell-kb",
            "4",
            "--chunk-size",
            str(CHUNK),
        ]
        self.process = subprocess.Popen(
            [sys.executable, *launcher, *command, "--log-level", "warning", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        ready = self.READY.match(self.process.stdout.readline())
        if ready is None:
            self.process.kill()
            raise AssertionError(self.process.stderr.read().decode())
        self.port, self.epoch = int(ready[1]), ready[2].decode()

    @property
    def address(self) -> ServerAddress:
        return ServerAddress("127.0.0.1", self.port)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def status(self) -> dict[str, Any]:
        with Control(self.address, deadline=PATIENCE_S) as control:
            return control.status()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


class RawConnection:
    """A Unix connection that speaks as it likes."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect("\0" + address[1:] if address.startswith("@") else address)
        self.descriptors: list[int] = []
        self._received = b""

    def send(self, *messages: Message) -> None:
        self.socket.sendall(b"".join(map(self.frame, messages)))

    @staticmethod
    def frame(message: Message) -> bytes:
        body = encode(message)
        return struct.pack("<I", len(body)) + body

    def receive(self) -> Message:
        """The next message. Raises EOFError at the end."""
        while len(self._received) < 4 or len(self._received) < 4 + struct.unpack_from("<I", self._received)[0]:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 4)
            self.descriptors += descriptors
            if not data:
                raise EOFError
            self._received += data
        (length,) = struct.unpack_from("<I", self._received)
        body, self._received = self._received[4 : 4 + length], self._received[4 + length :]
        return decode_reply(body)

    def ask(self, message: Message) -> Message:
        self.send(message)
        return self.receive()

    def register(
        self, role: Role = Role.WORKER, rank: int = 0, geometry: Geometry = GEOMETRY, **facts: str
    ) -> Registered:
        reply = self.ask(Register(1, PROTOCOL, facts or FACTS, geometry, role, rank))
        assert isinstance(reply, Registered), reply
        return reply

    def ended(self) -> bool:
        """Wait for the server to end the connection."""
        with contextlib.suppress(ConnectionError):
            while True:
                try:
                    self.receive()
                except EOFError:
                    break
        return True

    def close(self) -> None:
        self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def descriptors_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
