"""The facts that name a namespace: what must change them, and what must not."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.engines.vllm.identity import digest_files, namespace_facts, weights_identity


def safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


class HfConfig:
    def __init__(self, **entries: Any) -> None:
        self._commit_hash = entries.pop("commit", None)
        self._entries = entries

    def to_dict(self) -> dict[str, Any]:
        return {"hidden_size": 256, "_name_or_path": str(id(self)), "helper": object(), **self._entries}


def vllm_config(model: str = "org/model", load_format: str = "auto", **different: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            hf_config=different.get("hf_config", HfConfig(commit="c0ffee")),
            dtype=different.get("dtype", "torch.float32"),
            quantization=different.get("quantization"),
            max_model_len=different.get("max_model_len", 8192),
        ),
        cache_config=SimpleNamespace(cache_dtype=different.get("cache_dtype", "auto"), kv_cache_layout="LBHNC"),
        load_config=SimpleNamespace(load_format=load_format),
        parallel_config=SimpleNamespace(tensor_parallel_size=different.get("tensor", 1)),
        speculative_config=different.get("speculative"),
        kv_transfer_config=SimpleNamespace(engine_id="this-engine"),
    )


def facts(config: SimpleNamespace, version: str = "0.32.0", weights_id: str = "", backend: str = "CPU_ATTN") -> dict:
    return namespace_facts(config, version, weights_id, {"a": backend, "b": "CPU_ATTN"})


def test_the_same_engine_has_the_same_facts_in_another_process() -> None:
    assert facts(vllm_config()) == facts(vllm_config())


@pytest.mark.parametrize(
    "different",
    [
        {"dtype": "torch.bfloat16"},
        {"quantization": "fp8"},
        {"max_model_len": 4096},
        {"cache_dtype": "fp8"},
        {"tensor": 2},
        {"model": "org/other"},
        {"hf_config": HfConfig(commit="other")},
        {"hf_config": HfConfig(commit="c0ffee", rope_scaling={"factor": 2.0})},
        {
            "speculative": SimpleNamespace(
                draft_model_config=SimpleNamespace(model="org/draft", hf_config=HfConfig(commit="d"))
            )
        },
    ],
    ids=lambda different: next(iter(different)),
)
def test_whatever_changes_the_bytes_changes_the_facts(different: dict[str, Any]) -> None:
    assert facts(vllm_config(**different)) != facts(vllm_config())


def test_another_backend_or_version_changes_the_facts() -> None:
    assert facts(vllm_config(), backend="FLASH_ATTN") != facts(vllm_config())
    assert facts(vllm_config(), version="0.33.0") != facts(vllm_config())


def test_the_users_own_name_for_the_weights_takes_the_place_of_path_and_digest() -> None:
    here, there = vllm_config("/models/a"), vllm_config("/mnt/models/a")
    assert facts(here, weights_id="a-v7") == facts(there, weights_id="a-v7")
    assert facts(here, weights_id="a-v7") != facts(here, weights_id="a-v8")


def test_weights_without_any_identity_are_this_engines_own(caplog: pytest.LogCaptureFixture) -> None:
    for config in (vllm_config(hf_config=HfConfig()), vllm_config(load_format="dummy")):
        assert weights_identity(config, config.model_config, "") == "engine this-engine"
    assert "lmcache.weights_id" in caplog.text


def test_two_seeds_under_one_name_have_two_identities(tmp_path: Path) -> None:
    digests = set()
    for seed in (b"a", b"b"):
        safetensors(tmp_path / "model.safetensors", {"w": b"same" * 5000, "v": seed * 900})
        digests.add(digest_files(tmp_path))
        config = vllm_config(str(tmp_path))
        assert weights_identity(config, config.model_config, "") == f"files {digest_files(tmp_path)}"
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["model.bin", "model.gguf"])
def test_weights_of_other_formats_are_sampled_too(tmp_path: Path, name: str) -> None:
    digests = set()
    for content in (bytes(100_000), bytes(99_999), b"x" * 100_000, b"short"):
        (tmp_path / name).write_bytes(content)
        digests.add(digest_files(tmp_path))
    assert len(digests) == 4


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert digest_files(tmp_path) == ""


def test_empty_tensors_do_no_harm(tmp_path: Path) -> None:
    safetensors(tmp_path / "model.safetensors", {"empty": b"", "one": b"1"})
    assert digest_files(tmp_path)
