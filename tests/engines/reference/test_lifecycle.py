"""Requests that end early, wait, or lose what was promised to them; ranks and servers that come and go."""

import os
import signal
import time
from collections.abc import Iterator

import msgspec
import pytest
from core_stand import wait_until
from reference_stand import RunningServer, StartServer, assert_same, await_links, engine_at, prompt

from lmcache.engines.reference.engine import Engine
from lmcache.engines.reference.ranks import RankLost
from lmcache.engines.reference.requests import State
from lmcache.engines.reference.scheduler import SchedulerConnector
from lmcache.engines.reference.shapes import GEOMETRIES
from lmcache.engines.reference.worker import WorkerConnector
from lmcache.errors import ConfigError
from lmcache.plugins.testing.ports import free_port

CHUNK = 64
SHAPE = GEOMETRIES["everything"]
ASKED = prompt(CHUNK * 3 + 9)


@pytest.fixture
def warm(server: RunningServer, seed: int) -> Iterator[Engine]:
    """An engine whose server holds `ASKED`, and which holds nothing itself."""
    with engine_at(server, SHAPE, seed=seed) as engine:
        engine.generate([ASKED])
        server.wait_idle()
        engine.drop_prefix_cache()
        yield engine


def state(engine: Engine, request: int) -> State:
    return engine._requests[request].state


def held(server: RunningServer) -> dict[str, int]:
    gauges = server.gauges()
    names = ("tickets", "reservations", "pinned_nodes", "cells_reserved")
    return {name: gauges[name] for name in names if gauges[name]}


def assert_nothing_held(engine: Engine, server: RunningServer) -> None:
    assert engine.unused_blocks == 511
    assert not engine.busy
    wait_until(lambda: not held(server))  # a ticket is dropped without waiting for the answer


# ---------------------------------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize("steps", range(8))
def test_a_request_may_be_aborted_at_any_step(warm: Engine, server: RunningServer, steps: int) -> None:
    request = warm.add(ASKED)
    for _ in range(steps):
        warm.step()
    warm.abort(request)
    while warm.busy:
        warm.step()
    assert warm.take(request).aborted
    (answer,) = warm.generate([ASKED])
    assert len(answer.tokens) == 8
    assert_nothing_held(warm, server)


def test_a_request_aborted_while_it_is_looked_up_gives_its_ticket_back(warm: Engine, server: RunningServer) -> None:
    for _ in range(20):
        warm.abort(warm.add(ASKED))
    assert warm._connector
    while warm._connector.abandoned:  # lookups that are still to be answered
        warm.step()
    assert_nothing_held(warm, server)


def test_a_request_aborted_while_it_loads_keeps_its_blocks_until_the_ranks_are_done(
    warm: Engine, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = WorkerConnector._load

    def slow(self: WorkerConnector, order: object) -> bool:
        time.sleep(0.3)
        return load(self, order)  # type: ignore[arg-type]

    monkeypatch.setattr(WorkerConnector, "_load", slow)
    request = warm.add(ASKED)
    while state(warm, request) is not State.LOADING:
        warm.step()
    free = warm.unused_blocks
    assert free < 511
    warm.abort(request)
    warm.step()
    assert warm.unused_blocks == free
    while warm.busy:
        warm.step()
    assert warm.take(request).aborted
    assert_nothing_held(warm, server)


def test_an_unknown_request_is_aborted_in_vain(warm: Engine) -> None:
    warm.abort(4711)


# ----------------------------------------------------------------------------------------------------- blocks are few


@pytest.mark.parametrize("name", GEOMETRIES)
def test_requests_that_are_preempted_for_lack_of_blocks_answer_the_same(
    server: RunningServer, seed: int, name: str
) -> None:
    shape = GEOMETRIES[name]
    prompts = [prompt(CHUNK * 2 + length, seed=length) for length in (3, 17, 40, 63)]
    with Engine(shape, seed=seed) as alone:
        expected = alone.generate(prompts, max_tokens=30)
    longest = CHUNK * 2 + 63 + 30
    blocks = 2 + sum(-(-longest // g.tokens_per_block) if g.tokens_per_block else 1 for g in shape.groups)
    with engine_at(server, shape, seed=seed, blocks=blocks, step_tokens=48) as engine:
        for _ in range(2):
            answers = engine.generate(prompts, max_tokens=30)
            assert_same(expected, answers)
            assert engine.unused_blocks == blocks - 1
            engine.drop_prefix_cache()
    assert sum(answer.hit_tokens for answer in answers) >= 4 * CHUNK * 2


def test_a_preempted_request_hits_what_it_had_stored_itself(server: RunningServer, seed: int) -> None:
    prompts = [prompt(CHUNK * 2 + length, seed=length) for length in (3, 17, 40)]
    # room for one of them when it ends, and for two when they begin
    with engine_at(server, GEOMETRIES["llama"], seed=seed, blocks=24, step_tokens=400) as engine:
        together = [engine.add(each, max_tokens=120) for each in prompts]
        while engine.busy:
            engine.step()
            engine.drop_prefix_cache()
        answers = [engine.take(request) for request in together]
    # no prompt shares a chunk with another, and the engine remembers nothing: these are its own chunks, come back
    assert sum(answer.hit_tokens for answer in answers) >= CHUNK * 2
    with Engine(GEOMETRIES["llama"], seed=seed) as alone:
        assert_same(alone.generate(prompts, max_tokens=120), answers)


def test_a_request_that_can_never_fit_is_refused(seed: int) -> None:
    with Engine(GEOMETRIES["llama"], seed=seed, blocks=10) as engine, pytest.raises(ConfigError) as refused:
        engine.add(prompt(140), max_tokens=8)
    assert "a request of 140 + 8 tokens needs 10 of 9 blocks" in str(refused.value)


# ------------------------------------------------------------------------------------------------------- failed loads


def test_a_load_that_fails_is_computed_once_and_not_tried_again(
    warm: Engine, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def failing(*_: object) -> None:
        attempts.append(1)
        raise OSError("the arena is gone")

    monkeypatch.setattr(WorkerConnector, "_copy_out", failing)
    (answer,) = warm.generate([ASKED])
    assert (len(attempts), answer.load_failures, answer.hit_tokens) == (1, 1, 0)
    monkeypatch.undo()
    warm.drop_prefix_cache()
    (served,) = warm.generate([ASKED])
    assert served.hit_tokens == CHUNK * 3
    assert_same(answer, served)
    assert_nothing_held(warm, server)


def test_a_load_that_is_not_confirmed_does_not_count(
    warm: Engine, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.core.link import Link

    monkeypatch.setattr(Link, "confirm", lambda *_: False)
    (answer,) = warm.generate([ASKED])
    assert (answer.load_failures, answer.hit_tokens) == (1, 0)
    monkeypatch.undo()
    assert_nothing_held(warm, server)


def test_a_ticket_of_another_boot_of_the_server_is_not_even_tried(
    warm: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.core.link import Link

    opened: list[int] = []
    monkeypatch.setattr(Link, "open", lambda _, ticket: opened.append(ticket))
    load = SchedulerConnector.load
    monkeypatch.setattr(
        SchedulerConnector, "load", lambda *args: msgspec.structs.replace(load(*args), epoch="an older boot")
    )
    (answer,) = warm.generate([ASKED])
    assert (answer.load_failures, answer.hit_tokens, opened) == (1, 0, [])


def test_a_server_that_dies_between_lookup_and_load_costs_a_computation(start_server: StartServer, seed: int) -> None:
    port = free_port()
    first = start_server("--chunk-size", "64", port=port)
    with Engine(SHAPE, seed=seed) as alone:
        (expected,) = alone.generate([ASKED])
    with engine_at(first, SHAPE, seed=seed) as engine:
        engine.generate([ASKED])
        engine.drop_prefix_cache()
        request = engine.add(ASKED)
        connector = engine._connector
        assert connector
        while connector.hit(request) is None:
            time.sleep(0.01)
        assert connector.hit(request) == CHUNK * 3
        first.kill()
        second = start_server("--chunk-size", "64", port=port)
        await_links(engine, second)
        while engine.busy:
            engine.step()
        answer = engine.take(request)
        assert (answer.load_failures, answer.hit_tokens) == (1, 0)
        assert_same(expected, answer)
        # the new server got the request's chunks from the first on
        second.wait_idle()
        engine.drop_prefix_cache()
        (served,) = engine.generate([ASKED])
        assert served.hit_tokens == CHUNK * 3
        assert_same(expected, served)
        assert_nothing_held(engine, second)


# --------------------------------------------------------------------------------------------- servers come and go


def test_an_engine_without_a_server_answers_and_uses_one_that_comes(start_server: StartServer, seed: int) -> None:
    port = free_port()
    with engine_at(f"127.0.0.1:{port}", SHAPE, seed=seed) as engine, Engine(SHAPE, seed=seed) as alone:
        (without,) = engine.generate([ASKED])
        assert_same(alone.generate([ASKED]), without)
        server = start_server("--chunk-size", "64", port=port)
        await_links(engine, server)
        engine.drop_prefix_cache()
        (cold,) = engine.generate([ASKED])
        server.wait_idle()
        engine.drop_prefix_cache()
        (served,) = engine.generate([ASKED])
        assert (cold.hit_tokens, served.hit_tokens) == (0, CHUNK * 3)
        server.kill()
        engine.drop_prefix_cache()
        (after,) = engine.generate([ASKED])
        assert after.hit_tokens == 0
        assert_same([without, without], [served, after])


def test_a_stopped_server_costs_one_deadline_and_no_answer(start_server: StartServer, seed: int) -> None:
    server = start_server("--chunk-size", "64")
    with engine_at(server, SHAPE, seed=seed, deadline=2.0) as engine:
        (cold,) = engine.generate([ASKED])
        server.process.send_signal(signal.SIGSTOP)
        engine.drop_prefix_cache()
        (answer,) = engine.generate([ASKED])
        assert answer.hit_tokens == 0
        assert_same(cold, answer)
        server.process.send_signal(signal.SIGCONT)
        await_links(engine, server)
        engine.drop_prefix_cache()
        (served,) = engine.generate([ASKED])
        assert served.hit_tokens == CHUNK * 3
        assert_same(cold, served)
        assert_nothing_held(engine, server)


def test_a_request_that_runs_while_the_server_restarts_is_stored_from_its_first_chunk(
    start_server: StartServer, seed: int
) -> None:
    port = free_port()
    first = start_server("--chunk-size", "64", port=port)
    with engine_at(first, GEOMETRIES["llama"], seed=seed) as engine:
        request = engine.add(ASKED, max_tokens=20)
        while engine._requests[request].generated < 3:
            engine.step()
        assert first.gauges()["nodes"] == 3
        first.kill()
        second = start_server("--chunk-size", "64", port=port)
        await_links(engine, second)
        assert second.gauges()["nodes"] == 0
        while engine.busy:
            engine.step()
        assert second.gauges()["nodes"] == 3
        engine.drop_prefix_cache()
        (served,) = engine.generate([ASKED])
        assert served.hit_tokens == CHUNK * 3
        assert_same(engine.generate([ASKED], salt="cold"), served)


@pytest.mark.parametrize("name", ["gemma", "chunked", "hybrid", "everything"])
def test_blocks_that_the_engine_no_longer_holds_are_never_stored_as_data(
    start_server: StartServer, seed: int, name: str
) -> None:
    shape, port = GEOMETRIES[name], free_port()
    first = start_server("--chunk-size", "64", port=port)
    with engine_at(first, shape, seed=seed) as engine, Engine(shape, seed=seed) as alone:
        engine.generate([prompt(CHUNK * 4 + 1)])
        first.kill()
        second = start_server("--chunk-size", "64", port=port)
        await_links(engine, second)
        # the engine begins with what it holds: of the first chunks the window blocks and snapshots are long gone
        (answer,) = engine.generate([prompt(CHUNK * 6 + 1)])
        assert answer.own_hit_tokens == CHUNK * 4
        for chunks in (1, 2, 3, 4, 5, 6):
            engine.drop_prefix_cache()
            asked = prompt(CHUNK * chunks + 1)
            (served,) = engine.generate([asked])
            assert_same(alone.generate([asked]), served)
            if chunks == 1:
                assert served.hit_tokens == 0
        assert served.hit_tokens == CHUNK * 6


def test_a_server_that_refuses_the_geometry_leaves_the_engine_alone(start_server: StartServer, seed: int) -> None:
    server = start_server("--chunk-size", "48")
    with engine_at(server, GEOMETRIES["glm53"], seed=seed) as engine:
        (answer,) = engine.generate([ASKED])
        assert answer.hit_tokens == 0
        assert engine.client
        assert "chunk size 48 is not a multiple of 64, the tokens per block of KV group 0 of reference/glm53" in str(
            engine.client.refusal
        )


@pytest.mark.parametrize("name", GEOMETRIES)
def test_an_l1_too_small_for_all_prompts_never_serves_wrong_ones(
    start_server: StartServer, seed: int, name: str
) -> None:
    server = start_server("--chunk-size", "64", "--l1-size-gb", "0.003", "--l1-cell-kb", "32")
    prompts = [prompt(CHUNK * 4 + 5, seed=number) for number in range(8)]
    with Engine(GEOMETRIES[name], seed=seed) as alone:
        expected = alone.generate(prompts, max_tokens=2)
    with engine_at(server, GEOMETRIES[name], seed=seed) as engine:
        for _ in range(2):
            answers = []
            for each in prompts:
                engine.drop_prefix_cache()
                answers += engine.generate([each, each[:CHUNK] + each[:70]], max_tokens=2)[:1]
            assert_same(expected, answers)
        assert_nothing_held(engine, server)
    assert server.gauges()["cells_used"] <= 96


# ------------------------------------------------------------------------------------------------------------- ranks


def test_a_rank_that_dies_is_named_and_a_new_engine_takes_over(server: RunningServer, seed: int) -> None:
    with engine_at(server, SHAPE, seed=seed, ranks=2) as engine:
        (cold,) = engine.generate([ASKED])
        pid = engine.rank_pids[1]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankLost) as lost:
            engine.generate([ASKED])
        assert str(lost.value).startswith(f"rank 1 (pid {pid}) has ended")
        assert str(lost.value).endswith("start the engine again")
    with engine_at(server, SHAPE, seed=seed, ranks=2) as engine:
        (served,) = engine.generate([ASKED])
        assert served.hit_tokens == CHUNK * 3
        assert_same(cold, served)
        assert_nothing_held(engine, server)


def test_a_rank_that_fails_says_why(seed: int) -> None:
    with Engine(SHAPE, seed=seed, ranks=2) as engine:
        request = engine.add(ASKED)
        engine._requests[request].tokens[0] = 999_999
        with pytest.raises(RankLost) as lost:
            engine.step()
        assert "IndexError" in str(lost.value)


def test_a_rank_without_a_server_computes(seed: int) -> None:
    with Engine(SHAPE, seed=seed, ranks=2) as two, Engine(SHAPE, seed=seed, processes=True) as one:
        assert_same(two.generate([ASKED]), two.generate([ASKED], salt="x"))
        assert one.generate([ASKED])[0].tokens
    with pytest.raises(ConfigError):
        Engine(SHAPE, ranks=3)


def test_a_process_of_one_rank_computes_what_the_engine_does_itself(seed: int) -> None:
    with Engine(SHAPE, seed=seed) as inside, Engine(SHAPE, seed=seed, processes=True) as outside:
        assert_same(inside.generate([ASKED]), outside.generate([ASKED]))
