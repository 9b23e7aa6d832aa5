"""What tests of the reference engine share: a real server beside it, prompts, and what it means to answer the same."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from core_stand import PATIENCE_S, wait_until

from lmcache.core.client import Client
from lmcache.core.control import Control, ServerAddress
from lmcache.engines.reference.demo import same_answer
from lmcache.engines.reference.engine import Engine
from lmcache.engines.reference.ranks import LocalRank
from lmcache.engines.reference.requests import Output
from lmcache.engines.reference.shapes import ModelShape
from lmcache.errors import ServerUnavailable
from lmcache.plugins.testing import Answer, EngineUnderTest

DEADLINE_S = 20.0
"""Of an engine whose test is not about deadlines: a host that holds everything up for seconds costs no hit."""

READY = re.compile(r"lmcache server ready on (\S+): .* epoch ([0-9a-f]{16})\n")


@attrs.define
class RunningServer:
    """A server process."""

    process: subprocess.Popen[str]
    address: str
    epoch: str

    def gauges(self) -> dict[str, int]:
        return self._report()["gauges"]

    def counters(self) -> dict[str, int]:
        return self._report()["counters"]

    def wait_idle(self) -> None:
        with Control(ServerAddress.parse(self.address), PATIENCE_S) as control:
            control.wait_idle()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _report(self) -> dict[str, dict[str, int]]:
        with Control(ServerAddress.parse(self.address), PATIENCE_S) as control:
            return control.status()


StartServer = Callable[..., RunningServer]


def start(*arguments: str, port: int = 0) -> RunningServer:
    command = [sys.executable, "-m", "lmcache", "server", "--log-level", "error", "--l1-cell-kb", "64"]
    size = [] if "--l1-size-gb" in arguments else ["--l1-size-gb", "0.125"]
    process = subprocess.Popen(
        [*command, "--port", str(port), *size, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = process.stdout.readline() if process.stdout else ""
    ready = READY.fullmatch(line)
    if ready is None:
        process.kill()
        pytest.fail(f"the server said {line!r} and {process.communicate()[1]!r}")
    return RunningServer(process, ready[1], ready[2])


def engine_at(server: RunningServer | str, shape: ModelShape, **settings: Any) -> Engine:
    """An engine that uses `server` and is patient with it."""
    address = server if isinstance(server, str) else server.address
    return Engine(shape, server=address, **{"deadline": DEADLINE_S, **settings})


def await_links(engine: Engine, server: RunningServer) -> None:
    """Until scheduler and worker, both of this process, have their links to this boot of the server, and nobody else.

    The server counts a client a moment before that has its link: a lookup in between is a miss.
    """
    wait_until(lambda: epochs(engine) == {server.epoch})
    wait_until(lambda: server.gauges()["clients"] == 2)


def epochs(engine: Engine) -> set[str]:
    """The boots of the server that scheduler and worker have links to; an empty one for each that has none."""
    assert isinstance(engine._ranks, LocalRank)
    return {_epoch(client) for client in (engine.client, engine._ranks._rank._client)}


def _epoch(client: Client | None) -> str:
    assert client
    try:
        return client.link().epoch
    except ServerUnavailable:
        return ""


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Random tokens; a longer prompt of the same seed begins with a shorter one."""
    return np.random.default_rng([7, seed]).integers(0, 512, 4096).tolist()[:tokens]


def assert_same(one: Output | Sequence[Output], other: Output | Sequence[Output]) -> None:
    """Same tokens, same logits to the last bit."""
    ones, others = ([x] if isinstance(x, Output) else x for x in (one, other))
    for a, b in zip(ones, others, strict=True):
        assert a.tokens == b.tokens
        assert same_answer(a, b)


def assert_different(one: Output, other: Output) -> None:
    assert not np.array_equal(one.logits[0], other.logits[0])


class ReferenceUnderTest(EngineUnderTest):
    """An engine as the conformance suite of adapters drives it, in this process."""

    can_abort = True

    def __init__(self, shape: ModelShape, server: str, seed: int, ranks: int = 1) -> None:
        self._engine = Engine(shape, server=server, seed=seed, ranks=ranks, deadline=5.0, step_tokens=100)
        self.clients = 1 + ranks

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "") -> list[Answer]:
        return [self._answer(output) for output in self._engine.generate(prompts, max_tokens, salt)]

    def _answer(self, output: Output) -> Answer:
        logits = tuple(value for row in output.logits for value in row.tolist())
        return Answer(tuple(output.tokens), output.hit_tokens + output.own_hit_tokens, logits)

    def linked(self) -> bool:
        # ranks that are processes do not say
        return self._engine.client.linked if self.clients > 2 else "" not in epochs(self._engine)

    def drop_own_cache(self) -> None:
        self._engine.drop_prefix_cache()

    def abort_after(self, prompt: Sequence[int], steps: int) -> None:
        request = self._engine.add(prompt, 8)
        for _ in range(steps):
            self._engine.step()
        self._engine.abort(request)
        # lookups of aborted requests may still be answered
        while self._engine.busy or self._engine._connector.abandoned:
            self._engine.step()
        self._engine.take(request)

    def close(self) -> None:
        self._engine.close()
