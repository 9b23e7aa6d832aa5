"""What is refused before anything is served: ways of running TensorRT-LLM that this connector cannot serve."""

import logging
from typing import Any

from lmcache.errors import ConfigError

log = logging.getLogger(__name__)

NO_EVICT = "GUARANTEED_NO_EVICT"
LAYOUTS_NEEDED = "use a TensorRT-LLM whose connectors have `register_kv_cache_layout`"


def check_arguments(llm_args: Any, *, layouts: bool, attention_dp: bool) -> int:
    """How many ranks share each request, or ConfigError for a way of running that is not served.

    `layouts` and `attention_dp` tell what this version's connectors can do. TensorRT-LLM refuses most of this itself,
    in some versions; a connector that is told wrong bytes by one that does not would serve them.
    """
    cache = getattr(llm_args, "kv_cache_config", None)
    _check_sizes(llm_args)
    _check_cache(cache)
    _check_policy(llm_args, cache, layouts=layouts)
    if not getattr(llm_args, "enable_attention_dp", False):
        return _size(llm_args, "tensor_parallel_size")
    if not attention_dp:
        raise ConfigError(
            "enable_attention_dp is true, and the connectors of this TensorRT-LLM know requests of one rank only",
            remedy="set enable_attention_dp to false, or use a version whose connectors have `supports_attention_dp`",
        )
    return 1


def _check_sizes(llm_args: Any) -> None:
    for name, why, remedy in (
        ("pipeline_parallel_size", "its stages hold different layers", "set it to 1; tensor parallelism is served"),
        ("context_parallel_size", "its ranks hold different tokens of one block", "set it to 1"),
        ("max_beam_width", "its beams hold different KV for one position", "set it to 1"),
    ):
        if _size(llm_args, name) > 1:
            raise ConfigError(f"{name} is {_size(llm_args, name)}, and {why}", remedy=remedy)
    for name, why in (
        ("speculative_config", "pages of rejected drafts go to other requests without a word to connectors"),
        ("sparse_attention_config", "it keeps a part of the KV where connectors are not shown it"),
    ):
        if getattr(llm_args, name, None) is not None:
            raise ConfigError(f"{name} is set, and {why}", remedy="leave it out, or run without the connector")


def _check_cache(cache: Any) -> None:
    if getattr(cache, "enable_block_reuse", True) is False:
        raise ConfigError(
            "kv_cache_config.enable_block_reuse is false, so TensorRT-LLM would throw away all that is loaded",
            remedy="set it to true",
        )
    for name in ("host_cache_size", "disk_cache_size"):
        if getattr(cache, name, None):
            raise ConfigError(
                f"kv_cache_config.{name} is {getattr(cache, name)}: pages that move there change places",
                remedy="set it to 0; what does not fit the GPU is kept by the lmcache server",
            )
    if getattr(cache, "enable_partial_reuse", False):
        log.warning(
            "lmcache: kv_cache_config.enable_partial_reuse is on; what TensorRT-LLM itself holds then ends inside "
            "blocks, and such prompts are not looked up: set it to false"
        )


def _check_policy(llm_args: Any, cache: Any, *, layouts: bool) -> None:
    policy = getattr(getattr(llm_args, "scheduler_config", None), "capacity_scheduler_policy", NO_EVICT)
    name = str(getattr(policy, "value", policy))
    if NO_EVICT not in name and not (layouts and getattr(cache, "use_kv_cache_manager_v2", False) is True):
        raise ConfigError(
            f"scheduler_config.capacity_scheduler_policy is {name}: paused requests come back with other pages",
            remedy=f"set it to {NO_EVICT}",
        )


def check_flat(kv_dtype: str) -> None:
    """Refuse a KV cache of one tensor that is not all of the KV. Raises ConfigError."""
    if "fp4" in kv_dtype.lower():
        raise ConfigError(
            f"the KV cache is {kv_dtype}, whose scales lie in a pool that connectors are not shown",
            remedy=f"set kv_cache_config.dtype to fp8 or auto, or {LAYOUTS_NEEDED} (use_kv_cache_manager_v2)",
        )


def _size(llm_args: Any, name: str) -> int:
    return int(getattr(llm_args, name, 1) or 1)
