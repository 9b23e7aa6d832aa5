"""A config.json that is none, or that no engine could run: said in one line, with what to do."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache.engines.models.describe import describe
from lmcache.engines.models.running import Running
from lmcache.engines.models.source import read_config
from lmcache.errors import ConfigError

CONFIGS = Path(__file__).with_name("configs")
GIVE = "give the config.json of a Hugging Face model, or its folder"


def changed(tmp_path: Path, name: str, **values: Any) -> Path:
    """The config of that name with other values; None leaves a key out."""
    found = json.loads((CONFIGS / name / "config.json").read_text()) | values
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    return path


def complaint(path: Path, running: Running | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        describe(read_config(path), running or Running())
    return str(raised.value)


def test_a_folder_and_its_file_are_the_same(tmp_path: Path) -> None:
    folder = CONFIGS / "llama-3-8b"

    assert read_config(folder) == read_config(folder / "config.json")
    assert read_config(folder).name == "llama-3-8b"
    assert read_config(changed(tmp_path, "llama-3-8b", _name_or_path="meta/Llama-3-8B")).name == "meta/Llama-3-8B"


def test_a_file_that_is_no_config_is_named(tmp_path: Path) -> None:
    broken, listed, binary = (tmp_path / name for name in ("broken.json", "list.json", "binary.json"))
    broken.write_text('{"architectures": [')
    listed.write_text("[1, 2]")
    binary.write_bytes(b"\xff\xfe\x00")

    assert complaint(tmp_path / "none.json") == f"there is no {tmp_path}/none.json; {GIVE}"
    assert complaint(tmp_path) == f"there is no {tmp_path}/config.json; {GIVE}"
    assert complaint(broken).startswith(f"{broken} is not JSON: Expecting value")
    assert complaint(binary).startswith(f"{binary} is not JSON: 'utf-8' codec can't decode")
    assert complaint(listed) == f"{listed} names no architectures; {GIVE}"


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [1]])
def test_a_config_without_architectures_is_named(tmp_path: Path, architectures: object) -> None:
    path = changed(tmp_path, "llama-3-8b", architectures=architectures)

    assert complaint(path) == f"{path} names no architectures; {GIVE}"


def test_an_unknown_architecture_is_named_with_the_known_ones_and_the_other_way(tmp_path: Path) -> None:
    text = complaint(changed(tmp_path, "llama-3-8b", architectures=["NoSuchForCausalLM"]))

    assert text.startswith(f"NoSuchForCausalLM of {tmp_path}/config.json is not among the architectures that are known")
    assert "LlamaForCausalLM, MistralForCausalLM, " in text
    assert text.endswith("; start the engine with the connector and ask the server about it: lmcache geometry --server")
    assert "\n" not in text


@pytest.mark.parametrize("value", [0, -4, "32", 1.5, True, 1 << 40])
def test_a_size_that_is_none_is_named(tmp_path: Path, value: object) -> None:
    path = changed(tmp_path, "llama-3-8b", num_key_value_heads=value)

    assert complaint(path) == f"{path} says num_key_value_heads is {value!r}, which is no size; {GIVE}"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    path = changed(tmp_path, "llama-3-8b", num_hidden_layers=None)
    assert complaint(path) == f"{path} does not say num_hidden_layers; {GIVE}"

    path = changed(tmp_path, "deepseek-v3", kv_lora_rank=None)
    assert complaint(path) == f"{path} does not say kv_lora_rank; {GIVE}"


def test_absurdly_many_layers_are_refused_before_any_is_made(tmp_path: Path) -> None:
    path = changed(tmp_path, "llama-3-8b", num_hidden_layers=100_000)

    assert complaint(path) == f"{path} says num_hidden_layers is 100000, which is absurd; {GIVE}"


def test_lists_that_do_not_cover_the_layers_are_named(tmp_path: Path) -> None:
    path = changed(tmp_path, "qwen3-next-80b-a3b", layer_types=["linear_attention"] * 3)
    assert complaint(path) == f"{path} says layer_types for 3 of 48 layers; {GIVE}"

    path = changed(tmp_path, "qwen3-next-80b-a3b", layer_types="linear_attention")
    assert complaint(path) == f"{path} says layer_types is no list of words; {GIVE}"

    path = changed(tmp_path, "deepseek-v4-like", compress_ratios=[4, "128"])
    assert complaint(path) == f"{path} says compress_ratios is no list of whole numbers; {GIVE}"


def test_layers_of_a_type_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    path = changed(tmp_path, "gemma-3-1b", layer_types=["sliding_attention", "dreaming"] * 13)
    assert complaint(path) == (
        f"{path} has layers of the type 'dreaming', which Gemma3ForCausalLM does not; start the engine and ask it "
        "with --server"
    )

    path = changed(tmp_path, "granite-4.0-h-tiny", layer_types=["mamba"] * 39 + ["dreaming"])
    assert "has layers of the type 'dreaming', which GraniteMoeHybridForCausalLM does not" in complaint(path)

    path = changed(tmp_path, "deepseek-v4-like", compress_ratios=[4] * 42 + [7])
    assert complaint(path) == (
        f"{path} has a layer that compresses 7 tokens into one, which DeepseekV4ForCausalLM cannot; "
        "vLLM takes 0, 1, 4, 128"
    )


def test_windows_that_vllm_would_refuse_are_refused(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 4096}
    path = changed(tmp_path, "qwen2.5-7b", **windows, max_window_layers=21)
    assert complaint(path).startswith(f"{path} has sliding windows from layer 21 on, which vLLM refuses for Qwen2")

    for first, window in ((28, 0), (0, 4096)):
        (group,) = describe(
            read_config(changed(tmp_path, "qwen2.5-7b", **windows, max_window_layers=first)), Running()
        ).geometry.groups
        assert group.window == window


def test_ranks_that_heads_cannot_be_split_over_are_named_with_those_that_work() -> None:
    assert complaint(CONFIGS / "qwen2.5-7b", Running(8)) == (
        "--tensor-parallel-size 8 does not divide the 28 attention heads of qwen2.5-7b; use 1, 2, 4, 7, 14, 28"
    )
    assert complaint(CONFIGS / "granite-4.0-h-tiny", Running(6)) == (
        "--tensor-parallel-size 6 neither divides the 4 KV heads of granite-4.0-h-tiny, nor is it a multiple of them; "
        "use 1, 2, 4, 12"
    )
    assert complaint(CONFIGS / "deepseek-v3", Running(3)).startswith(
        "--tensor-parallel-size 3 does not divide the 128 attention heads of deepseek-v3; use 1, 2, 4, 8, 16"
    )


def test_block_sizes_that_kernels_do_not_take_are_named() -> None:
    assert complaint(CONFIGS / "llama-3-8b", Running(block_size=100)) == (
        "--block-size 100 is not a multiple of 16, which the model's attention kernels take; use 16, 32, 48…, or leave "
        "it to the engine"
    )
    assert complaint(CONFIGS / "glm-5.3", Running(block_size=16)).startswith("--block-size 16 is not a multiple of 64,")
    assert complaint(CONFIGS / "deepseek-v4-like", Running(block_size=64)).startswith(
        "--block-size 64 is not a multiple of 256,"
    )


def test_a_dtype_that_the_kernels_do_not_take_is_named() -> None:
    assert complaint(CONFIGS / "deepseek-v4-like", Running(kv_dtype="bfloat16")) == (
        "--kv-dtype bfloat16: on Hopper GPUs vLLM keeps the KV of DeepseekV4ForCausalLM in FP8 only; use auto or fp8"
    )
    with pytest.raises(ConfigError) as raised:
        Running(kv_dtype="fp7")
    assert str(raised.value) == (
        "--kv-dtype fp7 is unknown; use auto, bfloat16, float16, float32, fp8, fp8_e4m3, fp8_e5m2"
    )


@pytest.mark.parametrize("ranks", [0, -1, 5000])
def test_ranks_that_are_none_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigError) as raised:
        Running(ranks)
    assert str(raised.value) == f"--tensor-parallel-size {ranks} is no number of ranks; 1 to 4096"
