"""A real vLLM whose server is away, dies, stops or comes back while requests run: users never notice."""

import signal
import time
from collections.abc import Iterator

import pytest
from vllm_stand import EngineProcess, ServerProcess, Stand, prompt, same_answer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("llama_stand", "plain")]

CHUNK = ("--chunk-size", "256")


@pytest.fixture
def stand(llama_stand: Stand) -> Iterator[Stand]:
    """The shared engine beside a server of the test's own."""
    llama_stand.serve(*CHUNK)
    yield llama_stand
    llama_stand.server.kill()
    llama_stand.engine.forget()


@pytest.fixture
def engine(stand: Stand) -> EngineProcess:
    return stand.engine


@pytest.fixture
def server(stand: Stand) -> ServerProcess:
    return stand.server


def store(engine: EngineProcess, server: ServerProcess, ids: list[int]) -> dict:
    """Have a prompt computed, stored and forgotten by the engine; returns the cold answer."""
    [cold] = engine.generate(ids)
    server.settle()
    engine.forget()
    return cold


def test_without_a_server_an_engine_with_the_connector_answers_as_one_without(
    llama_stand: Stand, plain: EngineProcess
) -> None:
    prompts = [prompt(seed, length) for seed, length in ((50, 300), (51, 1536), (52, 900))]
    expected = plain.generate(*prompts)
    answers = llama_stand.engine.generate(*prompts)
    llama_stand.engine.forget()
    assert [answer["cached"] for answer in answers] == [0, 0, 0]
    assert all(same_answer(a, b) for a, b in zip(expected, answers, strict=True))


def test_chunks_of_256_and_of_1024_cache_what_the_recipe_says_of_5040_tokens(stand: Stand) -> None:
    ids = prompt(40, 5040)
    cached = {}
    for chunk in (256, 1024):
        stand.serve("--chunk-size", str(chunk))
        cold = store(stand.engine, stand.server, ids)
        [warm] = stand.engine.generate(ids)
        stand.engine.forget()
        assert cold["cached"] == 0
        assert same_answer(cold, warm)
        cached[chunk] = warm["cached"]
    assert cached == {256: 4864, 1024: 4096}


def test_a_server_that_refuses_the_engine_is_named_in_its_log_and_costs_only_the_cache(
    llama_stand: Stand, plain: EngineProcess
) -> None:
    ids = prompt(53, 600)
    [expected] = plain.generate(ids)
    llama_stand.server.kill()
    llama_stand.server.start("--chunk-size", "100")
    try:
        end = time.monotonic() + 30
        while "refuses this engine" not in (log := llama_stand.engine.log.read_text()) and time.monotonic() < end:
            time.sleep(0.1)
        assert "chunk size 100 is not a multiple of 128, the tokens per block of KV group 0" in log
        [answer] = llama_stand.engine.generate(ids)
        llama_stand.engine.forget()
        assert answer["cached"] == 0
        assert same_answer(expected, answer)
    finally:
        llama_stand.server.kill()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_server_that_ends_or_stops_while_requests_run_costs_only_the_cache(
    stand: Stand, engine: EngineProcess, server: ServerProcess, plain: EngineProcess, fault: signal.Signals
) -> None:
    prompts = [prompt(seed, 1100) for seed in range(60, 64)]
    expected = plain.generate(*prompts)
    store(engine, server, prompts[0])
    engine.ask("generate", prompts=prompts, max_tokens=8, salt=None)
    time.sleep(0.3)
    server.send(fault)
    answers = engine.answer()
    assert all(same_answer(a, b) for a, b in zip(expected, answers, strict=True))
    engine.forget()
    [alone] = engine.generate(prompts[1])
    assert same_answer(expected[1], alone)
    assert alone["cached"] == 0
    engine.forget()
    stand.serve(*CHUNK)
    store(engine, server, prompts[2])
    [again] = engine.generate(prompts[2])
    assert again["cached"] == 1024
    assert same_answer(expected[2], again)
    server.quiet()


def test_a_stopped_server_that_goes_on_is_used_again(
    stand: Stand, engine: EngineProcess, server: ServerProcess, plain: EngineProcess
) -> None:
    ids = prompt(65, 600)
    [expected] = plain.generate(ids)
    store(engine, server, ids)
    server.send(signal.SIGSTOP)
    [stopped] = engine.generate(ids)
    engine.forget()
    server.send(signal.SIGCONT)
    stand.await_engine()
    [warm] = engine.generate(ids)
    assert (stopped["cached"], warm["cached"]) == (0, 512)
    assert same_answer(expected, stopped)
    assert same_answer(expected, warm)
    server.quiet()


def test_a_server_restarted_at_once_is_found_while_requests_run(
    stand: Stand, engine: EngineProcess, server: ServerProcess, plain: EngineProcess
) -> None:
    prompts = [prompt(seed, 1100) for seed in range(70, 74)]
    expected = plain.generate(*prompts, max_tokens=30)
    engine.ask("generate", prompts=prompts, max_tokens=30, salt=None)
    time.sleep(0.5)
    server.kill()
    server.start(*CHUNK)
    answers = engine.answer()
    assert all(same_answer(a, b) for a, b in zip(expected, answers, strict=True))
    engine.forget()
    stand.await_engine()
    store(engine, server, prompts[0])
    [warm] = engine.generate(prompts[0])
    assert warm["cached"] == 1024
    server.quiet()


GATE = """
import threading
gate, reached, load = threading.Event(), threading.Event(), type(loader)._load
def held(order):
    reached.set()
    gate.wait(60)
    return load(loader, order)
loader._load = held
driver.names.update(gate=gate, reached=reached)
"""
"""Holds every load before its first message to the server, until `gate` is set."""


@pytest.fixture
def gated(engine: EngineProcess) -> Iterator[EngineProcess]:
    engine.run(GATE)
    yield engine
    engine.run("gate.set(); del loader._load")


@pytest.mark.parametrize("restarted", [False, True])
def test_a_server_lost_between_lookup_and_load_leads_to_one_recompute(
    stand: Stand, gated: EngineProcess, server: ServerProcess, *, restarted: bool
) -> None:
    ids = prompt(80, 900)
    cold = store(gated, server, ids)
    gated.call("add", name="lost", ids=ids, max_tokens=8)
    gated.run("while not reached.is_set(): driver.step()")
    server.kill()
    if restarted:
        server.start(*CHUNK)
        stand.await_engine()
    gated.run("gate.set()")
    answer = gated.call("finish")["lost"]
    assert (answer["finish"], answer["cached"]) == ("length", 0)
    assert same_answer(cold, answer)
    if restarted:
        gated.forget()
        [warm] = gated.generate(ids)
        assert warm["cached"] == 768
        server.quiet()


def test_a_server_killed_while_bytes_are_copied_leads_to_one_recompute(
    engine: EngineProcess, server: ServerProcess
) -> None:
    ids = prompt(81, 900)
    cold = store(engine, server, ids)
    engine.run(
        "import os\n"
        "copy = type(loader)._copy_in\n"
        "def killing(*arguments): copy(loader, *arguments); os.kill(victim, 9)\n"
        "loader._copy_in = killing",
        victim=server.pid,
    )
    try:
        [answer] = engine.generate(ids)
    finally:
        engine.run("del loader._copy_in")
    assert (answer["finish"], answer["cached"]) == ("length", 0)
    assert same_answer(cold, answer)


PLANT = {
    "load raises": "loader._load = lambda order: 1 / 0",
    "copy raises": "loader._copy_in = lambda *_: [][0]",
    "ticket did not hold": "Link.confirm = lambda *_: False",
}
UPROOT = "loader.__dict__.pop('_load', None); loader.__dict__.pop('_copy_in', None); Link.confirm = confirm"


@pytest.mark.parametrize("fault", PLANT)
def test_a_load_that_fails_is_recomputed_once_and_not_tried_again(
    engine: EngineProcess, server: ServerProcess, fault: str
) -> None:
    ids = prompt(82, 900)
    cold = store(engine, server, ids)
    before = server.settle()["counters"]["lookups"]
    engine.run("from lmcache.core.link import Link\ndriver.names.update(Link=Link, confirm=Link.confirm)")
    engine.run(PLANT[fault])
    try:
        [answer] = engine.generate(ids)
    finally:
        engine.run(UPROOT)
    assert (answer["finish"], answer["cached"]) == ("length", 0)
    assert same_answer(cold, answer)
    assert server.quiet()["counters"]["lookups"] - before == 1
    engine.forget()
    [warm] = engine.generate(ids)
    assert warm["cached"] == 768
    assert same_answer(cold, warm)
