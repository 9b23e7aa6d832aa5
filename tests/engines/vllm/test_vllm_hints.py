"""What requests to a real vLLM say of their chunks in kv_transfer_params: it is done, and no answer changes by it."""

from collections.abc import Iterator
from typing import Any

import pytest
from core_stand import wait_until
from vllm_stand import EngineProcess, ServerProcess, Stand, prompt, same_answer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("llama_stand", "plain")]

CHUNK = 256
QUOTA = 7
"""Chunks, which are cells of 1 MiB here, that each tenant may hold."""


@pytest.fixture(scope="module")
def stand(llama_stand: Stand) -> Iterator[Stand]:
    llama_stand.serve("--chunk-size", str(CHUNK), "--eviction-policy", "lru", "--quota", f"*={QUOTA / 1024}")
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


def ask(engine: EngineProcess, server: ServerProcess, ids: list[int], **said: Any) -> dict[str, Any]:
    """The answer to a request that says this of its chunks. What the engine itself still held is forgotten before."""
    engine.forget()
    params = {f"lmcache.{name}": value for name, value in said.items()}
    more = {"extra_args": {"kv_transfer_params": params}} if said else {}
    [answer] = engine.generate(ids, max_tokens=2, **more)
    server.settle()
    return answer


def cells(server: ServerProcess, tenant: str) -> int:
    return sum(each["cells"] for each in server.quiet()["tenants"] if each["tenant"] == tenant)


def test_a_request_is_charged_to_the_tenant_that_it_names(engine: EngineProcess, server: ServerProcess) -> None:
    ids = prompt(60, 700)
    ask(engine, server, prompt(61, 700))
    ask(engine, server, prompt(62, 700), tenant="other")
    cold = ask(engine, server, ids, tenant="named")
    # whose chunk it is says nothing about who may use it: that is what salts are for
    warm = ask(engine, server, ids, tenant="other")
    assert (cells(server, "named"), cells(server, "other")) == (2, 2)
    assert (cold["cached"], warm["cached"]) == (0, 512)
    assert same_answer(cold, warm)


def test_a_tenant_over_its_quota_keeps_its_newest_prompts_and_others_keep_theirs(
    engine: EngineProcess, server: ServerProcess
) -> None:
    others = prompt(70, 800)
    ask(engine, server, others, tenant="other still")
    prompts = [prompt(seed, 800) for seed in (71, 72, 73)]
    cold = [ask(engine, server, ids, tenant="bounded") for ids in prompts]
    assert cells(server, "bounded") == QUOTA
    warm = [ask(engine, server, ids, tenant="bounded") for ids in reversed(prompts)]
    assert [answer["cached"] for answer in warm] == [768, 768, 256]
    assert all(same_answer(a, b) for a, b in zip(cold, reversed(warm), strict=True))
    assert ask(engine, server, others)["cached"] == 768


def test_what_has_expired_is_a_miss_and_is_answered_right(engine: EngineProcess, server: ServerProcess) -> None:
    ids = prompt(80, 800)
    before = server.settle()
    cold = ask(engine, server, ids, ttl_s=0.5)
    wait_until(lambda: server.settle()["gauges"]["nodes"] == before["gauges"]["nodes"])
    assert server.settle()["counters"]["chunks_expired"] == before["counters"]["chunks_expired"] + 3
    again = ask(engine, server, ids)
    assert (cold["cached"], again["cached"]) == (0, 0)
    assert same_answer(cold, again)
    assert ask(engine, server, ids)["cached"] == 768


def test_a_ttl_of_nothing_is_served_to_nobody_and_one_of_ages_to_everybody(
    engine: EngineProcess, server: ServerProcess
) -> None:
    ids = prompt(81, 800)
    cold = ask(engine, server, ids, ttl_s=0)
    again = ask(engine, server, ids, ttl_s=0)
    longest = 2**64 - 1  # that vLLM takes
    kept = [ask(engine, server, ids, ttl_s=longest) for _ in range(2)]
    assert [answer["cached"] for answer in (cold, again, *kept)] == [0, 0, 0, 768]
    assert same_answer(cold, again)


def test_chunks_of_a_session_that_has_ended_go_before_older_ones(engine: EngineProcess, server: ServerProcess) -> None:
    older, ended, new = (prompt(seed, 800) for seed in (90, 91, 92))
    cold = ask(engine, server, older, tenant="sessions")
    ask(engine, server, ended, tenant="sessions", session_end=True)
    ask(engine, server, new, tenant="sessions")
    kept, gone = ask(engine, server, older, tenant="sessions"), ask(engine, server, ended)
    assert (kept["cached"], gone["cached"]) == (768, 256)
    assert same_answer(cold, kept)


def test_a_session_may_end_with_a_request_that_has_nothing_new_to_store(
    engine: EngineProcess, server: ServerProcess
) -> None:
    older, ended, new = (prompt(seed, 800) for seed in (96, 97, 98))
    ask(engine, server, older, tenant="more sessions")
    ask(engine, server, ended, tenant="more sessions")
    assert ask(engine, server, ended, tenant="more sessions", session_end=True)["cached"] == 768
    ask(engine, server, new, tenant="more sessions")
    assert [ask(engine, server, ids)["cached"] for ids in (older, ended)] == [768, 256]


def test_chunks_of_high_priority_stay_and_those_of_low_priority_go(
    engine: EngineProcess, server: ServerProcess
) -> None:
    high, low, new = (prompt(seed, 800) for seed in (93, 94, 95))
    ask(engine, server, high, tenant="priorities", priority="high")
    ask(engine, server, low, tenant="priorities", priority="low")
    ask(engine, server, new, tenant="priorities")
    assert [ask(engine, server, ids)["cached"] for ids in (high, low, new)] == [768, 256, 768]


WRONG = [
    {"ttl_s": "1h"},
    {"ttl_s": -1},
    {"ttl_s": True},
    {"priority": "urgent"},
    {"tenant": 7},
    {"tenant": "x" * 10_000},
    {"tenant": "\x00\x1b[31m"},
    {"tenant": "\ud800"},
    {"session_end": "yes"},
    {"colour": 3},
]


def test_what_makes_no_sense_is_warned_about_once_and_changes_nothing(
    engine: EngineProcess, server: ServerProcess
) -> None:
    ids = prompt(100, 800)
    log = engine.log
    cold = ask(engine, server, ids)
    before = log.read_text().count("is left out")
    for said in WRONG:
        for _ in range(2):
            warm = ask(engine, server, ids, **said)
            assert warm["cached"] == 768
            assert same_answer(cold, warm)
    warnings = [line for line in log.read_text().splitlines() if "is left out" in line][before:]
    assert len(warnings) == len(WRONG), "\n".join(warnings)
    for said, line in zip(WRONG, warnings, strict=True):
        assert f"lmcache.{next(iter(said))}" in line


def test_names_with_a_meaning_elsewhere_are_names_like_others(engine: EngineProcess, server: ServerProcess) -> None:
    ids = prompt(101, 800)
    cold = ask(engine, server, ids)
    for tenant in ("*", "é" * 256, "a=b", "../../x", "[red]"):
        warm = ask(engine, server, ids, tenant=tenant)
        assert (warm["cached"], same_answer(cold, warm)) == (768, True), repr(tenant)
