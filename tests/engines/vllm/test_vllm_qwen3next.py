"""Qwen3-Next on a real vLLM, in bfloat16: three recurrent groups (gated delta net) and a full one; blocks of 256.

A hit can end only where there is a state snapshot. vLLM keeps one of a prompt, at the last block end that leaves a
token to compute, and one where it sees that prompts part (its `--prefix-cache-retention-interval`, 0 unless set).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from group_scenarios import (
    SERVER,
    Figures,
    FullCacheScenarios,
    GroupScenarios,
    OwnCacheScenarios,
    cached,
    figures,
    forget,
    start,
    store,
)
from vllm_stand import EngineProcess, Stand, prompt

pytestmark = pytest.mark.vllm

PAGE = 4 * 256 * 2 * 32 * 2
"""Bytes of a block of the full layer: heads, tokens, K and V, of 32 floats of 2 bytes."""
SNAPSHOT = 71_680
"""Bytes of the state of one recurrent layer."""

BLOCKS = 25
"""One prompt of 2,816 tokens fits; five of 506 do until they grow."""

HITS = {
    255: 0,
    256: 0,
    257: 256,
    511: 256,
    512: 256,
    513: 512,
    768: 512,
    769: 768,
    1023: 768,
    1024: 768,
    1025: 1024,
    1537: 1536,
}


@pytest.fixture(scope="module")
def stand(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    yield from start(
        tmp_path_factory.mktemp("qwen3next"),
        models / "qwen3next",
        num_gpu_blocks_override=BLOCKS,
        dtype="bfloat16",
        # left to itself, vLLM keeps states in float32 on CPUs that compute in bfloat16, and blocks are longer there
        mamba_ssm_cache_dtype="bfloat16",
    )


class TestQwen3Next(GroupScenarios, OwnCacheScenarios):
    BLOCK = 256
    GROUPS = range(4)
    STARVING = 506, 256
    PREFIXES = ((1100, 1024), (1000, 0), (700, 0), (300, 0))
    RESUMED = 512
    ROUNDS_ALIKE = False
    OWN_HIT = 768

    def right_turns(self, engine: EngineProcess, prompts: list[list[int]]) -> list[dict]:
        # with the engine's own cache: in bfloat16 a state that was kept is another than one that is computed on
        forget(engine)
        return [engine.call("without_cache", prompts=[ids], max_tokens=8)[0] for ids in prompts]

    @pytest.mark.parametrize(("length", "hit"), HITS.items())
    def test_a_prompt_that_comes_again_is_served_with_the_answer_of_the_engines_own_cache(
        self, stand: Stand, length: int, hit: int
    ) -> None:
        ids = prompt(length, length)
        [cold] = store(stand, ids)
        [warm] = store(stand, ids)
        stand.engine.call("without_cache", prompts=[ids], max_tokens=1)
        [own] = stand.engine.call("without_cache", prompts=[ids], max_tokens=8)
        assert cached([cold, warm, own]) == [0, hit, hit]
        assert (warm["tokens"], warm["logprobs"]) == (own["tokens"], own["logprobs"])
        assert len(set(cold["tokens"])) > 4, "the model repeats itself, so its answers prove little"

    def test_a_prompt_that_ends_between_snapshots_hits_the_one_before(self, stand: Stand) -> None:
        ids = prompt(401, 1400)
        store(stand, ids)
        hits = {}
        # each of them leaves a snapshot at a last block end of its own
        for length in (1280, 1281, 769, 768):
            [answer] = store(stand, ids[:length])
            hits[length] = answer["cached"]
        assert hits == {1280: 0, 1281: 1280, 769: 0, 768: 0}
        assert cached(store(stand, ids[:768], ids[:769], ids[:1280])) == [512, 768, 1024]

    @pytest.mark.parametrize("budget", [130, 300, 1000])
    def test_an_engine_that_keeps_more_snapshots_hits_at_each_of_them(self, stand: Stand, budget: int) -> None:
        # as with --prefix-cache-retention-interval 256: where a step ends at a block's end
        engine, ids = stand.engine, prompt(2000 + budget, 1100)
        normal = engine.call("budget", tokens=budget)
        engine.run("coordinator = scheduler.kv_cache_manager.coordinator; coordinator.retention_interval = 256")
        try:
            store(stand, ids)
            hits = [cached(store(stand, ids[:length]))[0] for length in (1100, 1000, 700, 300)]
        finally:
            engine.run("scheduler.kv_cache_manager.coordinator.retention_interval = 0")
            engine.call("budget", tokens=normal)
        assert hits == ([1024, 768, 0, 0] if budget == 1000 else [1024, 768, 512, 256])

    def test_one_snapshot_is_stored_and_no_bytes_of_the_states_before_it(self, stand: Stand) -> None:
        # full attention in all four layers would store 24 pages, and load them
        expected = Figures(6 * PAGE + 3 * SNAPSHOT, 6 * PAGE + 3 * SNAPSHOT, 1536, 6 + 3)
        assert figures(stand, prompt(400, 1537)) == expected


class TestInAFullCache(FullCacheScenarios):
    FLAGS = (*SERVER, "--l1-size-gb", "0.004")
    BRANCHES = 6
    ENDS_AT_SNAPSHOTS = True
