"""A policy of somebody else, from `examples/`, named on the command line, serves a real vLLM."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_stand import EngineProcess, ServerProcess, Stand, prompt, same_answer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("llama_stand", "plain")]

PLUGIN = Path(__file__).parents[3] / "examples" / "lmcache-fifo-policy" / "src" / "lmcache_fifo_policy" / "policy.py"
CELLS = 16
"""Of 1 MiB: a chunk of 256 tokens each, so five prompts of three chunks fit."""


@pytest.fixture(scope="module")
def stand(llama_stand: Stand) -> Iterator[Stand]:
    llama_stand.serve(
        *("--chunk-size", "256", "--l1-size-gb", str(CELLS / 1024)),
        *("--plugin", str(PLUGIN), "--eviction-policy", "my-fifo"),
    )
    yield llama_stand
    llama_stand.server.kill()


def ask(stand: Stand, seed: int) -> dict:
    """The answer, when all of it is stored and the engine itself has forgotten the prompt."""
    [answer] = stand.engine.generate(prompt(seed, 800))
    stand.server.settle()
    stand.engine.forget()
    return answer


def test_a_third_partys_policy_serves_the_real_engine_from_an_l1_that_is_full(
    stand: Stand, plain: EngineProcess
) -> None:
    server: ServerProcess = stand.server
    expected = {seed: plain.generate(prompt(seed, 800))[0] for seed in range(200, 210)}
    for seed, answer in expected.items():
        cold = ask(stand, seed)
        assert cold["cached"] == 0
        assert same_answer(answer, cold)
        # first in, first out: that the first prompt is used all the time does not keep it
        again = ask(stand, 200)
        assert same_answer(expected[200], again)
    report = server.quiet()
    assert report["eviction_policy"] == "my-fifo"
    assert report["gauges"]["cells_used"] == CELLS
    assert report["counters"]["chunks_evicted"] > CELLS
    assert report["counters"]["policy_errors"] == 0

    warm = {seed: ask(stand, seed) for seed in (209, 208)}
    assert [answer["cached"] for answer in warm.values()] == [768, 768]
    assert all(same_answer(expected[seed], answer) for seed, answer in warm.items())
    gone = ask(stand, 203)
    assert gone["cached"] < 768
    assert same_answer(expected[203], gone)
    server.quiet()
