"""gpt-oss on a real vLLM: a group of a sliding window of 128 tokens and a full one, two layers each; blocks of 128.

The engine's own prefix cache is off, so whatever is found is found in the server. A hit at a chunk's end loads its last
block into the window group: of 256 tokens, each chunk keeps half.
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
    SameAnswerScenarios,
    Served,
    figures,
    start,
)
from vllm_stand import Stand, prompt

pytestmark = pytest.mark.vllm

PAGE = 4 * 128 * 2 * 32 * 4
"""Bytes of a block in one layer: heads, tokens, K and V, of 32 floats of 4 bytes."""

BLOCKS = 34
"""One prompt of 2,816 tokens fits; five of 506 do until they grow."""


@pytest.fixture(scope="module")
def stand(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    yield from start(
        tmp_path_factory.mktemp("gptoss"),
        models / "gptoss",
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=False,
    )


class TestGptOss(GroupScenarios, SameAnswerScenarios):
    GROUPS = range(2)
    STARVING = 506, 256
    HITS: ClassVar = {
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
