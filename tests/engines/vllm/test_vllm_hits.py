"""The main job on a real vLLM: what was computed once is served from the server, and nobody can tell by the answer."""

import signal
import time
from collections.abc import Iterator

import pytest
from vllm_stand import EngineProcess, ServerProcess, Stand, prompt, same_answer

# both engines are there before the module begins, so that they are not taken for something it left behind
pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("llama_stand", "plain")]

CHUNK = 256


@pytest.fixture(scope="module")
def stand(llama_stand: Stand) -> Iterator[Stand]:
    llama_stand.serve("--chunk-size", str(CHUNK))
    yield llama_stand
    llama_stand.server.kill()


@pytest.fixture
def engine(stand: Stand) -> Iterator[EngineProcess]:
    yield stand.engine
    stand.engine.forget()
    stand.server.quiet()


@pytest.fixture
def server(stand: Stand) -> ServerProcess:
    return stand.server


@pytest.mark.parametrize(("length", "least"), [(1535, 1280), (1536, 1280), (1537, 1536), (2600, 2560)])
def test_a_prompt_that_comes_again_is_served_from_the_cache_with_the_same_answer(
    engine: EngineProcess, server: ServerProcess, length: int, least: int
) -> None:
    ids = prompt(length, length)
    [cold] = engine.generate(ids)
    server.settle()
    engine.forget()
    [warm] = engine.generate(ids)
    assert cold["cached"] == 0
    assert least <= warm["cached"] < length
    assert same_answer(cold, warm)
    assert len(set(cold["tokens"])) > 4, "the model repeats itself, so its answers prove little"


def test_a_request_loses_no_step_to_a_lookup_that_is_answered_soon(
    engine: EngineProcess, server: ServerProcess
) -> None:
    be_patient = """
import lmcache.engines.vllm.scheduler as module
result, module.PATIENCE_S = module.PATIENCE_S, seconds
looking._patience = seconds
"""
    usual = engine.run(be_patient, seconds=30)
    server.send(signal.SIGSTOP)
    try:
        engine.call("add", name="new", ids=prompt(900, 300), max_tokens=1)
        engine.ask("step")
        time.sleep(0.1)
        server.send(signal.SIGCONT)
        answers = engine.answer()
    finally:
        server.send(signal.SIGCONT)
        engine.run(be_patient, seconds=usual)
    assert list(answers) == ["new"]
    assert usual <= 0.001


def test_another_salt_misses_and_the_same_one_hits(engine: EngineProcess, server: ServerProcess) -> None:
    ids = prompt(1, 700)
    engine.generate(ids, max_tokens=2)
    for salt in ("a", "b", "a/b@c", "é" * 40, "s" * 128):
        engine.forget()
        [other] = engine.generate(ids, max_tokens=2, salt=salt)
        server.settle()
        engine.forget()
        [same] = engine.generate(ids, max_tokens=2, salt=salt)
        assert (other["cached"], same["cached"]) == (0, 512), salt
        assert same_answer(other, same)


def test_another_first_token_misses(engine: EngineProcess, server: ServerProcess) -> None:
    ids = prompt(2, 1000)
    [cold] = engine.generate(ids)
    server.settle()
    engine.forget()
    [other] = engine.generate([ids[0] + 1, *ids[1:]])
    assert other["cached"] == 0
    assert not same_answer(cold, other), "the model ignores its first token, so a wrong hit would not show"


def test_two_prompts_share_the_chunks_up_to_the_first_difference(engine: EngineProcess, server: ServerProcess) -> None:
    ids = prompt(3, 1300)
    engine.generate(ids)
    server.settle()
    engine.forget()
    [other] = engine.generate([*ids[:1000], *prompt(4, 300)])
    # the fourth chunk holds a token that differs, though most of it does not
    assert other["cached"] == 3 * CHUNK


def test_the_engine_keeps_its_own_hits_and_asks_for_what_is_beyond_them(
    engine: EngineProcess, server: ServerProcess
) -> None:
    ids = prompt(5, 2000)
    [cold] = engine.generate(ids)
    server.settle()
    engine.forget()
    engine.generate(ids[:700])
    [warm] = engine.generate(ids)
    report = server.quiet()
    assert warm["cached"] == 1792
    assert same_answer(cold, warm)
    assert report["gauges"]["pinned_nodes"] == 0


def test_a_prompt_that_the_engine_holds_itself_leaves_no_ticket_behind(
    engine: EngineProcess, server: ServerProcess
) -> None:
    ids = prompt(6, 800)
    answers = [engine.generate(ids, max_tokens=2)[0] for _ in range(12)]
    assert {answer["cached"] for answer in answers[1:]} == {768}
    server.quiet()


def test_prompts_prefilled_in_pieces_are_stored_whole(engine: EngineProcess, server: ServerProcess) -> None:
    before = server.settle()["gauges"]["nodes"]
    prompts = [prompt(seed, length) for seed, length in ((10, 1900), (11, 2345), (12, 1024), (13, 257))]
    cold = engine.generate(*prompts, max_tokens=2)
    assert server.settle()["gauges"]["nodes"] - before == sum(len(ids) // CHUNK for ids in prompts)
    engine.forget()
    warm = engine.generate(*prompts, max_tokens=2)
    assert [answer["cached"] for answer in warm] == [1792, 2304, 896, 256]
    assert all(same_answer(a, b) for a, b in zip(cold, warm, strict=True))


def test_requests_that_run_out_of_blocks_end_with_the_cold_answer(engine: EngineProcess, plain: EngineProcess) -> None:
    prompts = [prompt(seed, 990) for seed in range(20, 25)]
    cold = plain.generate(*prompts, max_tokens=50)
    engine.run(
        "preempted, preempt = [], scheduler._preempt_request\n"
        "scheduler._preempt_request = lambda request, *a, **k: (preempted.append(1), preempt(request, *a, **k))\n"
        "driver.names['preempted'] = preempted"
    )
    warm = engine.generate(*prompts, max_tokens=50)
    assert engine.run("del scheduler._preempt_request; result = len(preempted)") > 0
    assert [answer["tokens"] for answer in warm] == [answer["tokens"] for answer in cold]


def test_a_preempted_request_resumes_with_its_prompt_and_what_it_had_generated(
    engine: EngineProcess, server: ServerProcess, plain: EngineProcess
) -> None:
    ids = prompt(25, 1000)
    [cold] = plain.generate(ids, max_tokens=60)
    before = server.settle()["counters"]["tokens_hit"]
    engine.call("add", name="resumed", ids=ids, max_tokens=60)
    engine.run("while scheduler.requests[list(scheduler.requests)[0]].num_tokens < 1040: driver.step()")
    assert engine.run("result = scheduler.reset_prefix_cache(reset_running_requests=True)")
    answers = engine.call("finish")
    # four chunks, the last of which only sampled tokens have made whole
    assert server.quiet()["counters"]["tokens_hit"] - before == 1024
    assert same_answer(cold, answers["resumed"])


def test_prompt_logprobs_are_computed_and_not_served(engine: EngineProcess, server: ServerProcess) -> None:
    ids = prompt(30, 600)
    [cold] = engine.generate(ids)
    server.settle()
    engine.forget()
    [asked] = engine.generate(ids, prompt_logprobs=1)
    assert asked["cached"] == 0
    assert same_answer(cold, asked)


def test_a_reset_of_the_connector_hides_what_was_stored_before(engine: EngineProcess, server: ServerProcess) -> None:
    ids = prompt(31, 600)
    [cold] = engine.generate(ids)
    server.settle()
    assert engine.call("reset", reset_connector=True)
    [after] = engine.generate(ids)
    server.settle()
    engine.forget()
    [again] = engine.generate(ids)
    # the engine is shared, and other tests want to find what it stores
    engine.run("looking._generation = ''")
    assert (after["cached"], again["cached"]) == (0, 512)
    assert same_answer(cold, again)
