"""Speculative decoding on a real vLLM, with its n-gram proposer: same answers, same hits, and no draft is stored."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_stand import SHARED_ENGINE, EngineProcess, Stand, prompt, same_answer

pytestmark = pytest.mark.vllm

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
"""Nearly every sampled token occurs in a prompt of 1,000, so that nearly every step has drafts."""

COUNT = """
counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, 'value')}
result = [counters[f'vllm:spec_decode_num_{what}_tokens'] for what in ('draft', 'accepted')]
"""

PROMPTS = {"random": prompt(500, 1000), "repetitive": [7, 8, 9, 10] * 250}


@pytest.fixture(scope="module")
def stand(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(
        tmp_path_factory.mktemp("speculation"),
        models / "llama",
        clients=2,
        num_gpu_blocks_override=60,
        speculative_config=NGRAM,
        **SHARED_ENGINE,
    )
    try:
        stand.serve("--chunk-size", "256")
        stand.start_engine()
        stand.await_engine()
        yield stand
    finally:
        stand.close()


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_prompt_is_stored_and_served_as_without_drafts(stand: Stand, plain: EngineProcess, kind: str) -> None:
    engine, ids = stand.engine, PROMPTS[kind]
    [expected] = plain.generate(ids, max_tokens=60)
    before = engine.run(COUNT)
    stored = stand.server.settle()["gauges"]["nodes"]
    [cold] = engine.generate(ids, max_tokens=60)
    drafted, accepted = (after - earlier for after, earlier in zip(engine.run(COUNT), before, strict=True))
    assert drafted > 30
    assert accepted < drafted, "nothing was refused, so nothing could be stored wrongly"
    assert kind == "random" or accepted > 0
    # 1,059 tokens are computed, and drafts that were refused
    assert stand.server.settle()["gauges"]["nodes"] - stored == 4
    engine.call("wipe")
    [warm] = engine.generate(ids, max_tokens=60)
    engine.call("wipe")
    # the next turn hits the chunk that sampled tokens have made whole, step by step, beside drafts
    turn = [*ids, *cold["tokens"], *prompt(501, 50)]
    [next_expected] = plain.generate(turn)
    [next_warm] = engine.generate(turn)
    engine.call("wipe")
    assert [answer["cached"] for answer in (cold, warm, next_warm)] == [0, 768, 1024]
    assert same_answer(expected, cold)
    assert same_answer(expected, warm)
    assert same_answer(next_expected, next_warm)
    stand.server.quiet()
