"""TensorRT-LLM's connector interface, wherever this version keeps it, and what it can do. Imports TensorRT-LLM."""

import importlib
from types import ModuleType
from typing import Any

import attrs

from lmcache.errors import ConfigError

PATHS = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
"""Where versions keep it, the newer place first."""

LAYOUT_METHODS = ("update_state_after_alloc_by_layer_group", "request_finished_by_layer_group")


@attrs.frozen
class Interface:
    """What this version asks of connectors."""

    path: str
    scheduler: Any
    """`KvCacheConnectorScheduler`."""
    worker: Any
    """`KvCacheConnectorWorker`."""
    layouts: bool
    """KV caches are described as pools, with block ids for each layer group."""
    attention_dp: bool
    """Each rank may serve requests of its own."""
    reservations: bool
    """Prefixes can be reserved while a batch is being put together."""

    def __str__(self) -> str:
        parts = {"layouts": self.layouts, "attention DP": self.attention_dp, "reservations": self.reservations}
        return f"{self.path} ({', '.join(name for name, there in parts.items() if there) or 'flat'})"


def find_interface() -> Interface:
    """The interface of the TensorRT-LLM that is installed. Raises ConfigError where there is none that is known."""
    module = _module()
    scheduler, worker = module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker
    grouped = [hasattr(scheduler, name) for name in LAYOUT_METHODS]
    if len({*grouped, hasattr(worker, "register_kv_cache_layout")}) > 1:
        raise ConfigError(
            f"{module.__name__} has some of what KV caches with layer groups need, and not all of it",
            remedy="use another version of TensorRT-LLM; docs/engines/trtllm.md names what is known",
        )
    output = getattr(module, "SchedulerOutput", None)
    return Interface(
        module.__name__,
        scheduler,
        worker,
        layouts=all(grouped),
        attention_dp=hasattr(scheduler, "supports_attention_dp"),
        reservations="prefix_loads" in getattr(output, "__dataclass_fields__", {}),
    )


def _module() -> ModuleType:
    for path in PATHS:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            # any other module that is not there is a broken installation, and says more than we could
            if error.name is None or not path.startswith(error.name):
                raise
    raise ConfigError(
        f"this TensorRT-LLM keeps its KV cache connectors in neither of {', '.join(PATHS)}",
        remedy="use a version with KV cache connectors for its PyTorch backend",
    )


def engine_version() -> str:
    """Of the TensorRT-LLM that is installed; empty if it does not say."""
    return str(getattr(importlib.import_module("tensorrt_llm"), "__version__", ""))


def rank_of_process() -> int:
    """This process's place among the engine's."""
    package = importlib.import_module("tensorrt_llm")
    ask = getattr(package, "mpi_rank", None) or importlib.import_module("tensorrt_llm._utils").mpi_rank
    return int(ask())
