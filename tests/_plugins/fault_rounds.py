"""Rounds of faults: one process is killed or stopped at one point, and afterwards everything must be as if it had not.

    python tests/_plugins/fault_rounds.py --rounds 600 --seed 1      every combination at least once; about 15 minutes

A round asks an engine of two ranks for a prompt that the server holds and a new one; when a process reaches the armed
point, the victim (server, engine or a rank) gets SIGKILL, or SIGSTOP and later SIGCONT. Then: answers are right to the
last bit, or the engine said that its rank died; tickets, reservations and reserved cells are back to zero; what died
has left no process, socket or shared memory; and the same prompts, asked once more, are answered right again.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
from fault_points import COPIES, FILE, GO, POINTS, SOCKET, Trigger

from lmcache.core.control import Control, ServerAddress
from lmcache.errors import LMCacheError
from lmcache.plugins.testing.ports import free_port

HOSTS = Path(__file__).with_name("fault_points.py")
PATIENCE_S = 60.0
VICTIMS = ("server", "engine", "rank")
ACTIONS = ("kill", "stop")
ROUNDS_PER_SHAPE = 25
SHAPES = ("llama", "mla", "everything", "glm53_flash", "hybrid")
RARE = ("Hello", "Register", "Drop", "Abort", "Lookup", "Open", "Confirm")
"""Steps that a round may take no second time."""

READY = re.compile(r"lmcache server ready on (\S+): .* epoch ([0-9a-f]{16})\n")


@attrs.frozen
class Fault:
    """What happens in one round."""

    point: str
    victim: str
    action: str

    def __str__(self) -> str:
        return f"{self.action} {self.victim} at {self.point}"


def all_faults() -> list[Fault]:
    return [Fault(*each) for each in itertools.product(POINTS, VICTIMS, ACTIONS)]


def wait_until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"after {PATIENCE_S:g} s: {what()}")
        time.sleep(0.01)


def alive(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # an orphan may have become ours
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


class Host:
    """A process of `fault_points.py` that is spoken to in lines."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HOSTS), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        assert self.process.stdout
        self.output = self.process.stdout
        self._pending = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def line(self) -> str:
        """The next line; empty at the end. Blocks for `PATIENCE_S` at most."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            until = time.monotonic() + PATIENCE_S
            while b"\n" not in self._pending:
                if not selector.select(until - time.monotonic()):
                    raise AssertionError(f"no answer from {self.process.args} within {PATIENCE_S:g} s")
                data = os.read(self.output.fileno(), 1 << 16)
                if not data:
                    return ""
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode() + "\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin
        self.process.stdin.close()
        self.output.close()


class Bench:
    """A server, an engine of two ranks and an engine without a cache to compare with."""

    def __init__(self, seed: int, folder: Path, deadline: float = 0.4) -> None:
        """`deadline` of the engine; as it is, some of those who are stopped are given up, and some are not."""
        self._deadline = str(deadline)
        self._random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.trigger = Trigger.create(folder / "armed")
        name = f"lmcache-fault-bench-{os.getpid()}"
        self._breakpoints = socket.socket(socket.AF_UNIX)
        self._breakpoints.bind("\0" + name)
        self._breakpoints.listen()
        self._environment = {**os.environ, FILE: str(folder / "armed"), SOCKET: name, "OPENBLAS_NUM_THREADS": "1"}
        self._port = free_port()
        self._address = f"127.0.0.1:{self._port}"
        self._shape = SHAPES[0]
        self._ranks: list[int] = []
        self._epoch = ""
        self._expected: dict[int, str] = {}
        self.server = self._start_server()
        self.engine = self._start_engine()
        self.alone = self._start_alone()

    # ------------------------------------------------------------------------------------------------------ processes

    def _start_server(self) -> Host:
        small = ("--chunk-size", "64", "--l1-size-gb", "0.01", "--l1-cell-kb", "64", "--log-level", "error")
        host = Host(self._environment, "server", "--port", str(self._port), *small)
        ready = READY.fullmatch(host.line())
        assert ready, "the server did not start"
        self._epoch = ready[2]
        return host

    def _restart_server(self) -> None:
        """The old one is dead, or dies now; it leaves nothing behind."""
        self.server.end()
        epoch = self._epoch
        wait_until(
            lambda: f"@lmcache-{epoch}" not in Path("/proc/net/unix").read_text(),
            lambda: f"socket of dead server {epoch}",
        )
        self.server = self._start_server()

    def _start_engine(self) -> Host:
        host = Host(self._environment, "engine", self._shape, "2", self._deadline, self._address)
        self._ranks = json.loads(host.line())["ranks"]
        return host

    def _start_alone(self) -> Host:
        host = Host(self._environment, "engine", self._shape, "2", self._deadline)
        host.line()
        return host

    def change_shape(self, shape: str) -> None:
        """Go on with engines of another shape."""
        self._expected.clear()
        self._shape = shape
        for host in (self.engine, self.alone):
            host.end()
        self._wait_for_ranks_to_end()
        self.engine, self.alone = self._start_engine(), self._start_alone()

    def _wait_for_ranks_to_end(self) -> None:
        wait_until(lambda: not any(map(alive, self._ranks)), lambda: f"ranks {self._ranks} outlive their engine")

    def show_stacks(self) -> None:
        """Have every process write where each of its threads is."""
        for pid in (self.server.pid, self.engine.pid, *self._ranks):
            if alive(pid):
                print(f"pid {pid}:", file=sys.stderr, flush=True)
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.2)

    def close(self) -> None:
        for host in (self.engine, self.alone, self.server):
            host.end()
        self._wait_for_ranks_to_end()
        self._breakpoints.close()
        self.trigger.close()

    # -------------------------------------------------------------------------------------------------------- prompts

    def _prompt(self, number: int) -> list[int]:
        rng = random.Random(number)
        return [rng.randrange(512) for _ in range(rng.choice((129, 140, 200, 255)))]

    def _right_answer(self, number: int) -> str:
        if number not in self._expected:
            self.alone.send({"prompts": [self._prompt(number)], "forget": True})
            self._expected[number] = json.loads(self.alone.line())["answers"][0]
        return self._expected[number]

    def ask(self, numbers: list[int], *, forget: bool = True) -> None:
        self.engine.send({"prompts": [self._prompt(number) for number in numbers], "forget": forget})

    def check_answer(self, numbers: list[int], line: str) -> bool:
        """Whether there was an answer; a wrong one fails."""
        answer = json.loads(line) if line else {"lost": "the engine is gone"}
        if "lost" in answer:
            return False
        assert answer["answers"] == [self._right_answer(number) for number in numbers], "WRONG ANSWER"
        assert answer["held"] == 0, f"the engine lost {answer['held']} blocks"
        self.counts["hit tokens"] += sum(answer["hits"])
        self.counts["failed loads"] += sum(answer["failures"])
        return True

    # --------------------------------------------------------------------------------------------------------- a round

    def round(self, fault: Fault) -> bool:
        """One round. Returns whether the point was reached. Raises AssertionError for whatever is not as it must be."""
        known, fresh = self._random.randrange(6), self._random.randrange(6, 1_000_000)
        step = fault.point.rsplit(":", 1)[1]
        self.ask([known])
        assert self.check_answer([known], self.engine.line()), "the engine was not well before the fault"
        registers = step in {"Hello", "Register"}
        self.trigger.arm(fault.point, self._random.choice((1, 1, 2, 3)) if step not in {*RARE, *COPIES} else 1)
        if registers:
            self._restart_server()
            reached = self._strike(fault, None)
        # what the engine holds itself makes it drop the ticket it got
        self.ask([known, fresh], forget=step != "Drop")
        if not registers:
            reached = self._strike(fault, self.engine)
        if not self.check_answer([known, fresh], self.engine.line()):
            assert reached, "the engine ended of itself"
            assert fault.action == "kill", "a stopped process cost the engine its life"
            assert fault.victim != "server", "the server's death cost the engine its life"
            self.engine.process.wait(PATIENCE_S)  # after a rank's death it ends of itself
        self._mend()
        self.settle()
        self.ask([known, fresh])
        assert self.check_answer([known, fresh], self.engine.line()), "the engine does not answer afterwards"
        self.settle()
        return reached

    def _strike(self, fault: Fault, answering: Host | None) -> bool:
        """Wait until a process pauses at the point, or `answering` has answered; do to the victim what is planned."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._breakpoints, selectors.EVENT_READ)
            if answering:
                selector.register(answering.output, selectors.EVENT_READ)
            selector.select(PATIENCE_S)
        if not self.trigger.disarm():
            return False
        with self.paused(fault.point) as (paused, pid):
            victim = self._victim(fault, pid)
            os.kill(victim, signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
            with contextlib.suppress(OSError):  # the victim may be the one that paused
                paused.sendall(GO)
        if fault.action == "stop":
            time.sleep(self._random.choice((0.02, 0.1, 0.7)))
            os.kill(victim, signal.SIGCONT)
        elif fault.victim == "server" and self._random.random() < 0.5:
            self.server.process.wait(PATIENCE_S)
            self._mend()
        return True

    @contextlib.contextmanager
    def paused(self, point: str) -> Iterator[tuple[socket.socket, int]]:
        """The process that pauses at the armed point: what to answer it by, and its pid."""
        self._breakpoints.settimeout(PATIENCE_S)
        sock, _ = self._breakpoints.accept()
        with sock:
            who = json.loads(sock.recv(4096))
            assert who["point"] == point
            yield sock, who["pid"]

    def _victim(self, fault: Fault, paused: int) -> int:
        if fault.victim == "rank":
            return paused if paused in self._ranks else self._random.choice(self._ranks)
        return self.server.pid if fault.victim == "server" else self.engine.pid

    def _mend(self) -> None:
        """Start again what has died; nothing else may have."""
        if self.server.process.poll() is not None:
            assert self.server.process.returncode == -signal.SIGKILL, "the server found its own state broken"
            self._restart_server()
            self.counts["servers started"] += 1
        if self.engine.process.poll() is not None:
            self.engine.end()
            self._wait_for_ranks_to_end()
            self.engine = self._start_engine()
            self.counts["engines started"] += 1

    def settle(self) -> None:
        """Everybody is registered, and nothing is held by anybody."""
        zero = ("tickets", "reservations", "pinned_nodes", "cells_reserved")

        def settled() -> bool:
            with Control(ServerAddress.parse(self._address), PATIENCE_S) as control, contextlib.suppress(LMCacheError):
                report.update(control.status())
            gauges = report.get("gauges", {})
            return gauges.get("clients") == 3 and not any(gauges[name] for name in zero)

        report: dict[str, Any] = {}
        wait_until(
            settled, lambda: f"not settled: {report.get('gauges')}, {report.get('clients')}, ranks {self._ranks}"
        )
        assert report["counters"]["internal_errors"] == 0
        assert report["counters"]["messages_malformed"] == 0
        wait_until(self._only_living_arenas, lambda: "an arena of a dead server is still mapped")
        assert not list(Path("/dev/shm").glob("*lmcache*"))

    def _only_living_arenas(self) -> bool:
        maps = {pid: Path(f"/proc/{pid}/maps").read_text().count("/memfd:lmcache") for pid in self._ranks}
        return all(count == 1 for count in maps.values())


def plan(rounds: int, seed: int, only: str = "") -> list[Fault]:
    """Faults in random order; every one once before any comes twice. `only` picks those whose name contains it."""
    rng = random.Random(seed)
    faults = [fault for fault in all_faults() if only in str(fault)]
    planned: list[Fault] = []
    while len(planned) < rounds:
        planned += rng.sample(faults, len(faults))
    return planned[:rounds]


def run(faults: list[Fault], seed: int, tell: Callable[[str], None]) -> Counter[str]:
    """Do it; returns what was counted. Raises AssertionError that names seed, round and fault."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Bench(seed, Path(folder))) as bench:
        for number, fault in enumerate(faults):
            if number and number % ROUNDS_PER_SHAPE == 0:
                bench.change_shape(SHAPES[number // ROUNDS_PER_SHAPE % len(SHAPES)])
            try:
                reached = bench.round(fault)
            except Exception as error:
                bench.show_stacks()
                raise AssertionError(
                    f"seed {seed}, round {number}, {fault}: {type(error).__name__}: {error}"
                ) from error
            bench.counts["rounds"] += 1
            bench.counts["points reached"] += reached
            tell(f"{number + 1:4d}/{len(faults)}  {fault}{'' if reached else '  (not reached)'}")
        return bench.counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="faults whose name contains this: 'kill rank at worker:before:Open'")
    arguments = parser.parse_args()
    started = time.monotonic()
    faults = plan(arguments.rounds, arguments.seed, arguments.only)
    counts = run(faults, arguments.seed, lambda line: print(line, flush=True))
    print(
        f"{dict(counts)} in {time.monotonic() - started:.0f} s; every answer right, nothing held, nothing left behind"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
