"""The entry point that puts our connector under the name people already type. vLLM calls it in all its processes."""

CONNECTOR = "LMCacheMPConnector"
MODULE = "lmcache.engines.vllm.connector"


def register() -> None:
    """Let `"kv_connector": "LMCacheMPConnector"` mean ours, which vLLM takes for a class of its own otherwise.

    Called by vLLM in the front end, the engine core and every worker, possibly more than once. Imports nothing heavy:
    the connector's module is loaded when a connector is made.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # the registry refuses a second entry of one name, and offers no other way to replace its own
    KVConnectorFactory._registry.pop(CONNECTOR, None)  # noqa: SLF001
    KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
