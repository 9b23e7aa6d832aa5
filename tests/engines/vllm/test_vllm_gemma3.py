"""Gemma 3 on a real vLLM: two groups of a sliding window of 512 tokens, two layers each, and a full one; blocks of 128.

A hit at a chunk's end loads the last 511 tokens of it into the window groups, in whole blocks: 512.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from group_scenarios import (
    SERVER,
    Figures,
    FullCacheScenarios,
    GroupScenarios,
    OwnCacheScenarios,
    SameAnswerScenarios,
    Served,
    figures,
    start,
)
from vllm_stand import Stand, prompt

pytestmark = pytest.mark.vllm

PAGE = 4 * 128 * 2 * 32 * 4
"""Bytes of a block in one layer: heads, tokens, K and V, of 32 floats of 4 bytes."""

BLOCKS = 51
"""One prompt of 2,561 tokens fits; three of 760 do until they grow."""


@pytest.fixture(scope="module")
def stand(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    yield from start(tmp_path_factory.mktemp("gemma3"), models / "gemma3", num_gpu_blocks_override=BLOCKS)


class TestGemma3(GroupScenarios, SameAnswerScenarios, OwnCacheScenarios):
    GROUPS = range(3)
    STARVING = 760, 512
    OWN_HIT = 896
    HITS: ClassVar = {
        # around chunk ends; at least one token is left to compute
        255: 0,
        256: 0,
        257: 256,
        511: 256,
        512: 256,
        513: 512,
        # a window and a block
        639: 512,
        640: 512,
        641: 512,
        # a window and a chunk
        767: 512,
        768: 512,
        769: 768,
        # more than fit in a step
        1023: 768,
        1024: 768,
        1025: 1024,
        2561: 2560,
    }

    def test_chunks_no_longer_than_the_window_store_as_much_as_full_attention_and_load_half(self, stand: Stand) -> None:
        # 10 chunks of 2 blocks in six layers; a hit reads 4 blocks of four layers, and all 20 of two
        expected = Figures(10 * 2 * 6 * PAGE, (4 * 4 + 20 * 2) * PAGE, 2560, 120)
        assert figures(stand, prompt(400, 2561)) == expected


class TestInChunksTwiceAsLongAsTheWindow(Served):
    FLAGS = (*SERVER, "--chunk-size", "1024")

    def test_what_lies_behind_the_window_is_not_stored(self, stand: Stand) -> None:
        # full attention in all layers would store 96 pages, and load them
        expected = Figures(2 * (4 * 4 + 8 * 2) * PAGE, (4 * 4 + 16 * 2) * PAGE, 2048, 64)
        assert figures(stand, prompt(400, 2561)) == expected


class TestInAFullCache(FullCacheScenarios):
    pass
