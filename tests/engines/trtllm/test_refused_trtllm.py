"""What is refused, and said, before a TensorRT-LLM engine serves anybody. Needs no torch."""

import enum
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trtllm_names import FLAT, LAYOUTS, RESERVATIONS, SALTED, installed
from weights_folders import begins_later, safetensors

from lmcache.engines.trtllm import identity
from lmcache.engines.trtllm.checks import check_arguments, check_flat
from lmcache.engines.trtllm.content import NeverCached, content_of
from lmcache.engines.trtllm.identity import namespace_facts, weights_identity
from lmcache.engines.trtllm.settings import Settings, read_settings
from lmcache.errors import ConfigError


def arguments(cache: dict[str, Any] | None = None, **more: Any) -> SimpleNamespace:
    held = {"tokens_per_block": 32, "enable_block_reuse": True, "enable_partial_reuse": False, "dtype": "auto"}
    return SimpleNamespace(
        **{
            "model": "toy",
            "tensor_parallel_size": 2,
            "kv_cache_config": SimpleNamespace(**held | (cache or {})),
            "kv_connector_config": SimpleNamespace(server_url=None),
        }
        | more
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pipeline_parallel_size": 2},
            (
                "pipeline_parallel_size is 2, and its stages hold different layers; set it to 1; tensor parallelism is "
                "served"
            ),
        ),
        (
            {"context_parallel_size": 2},
            "context_parallel_size is 2, and its ranks hold different tokens of one block; set it to 1",
        ),
        ({"max_beam_width": 4}, "max_beam_width is 4, and its beams hold different KV for one position; set it to 1"),
        (
            {"speculative_config": object()},
            (
                "speculative_config is set, and pages of rejected drafts go to other requests without a word to "
                "connectors; leave it out, or run without the connector"
            ),
        ),
        (
            {"sparse_attention_config": object()},
            (
                "sparse_attention_config is set, and it keeps a part of the KV where connectors are not shown it; "
                "leave it out, or run without the connector"
            ),
        ),
        (
            {"enable_attention_dp": True},
            (
                "enable_attention_dp is true, and the connectors of this TensorRT-LLM know requests of one rank only; "
                "set enable_attention_dp to false, or use a version whose connectors have `supports_attention_dp`"
            ),
        ),
        (
            {"cache": {"enable_block_reuse": False}},
            (
                "kv_cache_config.enable_block_reuse is false, so TensorRT-LLM would throw away all that is loaded; "
                "set it to true"
            ),
        ),
        (
            {"cache": {"host_cache_size": 1 << 30}},
            (
                "kv_cache_config.host_cache_size is 1073741824: pages that move there change places; set it to 0; what "
                "does not fit the GPU is kept by the lmcache server"
            ),
        ),
        (
            {"scheduler_config": SimpleNamespace(capacity_scheduler_policy="MAX_UTILIZATION")},
            (
                "scheduler_config.capacity_scheduler_policy is MAX_UTILIZATION: paused requests come back with other "
                "pages; set it to GUARANTEED_NO_EVICT"
            ),
        ),
    ],
)
def test_a_way_of_running_that_is_not_served_is_refused_with_what_to_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_arguments(arguments(**changes), layouts=True, attention_dp=False)
    assert str(refused.value) == message


def test_ranks_are_those_that_share_a_request() -> None:
    assert check_arguments(arguments(), layouts=False, attention_dp=False) == 2
    assert check_arguments(arguments(enable_attention_dp=True), layouts=True, attention_dp=True) == 1


def test_the_second_cache_manager_may_pause_requests() -> None:
    paused = SimpleNamespace(capacity_scheduler_policy=SimpleNamespace(value="MAX_UTILIZATION"))
    second = arguments({"use_kv_cache_manager_v2": True}, scheduler_config=paused)
    assert check_arguments(second, layouts=True, attention_dp=True) == 2
    with pytest.raises(ConfigError):
        check_arguments(second, layouts=False, attention_dp=False)


def test_partial_reuse_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_arguments(arguments({"enable_partial_reuse": True}), layouts=True, attention_dp=True)
    assert "set it to false" in caplog.text


def test_a_flat_pool_without_its_scales_is_refused() -> None:
    check_flat("fp8 torch.float8_e4m3fn")
    with pytest.raises(ConfigError, match="whose scales lie in a pool that connectors are not shown"):
        check_flat("nvfp4 torch.uint8")


@pytest.mark.parametrize("generation", [FLAT, SALTED, LAYOUTS, RESERVATIONS])
def test_the_classes_refuse_when_they_are_made_and_say_how_far_they_were_proved(
    generation: int, caplog: pytest.LogCaptureFixture
) -> None:
    with installed(generation) as names:
        for side in (names.connector.LMCacheScheduler, names.connector.LMCacheWorker):
            with pytest.raises(ConfigError, match="pipeline_parallel_size is 2"):
                side(arguments(pipeline_parallel_size=2))
            if generation < LAYOUTS:
                with pytest.raises(ConfigError, match="enable_attention_dp is true"):
                    side(arguments(enable_attention_dp=True))
        with caplog.at_level(logging.WARNING):
            names.connector.LMCacheScheduler(arguments())
    assert "simulator-tested, not validated on TensorRT-LLM" in caplog.text


def test_what_several_ranks_cannot_agree_on_is_refused_and_one_rank_shares_with_nobody() -> None:
    with pytest.raises(ConfigError) as refused:
        weights_identity(arguments(), "", 2)
    assert str(refused.value) == (
        "nothing identifies the weights of toy: toy is no folder; set LMCACHE_WEIGHTS_ID to a word that no other "
        "weights have"
    )
    one, other = (weights_identity(arguments(), "", 1) for _ in range(2))
    assert one != other


class LoadFormat(enum.Enum):
    """As TensorRT-LLM's: the values say nothing."""

    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2


@pytest.mark.parametrize(
    ("load_format", "why"),
    [
        (LoadFormat.AUTO, ""),
        ("AUTO", ""),
        (LoadFormat.DUMMY, "they are made up at random"),
        ("dummy", "they are made up at random"),
        (LoadFormat.VISION_ONLY, "load format vision_only may read others"),
    ],
)
def test_weights_that_are_not_those_of_the_folder_are_not_known_by_it(
    load_format: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "process_beginning", begins_later)
    (tmp_path / "model").mkdir()
    safetensors(tmp_path / "model" / "model.safetensors", {"w": b"same" * 5000})
    found = weights_identity(arguments(model=str(tmp_path / "model"), load_format=load_format), "", 1)
    assert found.startswith("engine " if why else "files ")
    assert why in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"quant_config": "fp8"},
        {"max_seq_len": 4096},
        {"attn_backend": "FLASHINFER"},
        {"tensor_parallel_size": 4},
        {"enable_attention_dp": True},
        {"load_format": "dummy"},
        {"cache": {"dtype": "fp8"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_gives_the_same_tokens_other_bytes_is_a_fact(changes: dict[str, Any]) -> None:
    usual = namespace_facts(arguments(), "1.2.1", "toy", 2)
    assert namespace_facts(arguments(**changes), "1.2.1", "toy", 2) != usual
    assert namespace_facts(arguments(), "1.2.2", "toy", 2) != usual
    assert namespace_facts(arguments(), "1.2.1", "other", 2) != usual
    assert namespace_facts(arguments({"free_gpu_memory_fraction": 0.5}), "1.2.1", "toy", 2) == usual


def test_settings_are_read_from_the_environment_and_the_address_from_the_engine_s_own_first() -> None:
    assert read_settings(None, {}) == Settings()
    environment = {
        "LMCACHE_SERVER_URL": "tcp://cache:6000",
        "LMCACHE_MP_HOST": "elsewhere",
        "LMCACHE_MP_PORT": "7000",
        "LMCACHE_DEADLINE": "2.5",
        "LMCACHE_START_WAIT": "0",
        "LMCACHE_LOOKUP_WAIT": "0.02",
        "LMCACHE_ASYNC_LOADS": "1",
        "LMCACHE_STORE_DECODE": "false",
        "LMCACHE_WEIGHTS_ID": "w",
        "LMCACHE_STAGING": "yes",
    }
    settings = read_settings("tcp://first:1", environment)
    assert str(settings.address) == "first:1"
    assert str(read_settings(None, environment).address) == "cache:6000"
    del environment["LMCACHE_SERVER_URL"]
    assert str(read_settings(None, environment).address) == "elsewhere:7000"
    assert (settings.client.deadline, settings.start_wait, settings.lookup_wait) == (2.5, 0.0, 0.02)
    assert (settings.async_loads, settings.store_decode, settings.weights_id, settings.staging) == (
        *(True, False, "w", True),
    )


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("LMCACHE_SERVER_URL", "http://a/b:x", "HOST, HOST:PORT or tcp://HOST:PORT"),
        ("LMCACHE_MP_PORT", "0", "a TCP port, 1 to 65535"),
        ("LMCACHE_DEADLINE", "0", "a number of seconds above 0"),
        ("LMCACHE_START_WAIT", "soon", "a number of seconds"),
        ("LMCACHE_ASYNC_LOADS", "perhaps", "1 or 0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(name: str, value: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings(None, {name: value})
    assert str(refused.value) == f"{name} is {value!r}; give {wanted}"


def test_a_slip_of_the_pen_is_spoken_of_and_other_people_s_variables_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    read_settings(None, {"LMCACHE_STORE_DECODES": "1", "LMCACHE_CONFIG_FILE": "x", "LMCACHE_CHUNK_SIZE": "256"})
    assert caplog.messages == [
        "lmcache: the environment variable LMCACHE_STORE_DECODES means nothing here; did you mean LMCACHE_STORE_DECODE?"
    ]


def test_what_a_request_consists_of_decides_its_chain() -> None:
    def root(**attributes: Any) -> object:
        content = content_of(SimpleNamespace(**attributes), "engine")
        return content if isinstance(content, NeverCached) else content.root

    roots = [
        root(),
        root(cache_salt="a"),
        root(cache_salt_id=7),
        root(lora_task_id=0),
        root(lora_task_id=1),
        root(lora_task_id=1, cache_salt="a"),
    ]
    assert len(set(roots)) == len(roots)
    assert root(cache_salt="", lora_task_id=None, multimodal_hashes=[]) == roots[0]
    assert content_of(SimpleNamespace(lora_task_id=1), "another") != content_of(SimpleNamespace(lora_task_id=1), "one")
    for attributes in (
        {"is_dummy_request": True},
        {"multimodal_hashes": [[1]], "multimodal_positions": [3]},
        {"multimodal_hashes": [[1]], "multimodal_positions": [3], "multimodal_lengths": [0]},
        {"py_multimodal_data": object()},
    ):
        assert isinstance(root(**attributes), NeverCached), attributes
