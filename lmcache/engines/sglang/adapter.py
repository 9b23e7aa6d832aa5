"""SGLang's place among the engine adapters. Imports no engine.

Loaded as a built-in plugin by every process; the doors that it names are loaded by SGLang itself.
"""

from typing import ClassVar

from lmcache.core.adapter import EngineAdapter, Validation
from lmcache.core.hookspecs import hookimpl


class SglangAdapter(EngineAdapter):
    """SGLang's `UnifiedCacheLinker`, and its HiCache storage."""

    engine = "sglang"
    module = "lmcache.engines.sglang.linker"
    distributions = ("sglang",)
    supported = ">=0.5.23,<0.5.24"
    validation = Validation.ENGINE
    status: ClassVar[str] = (
        "the unified cache linker and HiCache storage, tensor parallel; proved on SGLang 0.5.23 for CPU with a tiny "
        "Llama; copies from accelerators are proved on CPU memory only"
    )


@hookimpl
def lmcache_register_engine_adapters() -> list[type[EngineAdapter]]:
    """Offer the adapter."""
    return [SglangAdapter]
