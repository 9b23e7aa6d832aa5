"""What models keep of a token, worked out by hand from their published sizes, and the KV groups that this makes."""

from pathlib import Path

import attrs
import pytest

from lmcache.engines.models.describe import Described, describe
from lmcache.engines.models.running import Running
from lmcache.engines.models.source import ModelConfig, read_config
from lmcache.engines.models.table import ARCHITECTURES
from lmcache.geometry.groups import GroupKind, KVGroup

CONFIGS = Path(__file__).with_name("configs")
NAMES = sorted(path.name for path in CONFIGS.iterdir())

FULL, SLIDING, CHUNKED, RECURRENT, SCRATCH = (
    GroupKind.FULL,
    GroupKind.SLIDING_WINDOW,
    GroupKind.CHUNKED_LOCAL,
    GroupKind.RECURRENT,
    GroupKind.SCRATCH,
)


def described(name: str, ranks: int = 1, kv_dtype: str = "auto", block_size: int = 0) -> Described:
    return describe(read_config(CONFIGS / name), Running(ranks, kv_dtype, block_size))


def shape(group: KVGroup) -> tuple[GroupKind, int, int, int, int]:
    """Kind, tokens per block, window, pages in a block, bytes of a block on one rank."""
    return group.kind, group.tokens_per_block, group.window, len(group.page_bytes), group.block_bytes


def shapes(name: str, **running: int) -> list[tuple[GroupKind, int, int, int, int]]:
    return [shape(group) for group in described(name, **running).geometry.groups]


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        # layers × (keys + values) × KV heads × head size × 2 bytes
        ("llama-3-8b", 32 * 2 * 8 * 128 * 2),  # 131,072
        ("llama-3-70b", 80 * 2 * 8 * 128 * 2),  # 327,680
        ("mixtral-8x7b", 32 * 2 * 8 * 128 * 2),
        ("qwen2.5-7b", 28 * 2 * 4 * 128 * 2),  # 57,344
        ("qwen2-57b-a14b", 28 * 2 * 4 * 128 * 2),
        ("qwen3-8b", 36 * 2 * 8 * 128 * 2),  # 147,456
        ("qwen3-30b-a3b", 48 * 2 * 4 * 128 * 2),  # 98,304
        # layers × (compressed vector + rotary key) × 2 bytes
        ("deepseek-v2-lite", 27 * (512 + 64) * 2),  # 31,104
        ("deepseek-v3", 61 * (512 + 64) * 2),  # 70,272
        # and, with an indexer, 128 bytes of FP8 and a scale of 4
        ("deepseek-v3.2", 61 * ((512 + 64) * 2 + 132)),  # 78,324
        ("glm-5.3", 78 * ((512 + 64) * 2 + 132)),  # 100,152
    ],
)
def test_a_token_of_full_attention_takes_what_its_sizes_say(name: str, bytes_per_token: int) -> None:
    (group,) = described(name).geometry.groups

    assert group.kind is FULL
    assert group.block_bytes == bytes_per_token * group.tokens_per_block


def test_llama_3_8b_in_bfloat16_keeps_131072_bytes_a_token_in_blocks_of_16() -> None:
    assert shapes("llama-3-8b") == [(FULL, 16, 0, 32, 131072 * 16)]


def test_a_mistral_has_one_window_in_all_layers() -> None:
    assert shapes("mistral-7b-v0.1") == [(SLIDING, 16, 4096, 32, 131072 * 16)]


def test_gemma_2_alternates_windows_and_full_attention() -> None:
    page = 16 * 2 * 8 * 256 * 2
    assert shapes("gemma-2-9b") == [(SLIDING, 16, 4096, 21, 21 * page), (FULL, 16, 0, 21, 21 * page)]


def test_gemma_3_has_five_windows_for_each_full_layer_and_so_several_groups_of_them() -> None:
    # 62 layers, every sixth full: 10, and 52 with a window, which make 6 groups of at most 10
    page = 16 * 2 * 16 * 128 * 2
    assert shapes("gemma-3-27b") == [
        *[(SLIDING, 16, 1024, 9, 9 * page)] * 4,
        *[(SLIDING, 16, 1024, 8, 8 * page)] * 2,
        (FULL, 16, 0, 10, 10 * page),
    ]
    windows = [number for number in range(62) if number % 6 != 5]
    first = described("gemma-3-27b").groups[0]
    assert [layer.name for layer in first] == [f"model.layers.{n}.self_attn.attn" for n in windows[::6]]


def test_gpt_oss_has_a_window_of_128_in_every_other_layer() -> None:
    page = 16 * 2 * 8 * 64 * 2
    assert shapes("gpt-oss-20b") == [(SLIDING, 16, 128, 12, 12 * page), (FULL, 16, 0, 12, 12 * page)]
    assert shapes("gpt-oss-120b") == [(SLIDING, 16, 128, 18, 18 * page), (FULL, 16, 0, 18, 18 * page)]


def test_llama_4_has_three_chunked_local_layers_for_each_full_one() -> None:
    page = 16 * 2 * 8 * 128 * 2
    assert shapes("llama-4-scout") == [(CHUNKED, 16, 8192, 12, 12 * page)] * 3 + [(FULL, 16, 0, 12, 12 * page)]


def test_glm_5_3_is_one_group_of_64_tokens_a_block_whose_ranks_hold_the_same() -> None:
    (group,) = described("glm-5.3", ranks=8).geometry.groups

    assert shape(group) == (FULL, 64, 0, 2 * 78, 78 * (73728 + 8448))
    assert group.shards == 1


def test_glm_5_2_in_fp8_keeps_packed_latents_and_index_keys_in_some_layers_only() -> None:
    # layers 0, 1, 2, 6, 10, … have an indexer: 21 of 78; vLLM 0.32 has them in one group with the latents
    latent, keys = 64 * 656, 64 * 132
    described_ = described("glm-5.2-fp8", ranks=8, kv_dtype="fp8")
    assert [shape(g) for g in described_.geometry.groups] == [(FULL, 64, 0, 78 + 21, 78 * latent + 21 * keys)]
    leaders = [layer.name for layer in described_.groups[0] if "indexer" in layer.name]
    assert leaders[:5] == [f"model.layers.{n}.self_attn.indexer.k_cache" for n in (0, 1, 2, 6, 10)]


def test_glm_5_3_flash_has_states_latents_with_pooled_index_keys_and_a_tail_that_is_scratch() -> None:
    # a state on one of 8 ranks: 8 heads of 128×128 in float32, and 3 steps of 3 × 8 × 128 channels in bfloat16
    state = 8 * 128 * 128 * 4 + 3 * 3 * 8 * 128 * 2
    assert state == 542720
    # a block of latents must weigh as much, in steps of 16 × 32 tokens: 542,720 / 1,024 bytes → 530 → 1,024 tokens
    latent, keys = 1024 * 512 * 2, 1024 // 16 * 132
    assert shapes("glm-5.3-flash", ranks=8) == [
        *[(RECURRENT, 1024, 0, 9, 9 * state)] * 2,
        *[(RECURRENT, 1024, 0, 8, 8 * state)] * 2,
        (FULL, 1024, 0, 22, 11 * (latent + keys)),
        (SCRATCH, 0, 0, 0, 0),
    ]
    groups = described("glm-5.3-flash", ranks=8)
    assert [group.shards for group in groups.geometry.groups] == [8, 8, 8, 8, 1, 1]
    assert {str(layer.spec) for layer in groups.groups[5]} == {
        "index keys of the pool that is still being filled (kpool tail)"
    }
    assert groups.geometry.block_multiple == 1024
    # on one rank a state weighs 8 times as much: 4,341,760 / 1,024 bytes → 4,240 → 9 steps of 512
    assert described("glm-5.3-flash").geometry.block_multiple == 4608


def test_deepseek_v4_has_windows_compressed_latents_and_what_compresses_them() -> None:
    # 43 layers; 2 have a window only, 21 compress 4 tokens, 20 compress 128
    window, four, index, many = 64 * 584, 64 * 584, 64 * 132, 2 * 584
    states_4, states_index, states_128 = 4 * 2 * 2 * 512 * 4, 4 * 2 * 2 * 128 * 4, 8 * 2 * 512 * 4
    assert shapes("deepseek-v4-like") == [
        (SLIDING, 64, 128, 22, 22 * window),
        (SLIDING, 64, 128, 21, 21 * window),
        (FULL, 256, 0, 62, 21 * (four + index) + 20 * many),
        (SLIDING, 4, 8, 42, 21 * (states_4 + states_index)),
        (SLIDING, 8, 128, 20, 20 * states_128),
    ]
    assert described("deepseek-v4-like", ranks=8).geometry.block_multiple == 256


def test_windows_that_vllm_replays_are_scratch_in_deepseek_v4_1() -> None:
    geometry = described("deepseek-v4.1-like", ranks=4).geometry

    assert [group.kind for group in geometry.groups] == [SCRATCH] * 6 + [FULL, SCRATCH]
    # five layers keep latents of 1 or of 2 tokens, with index keys beside; vLLM does not say that ranks share them
    one, two = 64 * (584 + 132), 32 * (584 + 132)
    assert shape(geometry.groups[6]) == (FULL, 64, 0, 10, one + 4 * two)
    assert geometry.groups[6].shards == 4


def test_qwen3_next_makes_blocks_of_544_tokens_to_hold_a_state() -> None:
    # 32 heads of 128×128 and 3 steps of 8,192 channels, in bfloat16; a token of full attention takes 2,048 bytes
    state = (32 * 128 * 128 + 3 * 8192) * 2
    assert -(-state // (16 * 2048)) * 16 == 544
    assert shapes("qwen3-next-80b-a3b") == [
        *[(RECURRENT, 544, 0, 12, 12 * state)] * 3,
        (FULL, 544, 0, 12, 12 * 544 * 2048),
    ]


@pytest.mark.parametrize(
    ("name", "tokens", "state"),
    [
        # states in float32, as the config says
        ("qwen3.5-like", 528, 32 * 128 * 128 * 4 + 3 * 8192 * 2),
        # 48 heads of 64×128, and 3 steps of 3,072 + 2 × 128 channels, in bfloat16
        ("granite-4.0-h-tiny", 400, (48 * 64 * 128 + 3 * (3072 + 256)) * 2),
        # 128 heads of 64×128 in float32, 3 steps of 8,192 + 2 × 8 × 128 channels in bfloat16
        ("nemotron-h-8b", 1040, 128 * 64 * 128 * 4 + 3 * (8192 + 2048) * 2),
        # 32 heads of 128×128 in float32, 3 steps of 3 × 4,096 channels; blocks of latents in steps of 128
        ("kimi-linear-48b", 1920, 32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2),
    ],
)
def test_other_hybrids_make_their_blocks_as_long_as_a_state_takes(name: str, tokens: int, state: int) -> None:
    groups = described(name).geometry.groups

    assert {group.tokens_per_block for group in groups} == {tokens}
    assert {page for group in groups[:-1] for page in group.page_bytes} == {state}
    assert [group.kind for group in groups] == [RECURRENT] * (len(groups) - 1) + [FULL]


def test_ranks_split_heads_until_there_is_one_and_then_share_it() -> None:
    by_ranks = {ranks: described("llama-3-8b", ranks=ranks).geometry.groups[0] for ranks in (1, 2, 8, 16)}

    assert {ranks: group.block_bytes // 16 for ranks, group in by_ranks.items()} == {
        1: 131072,
        2: 65536,
        8: 16384,
        16: 16384,
    }
    # vLLM does not tell which of 16 ranks hold the same of 8 heads, so all of it is stored
    assert {ranks: group.shards for ranks, group in by_ranks.items()} == {1: 1, 2: 2, 8: 8, 16: 16}


def test_the_kv_dtype_and_the_block_size_are_the_command_lines() -> None:
    assert [described("llama-3-8b", kv_dtype=d).geometry.groups[0].block_bytes // 16 for d in ("fp8", "float32")] == [
        65536,
        262144,
    ]
    assert shapes("llama-3-8b", block_size=128) == [(FULL, 128, 0, 32, 131072 * 128)]
    # latents in FP8: one byte an element; sparse ones in a packed format of 656 bytes
    assert described("deepseek-v3", kv_dtype="fp8").geometry.groups[0].block_bytes == 61 * 64 * 576
    assert described("glm-5.3", kv_dtype="fp8").geometry.groups[0].block_bytes == 78 * 64 * (656 + 132)


def test_a_checkpoint_that_brings_fp8_scales_is_kept_in_fp8() -> None:
    config = read_config(CONFIGS / "llama-3-8b")
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    for quantization in ({"kv_cache_scheme": scheme}, {"quantization": {"kv_cache_quant_algo": "FP8"}}):
        scaled = attrs.evolve(config, values={**config.values, "quantization_config": quantization})
        assert describe(scaled, Running()).geometry.groups[0].block_bytes == 65536 * 16
        assert describe(scaled, Running(kv_dtype="bfloat16")).geometry.groups[0].block_bytes == 131072 * 16
    weights_only = attrs.evolve(config, values={**config.values, "quantization_config": {"quant_method": "fp8"}})
    assert describe(weights_only, Running()).geometry.groups[0].block_bytes == 131072 * 16


def test_layers_that_share_an_indexer_are_found_in_each_way_that_configs_say_it() -> None:
    config = read_config(CONFIGS / "glm-5.2-fp8")

    def indexed(**values: object) -> list[int]:
        base = {key: value for key, value in config.values.items() if not key.startswith("index_topk_freq")}
        groups = describe(attrs.evolve(config, values={**base, **values}), Running()).groups
        return [int(layer.name.split(".")[2]) for layer in groups[0] if "indexer" in layer.name][:4]

    assert indexed() == [0, 1, 2, 3]
    assert indexed(index_topk_freq=2, index_skip_topk_offset=2) == [0, 1, 3, 5]
    assert indexed(index_topk_pattern="FSSF" + "S" * 73 + "F") == [0, 3, 77]
    assert indexed(indexer_types=["full", "shared"] * 39) == [0, 2, 4, 6]


def test_every_architecture_has_a_config_here_and_every_config_is_described() -> None:
    configs = {name: read_config(CONFIGS / name) for name in NAMES}
    twins = {"Glm5NextForCausalLM", "Llama4ForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"}
    twins |= {"Qwen3_5MoeForConditionalGeneration"}

    assert {config.architecture for config in configs.values()} | twins == set(ARCHITECTURES)
    for config in configs.values():
        found = describe(config, Running(2))
        assert [len(group) for group in found.groups] == [
            len(group.page_bytes) if group.cached else len(found.groups[number])
            for number, group in enumerate(found.geometry.groups)
        ]


def test_the_twins_of_an_architecture_are_described_alike() -> None:
    for name, twin in (
        ("glm-5.3-flash", "Glm5NextForCausalLM"),
        ("llama-4-scout", "Llama4ForCausalLM"),
        ("qwen3.5-like", "Qwen3_5MoeForCausalLM"),
        ("gemma-3-27b", "Gemma3ForCausalLM"),
    ):
        config: ModelConfig = read_config(CONFIGS / name)
        other = attrs.evolve(config, architecture=twin)
        assert describe(other, Running()).geometry == describe(config, Running()).geometry
