"""What others may know of the reference engine's adapter. Imports no NumPy, so that any process can list it."""

from lmcache.core.adapter import EngineAdapter, Validation
from lmcache.core.hookspecs import hookimpl


class ReferenceAdapter(EngineAdapter):
    """The adapter of the reference engine."""

    engine = "reference"
    module = "lmcache.engines.reference.engine"
    validation = Validation.ENGINE
    status = "runs wherever Python and NumPy do: proof, demo and test bench for every kind of KV group."


@hookimpl
def lmcache_register_engine_adapters() -> list[type[EngineAdapter]]:
    """Offer the adapter to `lmcache plugins` and to tools that look it up by engine name."""
    return [ReferenceAdapter]
