"""Models that no CPU runs, by their bytes: vLLM's own specs, groups, scheduler and views, our connector, a live server.

Pages hold a pattern in place of KV, see `spec_engine`. A prompt is stored; then all memory is wiped with poison and
the prompt is submitted again, to its full length and to shorter ones. What must be restored is there byte for byte, in
other blocks; everything else, null block, scratch, padding and what lies behind windows included, is still poison.
"""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from spec_stand import GEOMETRIES, SpecProcess
from vllm_stand import ServerProcess

from lmcache.plugins.testing.ports import free_port

pytestmark = pytest.mark.vllm

Blocks = Mapping[int, range]
"""For each KV group that a load writes to: block numbers of the sequence."""


def tokens(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 1000) for _ in range(length)]


@attrs.frozen
class Case:
    """One model: its engine, the prompt that is stored, and what later prompts find of it."""

    pool: dict[str, Any]
    prompt: int
    """Tokens."""
    steps: list[int]
    """Where the steps of its prefill end."""
    shards: int
    """Objects' shards stored."""
    found: dict[int, tuple[int, Blocks]]
    """For prompts of so many of its tokens: the hit, and what is loaded for it."""
    branches: dict[int, tuple[int, Blocks]] = attrs.field(factory=dict)
    """The same for prompts that share so many tokens with it and go on otherwise."""


CASES = {
    # 256 tokens a chunk; an exact multiple leaves the last block, for one token must be computed
    "glm_5_3": Case(
        {"blocks": 18, "longest": 896, "budget": 896, "ranks": 2},
        prompt=773,
        steps=[773],
        shards=3,
        found={
            255: (0, {}),
            256: (192, {0: range(3)}),
            257: (256, {0: range(4)}),
            512: (448, {0: range(7)}),
            513: (512, {0: range(8)}),
            768: (704, {0: range(11)}),
            773: (768, {0: range(12)}),
        },
        branches={511: (256, {0: range(4)}), 512: (512, {0: range(8)})},
    ),
    "glm_5_3_in_kernel_blocks": Case(
        {"blocks": 12, "longest": 896, "budget": 896},
        prompt=773,
        steps=[773],
        shards=3,
        found={256: (128, {0: range(1)}), 257: (256, {0: range(2)}), 773: (768, {0: range(6)})},
    ),
    "glm_5_3_flash": Case(
        {"blocks": 22, "longest": 3072, "budget": 1024, "retention": 1024},
        prompt=2060,
        steps=[1024, 2048, 2060],
        shards=10,
        found={
            1024: (0, {}),
            1025: (1024, dict.fromkeys(range(5), range(1))),
            2048: (1024, dict.fromkeys(range(5), range(1))),
            2060: (2048, dict.fromkeys(range(4), range(1, 2)) | {4: range(2)}),
        },
        branches={1030: (1024, dict.fromkeys(range(5), range(1)))},
    ),
    "glm_5_2_fp8": Case(
        {"blocks": 18, "longest": 896, "budget": 896},
        prompt=773,
        steps=[773],
        shards=3,
        found={
            256: (192, {0: range(3)}),
            257: (256, {0: range(4)}),
            512: (448, {0: range(7)}),
            773: (768, {0: range(12)}),
        },
    ),
    # full groups of different block sizes: hits end where both have whole blocks
    "glm_5_2_fp8_apart": Case(
        {"blocks": 24, "longest": 1024, "budget": 1024},
        prompt=773,
        steps=[773],
        shards=6,
        found={
            256: (0, {}),
            257: (256, {0: range(4), 1: range(1)}),
            512: (256, {0: range(4), 1: range(1)}),
            773: (768, {0: range(12), 1: range(3)}),
        },
        branches={600: (512, {0: range(8), 1: range(2)})},
    ),
    # windows of 128 tokens in blocks of 64 and of 8, and one of 8 tokens in blocks of 4
    "deepseek_v4": Case(
        {"blocks": 220, "longest": 1024, "budget": 256},
        prompt=773,
        steps=[256, 512, 768, 773],
        shards=15,
        found={
            256: (0, {}),
            257: (256, {0: range(2, 4), 1: range(2, 4), 2: range(1), 3: range(16, 32), 4: range(62, 64)}),
            512: (256, {0: range(2, 4), 1: range(2, 4), 2: range(1), 3: range(16, 32), 4: range(62, 64)}),
            773: (768, {0: range(10, 12), 1: range(10, 12), 2: range(3), 3: range(80, 96), 4: range(190, 192)}),
        },
        branches={
            520: (512, {0: range(6, 8), 1: range(6, 8), 2: range(2), 3: range(48, 64), 4: range(126, 128)}),
        },
    ),
    # windows and rings are rebuilt by vLLM, so only the compressed caches are restored
    "deepseek_v4_1": Case(
        {"blocks": 170, "longest": 1024, "budget": 256},
        prompt=773,
        steps=[256, 512, 768, 773],
        shards=3,
        found={
            256: (0, {}),
            257: (256, {0: range(1)}),
            512: (256, {0: range(1)}),
            773: (768, {0: range(3)}),
        },
    ),
    "gpt_oss_120b": Case(
        {"blocks": 150, "longest": 1024, "budget": 1024},
        prompt=773,
        steps=[773],
        shards=6,
        found={
            256: (0, {}),
            257: (256, {0: range(8, 16), 1: range(16)}),
            512: (256, {0: range(8, 16), 1: range(16)}),
            513: (512, {0: range(24, 32), 1: range(32)}),
            773: (768, {0: range(40, 48), 1: range(48)}),
        },
        branches={300: (256, {0: range(8, 16), 1: range(16)}), 700: (512, {0: range(24, 32), 1: range(32)})},
    ),
    # a window of 1,024 tokens is made of the tails of four chunks
    "gemma_3_27b": Case(
        {"blocks": 760, "longest": 1664, "budget": 700},
        prompt=1541,
        steps=[700, 1400, 1541],
        shards=42,
        found={
            256: (0, {}),
            257: (256, dict.fromkeys(range(7), range(16))),
            1025: (1024, dict.fromkeys(range(7), range(64))),
            1281: (1280, dict.fromkeys(range(6), range(16, 80)) | {6: range(80)}),
            1541: (1536, dict.fromkeys(range(6), range(32, 96)) | {6: range(96)}),
        },
        branches={1300: (1280, dict.fromkeys(range(6), range(16, 80)) | {6: range(80)})},
    ),
    "qwen3_next_80b": Case(
        {"blocks": 30, "longest": 2176, "budget": 544, "retention": 544},
        prompt=1640,
        steps=[544, 1088, 1632, 1640],
        shards=12,
        found={
            544: (0, {}),
            545: (544, dict.fromkeys(range(4), range(1))),
            1088: (544, dict.fromkeys(range(4), range(1))),
            1089: (1088, dict.fromkeys(range(3), range(1, 2)) | {3: range(2)}),
            1640: (1632, dict.fromkeys(range(3), range(2, 3)) | {3: range(3)}),
        },
        branches={1100: (1088, dict.fromkeys(range(3), range(1, 2)) | {3: range(2)})},
    ),
    # a state at every block's end, whatever the steps
    "hybrid_with_all_states": Case(
        {"blocks": 30, "longest": 2176, "budget": 2176},
        prompt=1640,
        steps=[1640],
        shards=12,
        found={
            545: (544, dict.fromkeys(range(4), range(1))),
            1100: (1088, dict.fromkeys(range(3), range(1, 2)) | {3: range(2)}),
            1640: (1632, dict.fromkeys(range(3), range(2, 3)) | {3: range(3)}),
        },
    ),
    # spans of 512 tokens: a hit that ends with one reads nothing of it
    "llama_4_in_short_spans": Case(
        {"blocks": 400, "longest": 1392, "budget": 700},
        prompt=1300,
        steps=[700, 1300],
        shards=20,
        found={
            257: (256, dict.fromkeys(range(4), range(16))),
            513: (512, {3: range(32)}),
            769: (768, dict.fromkeys(range(3), range(32, 48)) | {3: range(48)}),
            1300: (1280, dict.fromkeys(range(3), range(64, 80)) | {3: range(80)}),
        },
        branches={1200: (1024, {3: range(64)})},
    ),
    # eight ranks with bytes of their own
    "llama_70b": Case(
        {"blocks": 40, "longest": 528, "budget": 528},
        prompt=517,
        steps=[517],
        shards=16,
        found={
            256: (240, {0: range(15)}),
            257: (256, {0: range(16)}),
            512: (496, {0: range(31)}),
            517: (512, {0: range(32)}),
        },
    ),
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecProcess]:
    process = SpecProcess(tmp_path_factory.mktemp("driver"))
    yield process
    process.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """It is told no chunk size: each geometry has its default."""
    process = ServerProcess(free_port(), tmp_path / "server.log")
    process.start()
    yield process
    process.kill()


def check(found: dict[str, Any], expected: tuple[int, Blocks], groups: int, what: str) -> None:
    hit, blocks = expected
    assert found["hit"] == hit, what
    wanted = [list(blocks.get(group, ())) for group in range(groups)]
    for rank, seen in enumerate(found["ranks"]):
        assert seen["wrong"] == [], f"{what}, rank {rank}"
        assert seen["restored"] == wanted, f"{what}, rank {rank}"
        # blocks are dealt at random, so a few may come to lie where they were
        assert seen["stayed"] <= 1 + sum(map(len, wanted)) // 4, f"{what}, rank {rank}"


@pytest.mark.parametrize("model", GEOMETRIES)
def test_groups_of_vllm_are_described_by_kind_block_window_and_pages(driver: SpecProcess, model: str) -> None:
    pool = {key: value for key, value in CASES[model].pool.items() if key != "ranks"}
    driver.call("open", model=model, port=0, **pool)
    expected = GEOMETRIES[model]
    assert driver.call("describe") == {
        "log": f"group_tokens_per_block={[group.tokens_per_block for group in expected.groups]}",
        "ranks": expected.ranks,
        "alignment": expected.alignment,
        "groups": [
            [group.kind.value, group.tokens_per_block, group.window, group.shards, list(group.page_bytes)]
            for group in expected.groups
        ],
    }


@pytest.mark.parametrize("model", CASES)
def test_bytes_come_back_where_a_hit_needs_them_and_nowhere_else(
    driver: SpecProcess, server: ServerProcess, model: str
) -> None:
    case, groups = CASES[model], len(GEOMETRIES[model].groups)
    prompt = tokens(1, case.prompt)
    driver.call("open", model=model, port=server.port, **case.pool)
    assert driver.call("prefill", tokens=prompt) == {"steps": case.steps}
    assert server.quiet()["counters"]["shards_committed"] == case.shards
    for length, expected in case.found.items():
        check(driver.call("recall", tokens=prompt[:length]), expected, groups, f"{length} tokens")
    for shared, expected in case.branches.items():
        other = prompt[:shared] + tokens(2, case.prompt - shared)
        check(driver.call("recall", tokens=other), expected, groups, f"{shared} tokens shared")
    driver.call("close")
    server.quiet()


def test_ranks_that_hold_the_same_latents_and_states_of_their_own_load_both(
    driver: SpecProcess, server: ServerProcess
) -> None:
    # GLM-5.3-Flash on two ranks: one shard of the sparse layers, two of the linear ones
    prompt = tokens(1, 1030)
    pool = {"blocks": 20, "longest": 1088, "budget": 1024, "retention": 1024}
    driver.call("open", model="glm_5_3_flash", port=server.port, ranks=2, **pool)
    driver.call("prefill", tokens=prompt)
    assert server.quiet()["counters"]["shards_committed"] == 4 * 2 + 1
    check(driver.call("recall", tokens=prompt), (1024, dict.fromkeys(range(5), range(1))), 6, "two ranks")
    driver.call("close")


@pytest.mark.parametrize("model", ["deepseek_v4", "qwen3_next_80b"])
def test_pages_that_go_through_buffers_come_back_the_same(
    driver: SpecProcess, server: ServerProcess, model: str
) -> None:
    case = CASES[model]
    prompt = tokens(1, case.prompt)
    driver.call("open", model=model, port=server.port, **case.pool | {"staging": True})
    driver.call("prefill", tokens=prompt)
    expected = case.found[case.prompt]
    check(driver.call("recall", tokens=prompt), expected, len(GEOMETRIES[model].groups), "through buffers")
    driver.call("close")


@pytest.mark.parametrize(("retention", "hit"), [(0, 0), (544, 544)])
def test_only_snapshots_that_vllm_keeps_are_stored(
    driver: SpecProcess, server: ServerProcess, retention: int, hit: int
) -> None:
    # by default vLLM keeps the state at a prompt's end only: a prompt that shares less finds none
    case = CASES["qwen3_next_80b"]
    prompt = tokens(1, case.prompt)
    driver.call("open", model="qwen3_next_80b", port=server.port, **case.pool | {"retention": retention})
    driver.call("prefill", tokens=prompt)
    assert driver.call("recall", tokens=prompt[:1640])["hit"] == 1632
    assert driver.call("recall", tokens=prompt[:600])["hit"] == hit
    driver.call("close")


@pytest.mark.parametrize(
    ("model", "staging", "blocks"),
    [
        ("glm_5_2_fp8", False, {0: range(4, 12)}),
        # 288 tokens: the load begins inside a chunk
        ("gpt_oss_120b", False, {0: range(40, 48), 1: range(18, 48)}),
        ("gpt_oss_120b", True, {0: range(40, 48), 1: range(18, 48)}),
    ],
)
def test_what_vllm_holds_itself_is_not_loaded(
    driver: SpecProcess, server: ServerProcess, model: str, staging: bool, blocks: Blocks
) -> None:
    case = CASES[model]
    prompt = tokens(1, case.prompt)
    driver.call("open", model=model, port=server.port, **case.pool | {"staging": staging})
    driver.call("prefill", tokens=prompt)
    driver.call("recall", tokens=tokens(3, 100))  # forgets the prompt
    driver.call("prefill", tokens=prompt[:300])
    check(driver.call("recall", tokens=prompt, forget=False), (768, blocks), len(GEOMETRIES[model].groups), model)
    driver.call("close")


def test_a_class_that_derives_from_full_attention_and_that_nobody_classified_is_refused(driver: SpecProcess) -> None:
    message = driver.call("refusal")
    assert "SkippingSpec of layer model.layers.0.attn (KV group 0)" in message
    assert "lmcache_classify_kv_spec" in message
