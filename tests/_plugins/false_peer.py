"""Another server for `peer://` that answers as a test says: honestly, but for some kinds of messages."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash
import zmq
from core_stand import CELL, CHUNK, GEOMETRY

from lmcache import __version__
from lmcache.core.blob import BlobIdentity, BlobStore
from lmcache.core.cells import pack_cells
from lmcache.core.keys import namespace_digest
from lmcache.core.protocol import (
    PROTOCOL,
    Commit,
    Confirm,
    Confirmed,
    Contents,
    Done,
    Hello,
    Message,
    Peek,
    Peeked,
    Read,
    Register,
    Registered,
    Reserve,
    Reserved,
    Take,
    Taken,
    Welcome,
    Write,
    Written,
    decode_request,
    encode,
)
from lmcache.geometry.fingerprint import geometry_facts
from lmcache.plugins.manager import PluginManager

Answer = Message | tuple[Message, bytes] | None
"""A message, one with bytes behind it, or silence."""

CELLS = 16
FULL = bytes(range(256)) * (CELL // 256)
"""What every cell of the false peer holds."""


def contents(request: Read, sent: bytes) -> tuple[Contents, bytes]:
    """An answer whose checksum is that of what is sent."""
    return Contents(request.id, xxhash.xxh3_64_intdigest(sent)), sent


HONEST: Mapping[type[Message], Callable[[Any], Answer]] = {
    Register: lambda q: Registered(q.id, "epoch", namespace_digest(q.facts), CHUNK, CELL, CELLS * CELL),
    Peek: lambda q: Peeked(q.id, bytes([1]) * (len(q.hashes) // 16)),
    Take: lambda q: Taken(q.id, 77, pack_cells([3])),
    Read: lambda q: contents(q, FULL[q.offset : q.offset + q.length]),
    Confirm: lambda q: Confirmed(q.id, held=True),
    Reserve: lambda q: Reserved(q.id, 5, bytes([0]), pack_cells([3]), CELLS),
    Write: lambda q: Written(q.id),
    Commit: lambda q: Done(q.id),
}


class FalsePeer:
    """Both ports of a server, in a thread. `lies` says what to answer to which kind of message."""

    def __init__(self, lies: Mapping[type[Message], Callable[[Any], Answer]] | None = None) -> None:
        self._answers = {**HONEST, Hello: self._welcome, **(lies or {})}
        self.asked: list[str] = []
        """Names of the messages that have come."""
        self._context = zmq.Context()
        self._routers = [self._context.socket(zmq.ROUTER) for _ in range(2)]
        self.port, self._bulk_port = (each.bind_to_random_port("tcp://127.0.0.1") for each in self._routers)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="false-peer")
        self._thread.start()

    def _welcome(self, request: Hello) -> Welcome:
        return Welcome(request.id, PROTOCOL, __version__, "epoch", "@nowhere", self._bulk_port)

    def _run(self) -> None:
        poller = zmq.Poller()
        for router in self._routers:
            poller.register(router, zmq.POLLIN)
        while not self._closing.is_set():
            for router, _ in poller.poll(20):
                who, body, *_ = router.recv_multipart()
                request = decode_request(body)
                self.asked.append(type(request).__name__)
                answer = self._answers.get(type(request), lambda q: Done(q.id))(request)
                if answer is not None:
                    message, *rest = answer if isinstance(answer, tuple) else (answer,)
                    router.send_multipart([who, encode(message), *rest])

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for router in self._routers:
            router.close(0)
        self._context.term()


@contextlib.contextmanager
def store_at(address: str) -> Any:
    """What tiering talks to when `--l2 peer://address` is given."""
    blobs: BlobStore = PluginManager().open_tier(f"peer://{address}").blobs
    try:
        yield blobs
    finally:
        blobs.tier.close()


def identity(chain_hash: bytes, parent: bytes = b"", model: str = "m") -> BlobIdentity:
    """Of a chunk of `core_stand.GEOMETRY`."""
    facts = {"model": model, **geometry_facts(GEOMETRY, CHUNK), "cell_bytes": str(CELL)}
    return BlobIdentity(namespace_digest(facts), facts, chain_hash, 0, 0, "", CHUNK, parent, GEOMETRY)


def blocks(blobs: Sequence[bytes]) -> list[memoryview]:
    """Buffers to load into."""
    return [memoryview(bytearray(each)) for each in blobs]
