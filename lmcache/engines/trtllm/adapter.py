"""TensorRT-LLM's place among the engine adapters. Imports no engine.

Loaded as a built-in plugin by every process; the connector that it names is loaded by TensorRT-LLM itself.
"""

from typing import ClassVar

from lmcache.core.adapter import EngineAdapter, Validation
from lmcache.core.hookspecs import hookimpl

ENGINE = "trtllm"


class TrtllmAdapter(EngineAdapter):
    """The KV cache connector of TensorRT-LLM's PyTorch backend."""

    engine = ENGINE
    module = "lmcache.engines.trtllm.connector"
    distributions = ("tensorrt-llm", "tensorrt_llm")
    # what was read of the interface is of these; none of them was run
    supported = ">=1.0,<1.5"
    validation = Validation.SIMULATOR
    status: ClassVar[str] = (
        "four generations of its connector interface, flat pools and layer groups, tensor parallel, MLA, sliding "
        "windows, prefix reservation, against a model of the contract; not validated on TensorRT-LLM"
    )


@hookimpl
def lmcache_register_engine_adapters() -> list[type[EngineAdapter]]:
    """Offer the adapter."""
    return [TrtllmAdapter]
