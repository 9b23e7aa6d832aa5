"""All ranks of the reference engine, as its scheduler sees them: one `step` that ends when every rank has done it."""

import abc
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from lmcache.engines.reference.messages import (
    Failed,
    FromRank,
    Partial,
    Setup,
    Step,
    StepDone,
    Sum,
    ToRank,
    decode_from_rank,
)
from lmcache.engines.reference.rank import Rank, receive, send
from lmcache.errors import LMCacheError

RANK_COMMAND = (sys.executable, "-m", "lmcache.engines.reference.rank")
"""Starts a rank's process; the number of its inherited socket is appended."""

EXIT_SECONDS = 10.0
"""A rank that takes longer to end is killed."""


class RankLost(LMCacheError):
    """A rank has died or failed. The engine cannot go on; start another."""


class Ranks(abc.ABC):
    """The engine's workers."""

    @abc.abstractmethod
    def step(self, step: Step) -> list[StepDone]:
        """Have every rank do the step. Raises RankLost."""

    @abc.abstractmethod
    def close(self) -> None:
        """End them. Idempotent."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks that have processes of their own."""
        return ()


class LocalRank(Ranks):
    """The only rank, in the engine's own process."""

    def __init__(self, setup: Setup) -> None:
        self._rank = Rank(setup, lambda partial: partial)

    def step(self, step: Step) -> list[StepDone]:
        return [self._rank.step(step)]

    def close(self) -> None:
        self._rank.close()


class RankProcesses(Ranks):
    """A process a rank. They compute in lockstep: each sum over ranks is made here, in the order of ranks."""

    def __init__(self, setups: Sequence[Setup], command: Sequence[str] = RANK_COMMAND) -> None:
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for setup in setups:
                self._start(setup, command)
            self._collect()
        except BaseException:
            self.close()
            raise

    def _start(self, setup: Setup, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        # ranks already use the cores; BLAS threads besides would only get in each other's way
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            )
        self._send(len(self._sockets) - 1, setup)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def step(self, step: Step) -> list[StepDone]:
        self._send_all(step)
        return self._collect()

    def _collect(self) -> list[StepDone]:
        while True:
            answers = [self._receive(rank) for rank in range(len(self._sockets))]
            done = [answer for answer in answers if isinstance(answer, StepDone)]
            if len(done) == len(answers):
                return done
            parts = [np.frombuffer(a.data, np.float32) for a in answers if isinstance(a, Partial)]
            if len(parts) != len(answers):
                raise RankLost(f"ranks are out of step: {[type(answer).__name__ for answer in answers]}")
            total = parts[0].copy()
            for part in parts[1:]:
                total += part
            self._send_all(Sum(total.tobytes()))

    def _send_all(self, message: ToRank) -> None:
        for rank in range(len(self._sockets)):
            self._send(rank, message)

    def _send(self, rank: int, message: ToRank) -> None:
        try:
            send(self._sockets[rank], message)
        except OSError as error:
            raise self._lost(rank, str(error)) from error

    def _receive(self, rank: int) -> FromRank:
        try:
            answer: FromRank = decode_from_rank(receive(self._sockets[rank]))
        except (EOFError, OSError) as error:
            raise self._lost(rank, str(error)) from error
        if isinstance(answer, Failed):
            raise self._lost(rank, answer.error)
        return answer

    def _lost(self, rank: int, why: str) -> RankLost:
        return RankLost(
            f"rank {rank} (pid {self._processes[rank].pid}) has ended: {why}", remedy="start the engine again"
        )

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()  # a rank ends when its socket does
        for process in self._processes:
            try:
                process.wait(EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
