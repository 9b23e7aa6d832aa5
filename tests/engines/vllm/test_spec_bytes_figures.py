"""The figures of docs/kv-groups.md, computed from the geometries that `test_spec_bytes` finds in vLLM."""

from pathlib import Path

import pytest
from spec_stand import GEOMETRIES, default_chunk, full_bytes, loaded_bytes, stored_bytes

PAGE = Path(__file__).parents[3] / "docs" / "kv-groups.md"
LONG = 32768
"""Tokens of the prompt whose hit is read; less what is no whole chunk."""

NAMES = {
    "glm_5_3": "GLM-5.3",
    "glm_5_3_flash": "GLM-5.3-Flash, a rank of TP 8",
    "glm_5_2_fp8": "GLM-5.2-FP8",
    "glm_5_2_fp8_apart": "GLM-5.2-FP8, indexer apart",
    "deepseek_v4": "DeepSeek-V4",
    "deepseek_v4_1": "DeepSeek-V4.1",
    "gpt_oss_120b": "gpt-oss-120b",
    "gemma_3_27b": "Gemma 3 27B, a rank of TP 8",
    "qwen3_next_80b": "Qwen3-Next 80B, a rank of TP 2",
    "llama_70b": "Llama 70B, eight ranks of TP 8",
}


def row(model: str) -> str:
    geometry, chunk = GEOMETRIES[model], default_chunk(model)
    hit = LONG // chunk * chunk
    stored, read = stored_bytes(geometry, chunk), loaded_bytes(geometry, chunk, hit)
    cells = [
        NAMES[model],
        f"`{[group.tokens_per_block for group in geometry.groups]}`",
        f"{chunk:,}",
        f"{stored / 2**20:.1f} MiB",
        f"{stored / full_bytes(geometry, chunk):.0%}".replace("%", " %"),
        f"{hit:,}",
        f"{read / 2**20:,.0f} MiB",
        f"{read / full_bytes(geometry, hit):.0%}".replace("%", " %"),
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("model", NAMES)
def test_the_docs_have_the_figures_of_each_model(model: str) -> None:
    assert row(model) in PAGE.read_text().splitlines()


def test_every_model_but_its_variants_is_in_the_docs() -> None:
    variants = {"glm_5_3_in_kernel_blocks", "hybrid_with_all_states", "llama_4_in_short_spans"}
    assert GEOMETRIES.keys() - NAMES.keys() == variants
    table = PAGE.read_text().partition("| model |")[2].partition("\n\n")[0].splitlines()
    assert len(table) == 2 + len(NAMES)


def test_a_chunk_longer_than_gemmas_window_stores_the_share_that_the_docs_name() -> None:
    gemma = GEOMETRIES["gemma_3_27b"]
    assert f"stores {stored_bytes(gemma, 2048) / full_bytes(gemma, 2048):.0%}".replace("%", " %") in PAGE.read_text()


def test_hand_worked_bytes_are_those_computed() -> None:
    # 78 layers of 576 values in two bytes and of 132 bytes, 256 tokens
    assert stored_bytes(GEOMETRIES["glm_5_3"], 256) == 78 * 256 * (576 * 2 + 132)
    # 18 layers keep 128 of 256 tokens, 18 all; 8 heads of 64, keys and values in two bytes
    assert stored_bytes(GEOMETRIES["gpt_oss_120b"], 256) == 18 * (128 + 256) * 8 * 64 * 2 * 2
    assert loaded_bytes(GEOMETRIES["gpt_oss_120b"], 256, LONG) == 18 * (128 + LONG) * 8 * 64 * 2 * 2
    # one state of 36 layers, whatever the length: 16 heads of 128 × 128 values and 4,096 channels of 3, two bytes each
    state = 36 * 2 * (16 * 128 * 128 + 4096 * 3)
    assert loaded_bytes(GEOMETRIES["qwen3_next_80b"], 544, 5440) == state + 12 * 5440 * 256 * 2 * 2
