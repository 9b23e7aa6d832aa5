"""L1 filled to three times its size under every policy: several geometries, tenants, a pin, and engines that die.

The server is the real one and checks itself after every message (`tests/_plugins/full_l1.py`).
"""

import os
import signal
from collections.abc import Iterator

import pytest
from fault_rounds import wait_until
from full_l1 import CHUNK, LIMIT, PAID, PINNED, SHAPES, Answers, Deaths, FullL1

from lmcache.plugins.manager import PluginManager

POLICIES = tuple(PluginManager().policies())
ROUNDS = range(2, 6)


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    known = Answers()
    yield known
    known.close()


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deaths]:
    bench = Deaths(tmp_path_factory.mktemp("deaths"))
    yield bench
    bench.close()


@pytest.fixture(params=POLICIES)
def full(request: pytest.FixtureRequest, answers: Answers) -> Iterator[FullL1]:
    running = FullL1(request.param, answers)
    yield running
    code, log = running.end()
    assert (code, log) == (0, ""), log


@pytest.mark.timeout(300)
def test_every_answer_is_right_and_nothing_is_held_when_l1_was_filled_three_times_and_engines_died(
    full: FullL1, deaths: Deaths
) -> None:
    # whole prompts of tenants and users that others must not take
    assert full.ask("llama", 1, salt=PAID) == [0]
    assert full.ask(PINNED, 1) == [0]
    assert full.pin(PINNED, 1) == 5 * CHUNK

    # nobody has died yet: the server ends itself when it sees a hole in a chain, and lookups reach all that is stored
    full.flood(ROUNDS)
    assert full.filled >= 3
    for shape in SHAPES:  # chunks expire meanwhile
        wait_until(
            lambda shape=shape: full.reached(shape, range(1, ROUNDS.stop)) == full.stored(shape),
            lambda shape=shape: f"{full.stored(shape)} chunks of {shape} are stored, and lookups do not reach all",
        )

    host, ranks = deaths.start(full.address)
    deaths.ask(host, 1)
    with deaths.paused(host, 2, "worker:during:copy-in") as rank:
        full.flood([6], ["llama"])  # around what is being written
        os.kill(rank, signal.SIGKILL)
    deaths.bury(host, ranks)
    full.wait_until_quiet()

    host, ranks = deaths.start(full.address)
    deaths.ask(host, 3)
    with deaths.paused(host, 3, "worker:during:copy-out"):
        full.flood([7], ["llama"])  # around what is being read
    assert deaths.check(3, deaths.answer(host)) == 5 * CHUNK
    deaths.ask(host, 5)
    with deaths.paused(host, 5, "worker:during:copy-out") as rank:
        for pid in (host.pid, rank):  # a rank that lived on would confirm, and so end the ticket
            os.kill(pid, signal.SIGKILL)
    deaths.bury(host, ranks)

    report = full.wait_until_quiet()
    gauges, counters = report["gauges"], report["counters"]
    assert (gauges["prefix_pins"], gauges["prefix_pin_cells"]) == (1, 15)
    assert full.cells(report, PAID) >= LIMIT
    assert (counters["policy_errors"], counters["internal_errors"], counters["messages_malformed"]) == (0, 0, 0)
    assert full.ask(PINNED, 1) == [5 * CHUNK]
    assert full.ask("llama", 1, salt=PAID)[0] >= LIMIT // 8 * CHUNK
    assert full.hit_tokens > 0
    assert counters["chunks_expired"] > 0
    full.wait_until_quiet()
