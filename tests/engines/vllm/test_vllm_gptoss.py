"""gpt-oss on a real vLLM: a group of a sliding window of 128 tokens and a full one, two layers each; blocks of 128.

The engine's own prefix cache is off, so whatever is found is found in the server. A hit at a chunk's end loads its last
block into the window group: of 256 tokens, each chunk keeps half.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from group_scenarios import (
    SERVER,
    Figures,
    FullCacheScenarios,
    GroupScenarios,
    Served,
    cached,
    figures,
    start,
    store,
)
from vllm_stand import Stand, prompt, same_answer

pytestmark = pytest.mark.vllm

PAGE = 4 * 128 * 2 * 32 * 4
"""Bytes of a block in one layer: heads, tokens, K and V, of 32 floats of 4 bytes."""

BLOCKS = 34
"""One prompt of 2,816 tokens fits; five of 506 do until they grow."""

HITS = {
    # a window, which is a block: no chunk is whole yet
    127: 0,
    128: 0,
    129: 0,
    # around chunk ends; at least one token is left to compute
    255: 0,
    256: 0,
    257: 256,
    # a window and a chunk
    383: 256,
    384: 256,
    385: 256,
    511: 256,
    512: 256,
    513: 512,
    # more than fit in a step
    1023: 768,
    1024: 768,
    1025: 1024,
    2561: 2560,
}


@pytest.fixture(scope="module")
def stand(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    yield from start(
        tmp_path_factory.mktemp("gptoss"),
        models / "gptoss",
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=False,
    )


class TestGptOss(GroupScenarios):
    GROUPS = range(2)
    STARVING = 506, 256

    def test_the_log_shows_the_groups(self, stand: Stand) -> None:
        assert "group_tokens_per_block=[128, 128], scheduler_block_size=128" in stand.engine.log.read_text()

    @pytest.mark.parametrize(("length", "hit"), HITS.items())
    def test_a_prompt_that_comes_again_is_served_with_the_same_answer(
        self, stand: Stand, length: int, hit: int
    ) -> None:
        ids = prompt(length, length)
        [cold] = store(stand, ids)
        [warm] = stand.engine.generate(ids)
        assert cached([cold, warm]) == [0, hit]
        assert same_answer(cold, warm)
        assert len(set(cold["tokens"])) > 4, "the model repeats itself, so its answers prove little"

    def test_what_lies_behind_the_window_is_not_stored(self, stand: Stand) -> None:
        # full attention in all four layers would store 80 pages, and load them
        expected = Figures(10 * (1 * 2 + 2 * 2) * PAGE, (1 * 2 + 20 * 2) * PAGE, 2560, 60)
        assert figures(stand, prompt(400, 2561)) == expected


class TestInChunksEightTimesAsLongAsTheWindow(Served):
    FLAGS = (*SERVER, "--chunk-size", "1024")

    def test_what_lies_behind_the_window_is_not_stored(self, stand: Stand) -> None:
        # full attention in all layers would store 64 pages, and load them
        expected = Figures(2 * (1 * 2 + 8 * 2) * PAGE, (1 * 2 + 16 * 2) * PAGE, 2048, 36)
        assert figures(stand, prompt(400, 2561)) == expected


class TestInAFullCache(FullCacheScenarios):
    BRANCHES = 12
