"""The plugin: what anybody may know of the adapter. Imports neither the engine nor NumPy."""

from lmcache.core.adapter import EngineAdapter, Validation
from lmcache.core.hookspecs import hookimpl


class PebbleAdapter(EngineAdapter):
    engine = "pebble"
    module = "lmcache_pebble_engine.connector"
    distributions = ("lmcache-pebble-engine",)
    supported = ">=1,<2"
    validation = Validation.ENGINE
    status = "everything that this made-up engine can do, by the conformance suite and to the last bit"


@hookimpl
def lmcache_register_engine_adapters() -> list[type[EngineAdapter]]:
    """Offer the adapter."""
    return [PebbleAdapter]
