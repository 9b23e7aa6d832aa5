"""One rank of the reference engine: its share of the model, its pages, its connector."""

import signal
import socket
import struct
import sys
from collections.abc import Callable

import numpy as np

from lmcache.core.client import Client, ClientSettings, ServerAddress
from lmcache.core.protocol import Role
from lmcache.engines.reference.describe import describe
from lmcache.engines.reference.messages import (
    Failed,
    FromRank,
    Partial,
    Setup,
    Step,
    StepDone,
    Sum,
    ToRank,
    decode_to_rank,
    encode,
)
from lmcache.engines.reference.model import Model, Span
from lmcache.engines.reference.pages import Floats, PageMemory
from lmcache.engines.reference.worker import WorkerConnector

LENGTH = struct.Struct("<I")
"""Precedes every message between the engine and a rank."""


class Rank:
    """Computes steps. `reduce` sums over ranks; with one rank it gives back what it gets."""

    def __init__(self, setup: Setup, reduce: Callable[[Floats], Floats]) -> None:
        shape = setup.shape
        self._rank = setup.rank
        self._memory = PageMemory(shape, setup.ranks, setup.blocks)
        self._model = Model(shape, self._memory, seed=setup.seed, rank=setup.rank, ranks=setup.ranks, reduce=reduce)
        self._client: Client | None = None
        self._connector: WorkerConnector | None = None
        if setup.server:
            self._connect(setup)

    def _connect(self, setup: Setup) -> None:
        me = describe(setup.shape, seed=setup.seed, ranks=setup.ranks, role=Role.WORKER, rank=setup.rank)
        self._client = Client(ServerAddress.parse(setup.server), me, ClientSettings(deadline=setup.deadline))
        groups = me.geometry.groups
        pages = [self._memory.pages(number) if group.cached else None for number, group in enumerate(groups)]
        self._connector = WorkerConnector(self._client, pages)
        self._client.start(wait=setup.deadline)

    def step(self, step: Step) -> StepDone:
        """Start the step's loads, compute its tokens, store what they complete, report what has been loaded."""
        connector = self._connector
        if connector:
            for order in step.loads:
                connector.start_load(order)
        logits = [self._model.compute(Span(run.start, run.tokens, run.tables)) for run in step.runs]
        done = StepDone([row.tobytes() for row in logits] if self._rank == 0 else [])
        if connector:
            connector.store(step.offers)
            for request in step.ended:
                connector.forget(request)
            for request, well in connector.finished_loads():
                (done.loaded if well else done.failed).append(request)
        return done

    def close(self) -> None:
        """Stop threads and leave the server."""
        if self._connector and self._client:
            self._connector.close()
            self._client.close()


def send(sock: socket.socket, message: ToRank | FromRank) -> None:
    """Write one message. Raises OSError."""
    body = encode(message)
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> bytearray:
    """Read one message's body. Raises EOFError when the peer has ended, OSError."""
    return _read(sock, *LENGTH.unpack(_read(sock, LENGTH.size)))


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError("the other side has ended")
        view = view[count:]
    return data


def main(descriptor: int) -> int:
    """Run as a process: serve steps that arrive on an inherited socket until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted engine closes its ranks itself
    with socket.socket(fileno=descriptor) as sock:
        setup = decode_to_rank(receive(sock))
        if not isinstance(setup, Setup):
            return 2

        def reduce(partial: Floats) -> Floats:
            send(sock, Partial(partial.tobytes()))
            total = decode_to_rank(receive(sock))
            if not isinstance(total, Sum):
                raise TypeError(f"{type(total).__name__} in answer to a partial sum")
            return np.frombuffer(total.data, np.float32).reshape(partial.shape)

        rank = Rank(setup, reduce)
        try:
            send(sock, StepDone())
            _serve(sock, rank)
        except (EOFError, OSError):
            return 0  # the engine has ended, and nobody is left to tell
        finally:
            rank.close()
    return 0


def _serve(sock: socket.socket, rank: Rank) -> None:
    while True:
        step = decode_to_rank(receive(sock))
        if not isinstance(step, Step):
            return
        try:
            done: FromRank = rank.step(step)
        except (EOFError, OSError):
            raise
        except Exception as error:
            send(sock, Failed(f"{type(error).__name__}: {error}"))
            raise
        send(sock, done)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
