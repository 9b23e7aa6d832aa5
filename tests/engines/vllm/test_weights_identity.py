"""The facts that name a namespace: what must change them, and what must not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weights_folders import begins_later, safetensors

from lmcache.core.keys import namespace_digest
from lmcache.engines.vllm import identity
from lmcache.engines.vllm.describe import PageView
from lmcache.engines.vllm.identity import device_facts, namespace_facts, page_facts, weights_identity


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process began after all files were written, as an engine's does."""
    monkeypatch.setattr(identity, "process_beginning", begins_later)


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
        cache_config=SimpleNamespace(
            cache_dtype=different.get("cache_dtype", "auto"),
            kv_cache_layout=different.get("layout", "LBHNC"),
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype=different.get("state_dtype", "auto"),
            mamba_cache_mode=different.get("state_mode", "none"),
        ),
        attention_config=SimpleNamespace(indexer_kv_dtype=different.get("indexer_dtype", "auto")),
        load_config=SimpleNamespace(load_format=load_format),
        parallel_config=SimpleNamespace(tensor_parallel_size=different.get("tensor", 1)),
        speculative_config=different.get("speculative"),
        kv_transfer_config=SimpleNamespace(engine_id="this-engine"),
        lora_config=different.get("lora"),
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
        {"layout": "LBNHC"},
        {"state_dtype": "float32"},
        {"state_mode": "align"},
        {"indexer_dtype": "fp8"},
        {"load_format": "bitsandbytes"},
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


@pytest.mark.parametrize(
    "other", ["org/model-SEP-name", "org/model%2Fname", "org/model\\name", "org/../org/model/name"]
)
def test_names_that_some_file_systems_take_for_one_are_two(other: str) -> None:
    one, two = (namespace_digest(facts(vllm_config(name))) for name in ("org/model/name", other))
    assert one != two


def view(page_bytes: int = 4096, kernel_blocks: int = 1) -> PageView:
    return PageView(0, page_bytes, page_bytes, kernel_blocks)


def pages(
    dtype: str = "torch.float32",
    shape: tuple[int, ...] = (9, 4, 16, 64),
    strides: tuple[int, ...] = (4096, 1024, 64, 1),
):
    return SimpleNamespace(dtype=dtype, shape=shape, stride=lambda: strides)


@pytest.mark.parametrize(
    ("tensor", "page"),
    [
        (pages("torch.bfloat16"), view()),
        (pages(shape=(9, 16, 4, 64)), view()),
        (pages(strides=(4096, 64, 256, 1)), view()),
        (pages(), view(kernel_blocks=2)),
        (pages(), view(page_bytes=8192)),
    ],
    ids=["type", "axes", "order of axes", "kernel blocks", "page size"],
)
def test_pages_that_are_read_in_another_way_change_the_facts(tensor: Any, page: PageView) -> None:
    assert page_facts([page], [tensor]) != page_facts([view()], [pages()])


def test_how_many_pages_there_are_does_not_change_the_facts() -> None:
    assert page_facts([view()], [pages(shape=(99, 4, 16, 64))]) == page_facts([view()], [pages()])


def test_a_cpu_that_packs_its_pages_in_another_way_is_another_device() -> None:
    facts = [device_facts("cpu", features) for features in ("AVX2 amx=False", "AVX512 amx=True")]
    assert facts[0] != facts[1] != device_facts("cuda", "AVX512 amx=True")


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


@pytest.mark.usefixtures("started_later")
@pytest.mark.parametrize(
    ("load_format", "more", "why"),
    [
        ("tensorizer", {}, "load format tensorizer reads them from elsewhere"),
        ("my_loader", {}, "load format my_loader reads them from elsewhere"),
        ("runai_streamer", {"model_weights": "s3://bucket/model"}, "reads them from elsewhere, s3://bucket/model"),
    ],
)
def test_weights_that_are_not_read_from_the_models_folder_are_not_known_by_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, load_format: str, more: dict[str, str], why: str
) -> None:
    safetensors(tmp_path / "model.safetensors", {"w": b"same" * 5000})
    config = vllm_config(str(tmp_path), load_format)
    assert weights_identity(config, config.model_config, "").startswith("files ") == (load_format == "runai_streamer")
    vars(config.model_config).update(more)
    assert weights_identity(config, config.model_config, "") == "engine this-engine"
    assert why in caplog.text


def test_the_commit_of_another_repository_s_configuration_does_not_name_the_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = vllm_config()
    config.model_config.hf_config_path = "org/model"
    assert weights_identity(config, config.model_config, "") == "hub c0ffee"
    config.model_config.hf_config_path = "org/other"
    assert weights_identity(config, config.model_config, "") == "engine this-engine"
    assert "that of hf_config_path" in caplog.text


@pytest.mark.usefixtures("started_later")
def test_two_seeds_under_one_name_have_two_identities(tmp_path: Path) -> None:
    identities = []
    for seed in (b"a", b"b", b"a"):
        safetensors(tmp_path / "model.safetensors", {"w": b"same" * 5000, "v": seed * 900})
        config = vllm_config(str(tmp_path))
        identities.append(weights_identity(config, config.model_config, ""))
    assert all(identity.startswith("files ") for identity in identities)
    assert identities[0] == identities[2] != identities[1]


@pytest.mark.usefixtures("started_later")
def test_the_same_weights_have_one_identity_in_two_folders(tmp_path: Path) -> None:
    identities = set()
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        safetensors(tmp_path / name / "model.safetensors", {"w": b"same" * 50_000})
        config = vllm_config(str(tmp_path / name))
        identities.add(weights_identity(config, config.model_config, ""))
    assert len(identities) == 1


def test_weights_that_changed_since_the_process_began_are_not_taken_for_what_it_has_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    safetensors(tmp_path / "model.safetensors", {"w": b"same" * 5000})
    # the path looks as a model hub's does; its commit says nothing of files that were changed
    config = vllm_config(str(tmp_path), hf_config=HfConfig(commit="c0ffee"))
    assert weights_identity(config, config.model_config, "") == "engine this-engine"
    assert f"they may not be what the files hold by now: {tmp_path} has changed" in caplog.text


def test_the_users_word_for_the_weights_is_believed_without_looking(tmp_path: Path) -> None:
    config = vllm_config(str(tmp_path / "nothing"))
    assert weights_identity(config, config.model_config, "mine-7") == "user mine-7"


def lora_config(**different: Any) -> SimpleNamespace:
    defaults = {
        "lora_dtype": "torch.float32",
        "target_modules": None,
        "enable_tower_connector_lora": False,
        "enable_mixed_moe_lora_format": False,
        "enable_moe_shared_loras": False,
    }
    return SimpleNamespace(**defaults | different)


def test_an_engine_that_serves_loras_shares_with_one_that_does_not() -> None:
    assert facts(vllm_config(lora=lora_config())) == facts(vllm_config())


def test_engines_that_apply_a_lora_in_another_way_do_not_share() -> None:
    different = [
        {"lora_dtype": "torch.bfloat16"},
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "v_proj"]},
        {"enable_tower_connector_lora": True},
        {"enable_mixed_moe_lora_format": True},
        {"enable_moe_shared_loras": True},
    ]
    all_facts = [facts(vllm_config(lora=lora_config(**each))) for each in [{}, *different]]
    assert len({str(sorted(each.items())) for each in all_facts}) == len(all_facts)
    one, other = (lora_config(target_modules=modules) for modules in (["a", "b"], ["b", "a"]))
    assert facts(vllm_config(lora=one)) == facts(vllm_config(lora=other))
