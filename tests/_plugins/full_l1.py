"""What it takes to fill a server's L1 several times over: engines of several geometries, tenants, a pin, and deaths.

    python full_l1.py ARGUMENTS OF lmcache server

is the real server, which checks itself after every message: what `lmcache/core/invariants.py` says of the cache, and
that no chain has a hole as long as nobody has died. It ends with exit code 70 or 71 where that does not hold.
"""

import contextlib
import itertools
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from fault_points import FILE, GO, SOCKET, Trigger, around, nothing
from fault_rounds import PATIENCE_S, Host, alive, wait_until

from lmcache.core.control import Control, ServerAddress
from lmcache.core.keys import HASH_BYTES, ChainHasher, chain_root, tenant_of
from lmcache.engines.reference.engine import Engine
from lmcache.engines.reference.requests import Output
from lmcache.engines.reference.shapes import GEOMETRIES

MOODY = Path(__file__).with_name("moody_retention.py")
CHUNK = 64
CELLS = 160
CELL = 16 << 10
READY = re.compile(r"lmcache server ready on (\S+): .* epoch ([0-9a-f]{16})\n")

SHAPES = ("llama", "gemma", "hybrid", "glm53_flash")
"""Of the engines in this process: full attention; windows; recurrent states; scratch. 8, 4, 3 and 2 cells a chunk."""
TWO_RANKS = "everything"
"""Of the engine of two ranks in processes of its own, which dies: 9 cells a chunk, in nine objects."""
DEADLINE_S = "5.0"
"""Of that engine, for one request."""

PINNED = "hybrid"
PAID, SMALL = "a salt whose tenant is guaranteed a share", "a salt whose tenant has a quota"
LIMIT = CELLS // 5
"""Cells, of the guarantee as of the quota."""
TOKENS = 5 * CHUNK + 9


def serve(arguments: list[str]) -> int:
    from lmcache.cli.main import main
    from lmcache.core.invariants import check_invariants
    from lmcache.core.server import Server

    def check(server: Server, *_: Any) -> None:
        cache = server.service.cache
        try:
            check_invariants(cache)
        except RuntimeError:
            traceback.print_exc()
            os._exit(70)
        if cache.residents.orphaned and not cache.counters.chunks_aborted:
            print(f"holes, and nobody has died: {list(cache.residents.orphaned)}", file=sys.stderr, flush=True)
            os._exit(71)

    for method in ("_ready", "_end"):
        around(Server, method, nothing, lambda _, server, *rest: check(server))
    return main(["server", *arguments])


def prompt_of(shape: str, number: int) -> list[int]:
    """Prompts of even numbers share their first two chunks with each other; those of odd ones share nothing."""
    from reference_stand import prompt

    kind = [*SHAPES, TWO_RANKS].index(shape)
    own = prompt(TOKENS, seed=1000 * (kind + 1) + number)
    return own if number % 2 else prompt(2 * CHUNK, seed=1000 * (kind + 1)) + own[2 * CHUNK :]


class Answers:
    """What engines without a cache answer: computed once for all policies."""

    def __init__(self) -> None:
        self._engines = {shape: Engine(GEOMETRIES[shape], seed=1) for shape in SHAPES}
        self._known: dict[tuple[str, int, str], Output] = {}

    def of(self, shape: str, number: int, salt: str = "") -> Output:
        key = shape, number, salt
        if key not in self._known:
            self._engines[shape].drop_prefix_cache()
            (self._known[key],) = self._engines[shape].generate([prompt_of(shape, number)], 2, salt)
        return self._known[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


class Deaths:
    """Engines of two ranks, in processes that pause where they are told to, so that they can be killed there."""

    def __init__(self, folder: Path) -> None:
        name = f"lmcache-full-l1-{os.getpid()}"
        self.trigger = Trigger.create(folder / "armed")
        self._paused = socket.socket(socket.AF_UNIX)
        self._paused.bind("\0" + name)
        self._paused.listen()
        self._paused.settimeout(PATIENCE_S)
        self._environment = {**os.environ, FILE: str(folder / "armed"), SOCKET: name, "OPENBLAS_NUM_THREADS": "1"}
        self._alone = Host(self._environment, "engine", TWO_RANKS, "2", DEADLINE_S)
        self._alone.line()
        self._known: dict[int, str] = {}

    def start(self, address: str) -> tuple[Host, list[int]]:
        """An engine, and its ranks' pids."""
        host = Host(self._environment, "engine", TWO_RANKS, "2", DEADLINE_S, address)
        return host, json.loads(host.line())["ranks"]

    def right(self, number: int) -> str:
        if number not in self._known:
            self._known[number] = self._ask(self._alone, number)["answers"][0]
        return self._known[number]

    def ask(self, host: Host, number: int) -> int:
        """Have the engine answer a prompt, and see that it is right; returns the tokens that it hit."""
        return self.check(number, self._ask(host, number))

    def _ask(self, host: Host, number: int) -> dict[str, Any]:
        host.send({"prompts": [prompt_of(TWO_RANKS, number)], "forget": True})
        return self.answer(host)

    def answer(self, host: Host) -> dict[str, Any]:
        return json.loads(host.line())

    def check(self, number: int, answer: dict[str, Any]) -> int:
        assert answer["answers"] == [self.right(number)], "WRONG ANSWER"
        assert (answer["held"], answer["failures"]) == (0, [0])
        return int(answer["hits"][0])

    @contextlib.contextmanager
    def paused(self, host: Host, number: int, point: str) -> Iterator[int]:
        """As long as this lasts, the engine answers a prompt, and one of its ranks, the pid, stands at `point`."""
        self.trigger.arm(point, 1)
        host.send({"prompts": [prompt_of(TWO_RANKS, number)], "forget": True})
        with selectors.DefaultSelector() as selector:
            selector.register(self._paused, selectors.EVENT_READ)
            selector.register(host.output, selectors.EVENT_READ)
            selector.select(PATIENCE_S)
        assert self.trigger.disarm(), f"{point} was not reached: {host.line()}"
        sock, _ = self._paused.accept()
        with sock:
            yield int(json.loads(sock.recv(4096))["pid"])
            with contextlib.suppress(OSError):  # it may have been killed
                sock.sendall(GO)

    def bury(self, host: Host, ranks: list[int]) -> None:
        """One of its processes was killed: an engine that loses a rank ends by itself, ranks without an engine, too."""
        said = host.line()
        assert not said or "lost" in said
        host.end()
        wait_until(lambda: not any(map(alive, ranks)), lambda: f"ranks {ranks} outlive their engine")

    def close(self) -> None:
        self._alone.end()
        self._paused.close()
        self.trigger.close()


@attrs.define
class FullL1:
    """A server under one policy, and an engine of each shape in this process."""

    policy: str
    answers: Answers
    process: subprocess.Popen[str] = attrs.field(init=False)
    address: str = attrs.field(init=False)
    engines: Mapping[str, Engine] = attrs.field(init=False)
    hit_tokens: int = 0

    def __attrs_post_init__(self) -> None:
        share = [f"{tenant_of(salt)}={CELL * LIMIT / (1 << 30)!r}" for salt in (PAID, SMALL)]
        sizes = ["--l1-size-gb", repr(CELL * CELLS / (1 << 30)), "--l1-cell-kb", str(CELL >> 10)]
        chosen = ["--eviction-policy", self.policy, "--plugin", str(MOODY), "--retention", "moody"]
        limits = ["--guarantee", share[0], "--quota", share[1]]
        common = ["--port", "0", "--log-level", "error", "--chunk-size", str(CHUNK)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *common, *sizes, *chosen, *limits],
            env={**os.environ, "PYTHONHASHSEED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        ready = READY.fullmatch(self.process.stdout.readline())
        assert ready, self.process.communicate()
        self.address = ready[1]
        self.engines = {shape: Engine(GEOMETRIES[shape], server=self.address, seed=1, deadline=5.0) for shape in SHAPES}

    def control(self) -> Control:
        return Control(ServerAddress.parse(self.address), PATIENCE_S)

    def status(self) -> dict[str, Any]:
        with self.control() as control:
            return control.status()

    def ask(self, shape: str, *numbers: int, salt: str = "") -> list[int]:
        """Ask prompts at once, and compare every answer with a cold one. Returns the tokens that each hit."""
        from reference_stand import assert_same

        engine = self.engines[shape]
        engine.drop_prefix_cache()
        outputs = engine.generate([prompt_of(shape, number) for number in numbers], 2, salt)
        assert_same([self.answers.of(shape, number, salt) for number in numbers], outputs)
        assert not any(output.load_failures for output in outputs)
        hits = [output.hit_tokens for output in outputs]
        self.hit_tokens += sum(hits)
        return hits

    def flood(self, numbers: Sequence[int], shapes: Sequence[str] = SHAPES) -> None:
        """Engines are asked each of these prompts, and the one before it once more; so is a tenant with a quota."""
        for number in numbers:
            for shape in shapes:
                self.ask(shape, number, number - 1)
            self.ask("gemma", number, salt=SMALL)
            report = self.status()
            assert report["gauges"]["cells_used"] <= CELLS
            assert self.cells(report, SMALL) <= LIMIT

    def cells(self, report: Mapping[str, Any], salt: str) -> int:
        return next(each["cells"] for each in report["tenants"] if each["tenant"] == tenant_of(salt))

    def pin(self, shape: str, number: int) -> int:
        """Pin a prompt; returns the tokens that are pinned."""
        (space,) = [each for each in self.status()["namespaces"] if each["facts"]["model"] == f"reference/{shape}"]
        with self.control() as control:
            return control.pin(bytes.fromhex(space["digest"]), hashes(shape, number), 3600.0).tokens

    @property
    def filled(self) -> float:
        """How often L1 was filled."""
        report = self.status()
        return (report["counters"]["cells_evicted"] + report["gauges"]["cells_used"]) / CELLS

    def reached(self, shape: str, numbers: Sequence[int]) -> int:
        """Distinct chunks of these prompts that can be served, whatever the salt."""
        client = self.engines[shape].client
        assert client
        link = client.link()
        reached: set[bytes] = set()
        for number, salt in itertools.product(numbers, ("", PAID, SMALL)):
            joined = hashes(shape, number, salt)
            found = link.lookup("", joined, TOKENS).wait()
            reached.update(joined[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(found.tokens // CHUNK))
            if found.ticket:
                link.drop(found.ticket)
        return len(reached)

    def stored(self, shape: str) -> int:
        """Chunks of a model that are there."""
        spaces = [each for each in self.status()["namespaces"] if each["facts"]["model"] == f"reference/{shape}"]
        return sum(each["chunks"] for each in spaces)

    def wait_until_quiet(self) -> dict[str, Any]:
        """Nothing is held by anybody but the pin; returns the report."""
        zero = ("tickets", "reservations", "pinned_nodes", "cells_reserved")
        report: dict[str, Any] = {}

        def quiet() -> bool:
            report.update(self.status())
            gauges = report["gauges"]
            return gauges["clients"] == 2 * len(SHAPES) and not any(gauges[name] for name in zero)

        wait_until(quiet, lambda: f"not quiet: {report['gauges']}")
        return report

    def end(self) -> tuple[int, str]:
        """Exit code of the server, and what it has logged."""
        for engine in self.engines.values():
            engine.close()
        if self.process.poll() is None:
            self.process.terminate()
        _, log = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, log


def hashes(shape: str, number: int, salt: str = "") -> bytes:
    """Joined chain hashes of a prompt's whole chunks."""
    root = chain_root({"salt": salt} if salt else {})
    return ChainHasher(root, CHUNK).extend_to(prompt_of(shape, number))


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:]))
