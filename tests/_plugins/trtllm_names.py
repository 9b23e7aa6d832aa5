"""The names that a KV cache connector imports from TensorRT-LLM, for each generation of its interface.

Written from what is known of the interface; nothing here is NVIDIA's code. `installed(generation)` puts them where
`import tensorrt_llm` finds them, with the connector's module loaded anew on top of them.
"""

import abc
import contextlib
import dataclasses
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

OLD_PATH = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
NEW_PATH = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
CONNECTOR = "lmcache.engines.trtllm.connector"

FLAT, SALTED, LAYOUTS, RESERVATIONS = 1, 2, 3, 4
"""The generations, oldest first."""

process = types.SimpleNamespace(rank=0)
"""What this process is in MPI's eyes: the executor sets it before it makes a rank's classes."""


class WorkerBase(abc.ABC):
    """What all generations have of `KvCacheConnectorWorker`."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args, self._metadata = llm_args, None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> Any:
        return None

    @abc.abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...
    @abc.abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...
    @abc.abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...
    @abc.abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...
    @abc.abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...
    @abc.abstractmethod
    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any: ...


class SchedulerBase(abc.ABC):
    """What all generations have of `KvCacheConnectorScheduler`."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abc.abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> object: ...
    @abc.abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...
    @abc.abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...
    @abc.abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


def _fold(method: str, flat: str) -> Any:
    """The default of a method by layer group: with one group it is the flat one."""

    def folded(self: Any, request: Any, grouped: list[list[int]]) -> Any:
        if len(grouped) != 1:
            raise NotImplementedError(f"{type(self).__name__} does not implement {method}")
        return getattr(self, flat)(request, grouped[0])

    return folded


def _layout_default(self: Any, layout: Any) -> None:
    raise NotImplementedError(f"{type(self).__name__} does not implement register_kv_cache_layout")


def _worker(generation: int) -> type:
    names: dict[str, Any] = {}
    if generation >= LAYOUTS:
        names = {"supports_attention_dp": False, "register_kv_cache_layout": _layout_default}
    return type("KvCacheConnectorWorker", (WorkerBase,), names)


def _scheduler(generation: int) -> type:
    names: dict[str, Any] = {}
    if generation >= SALTED:
        names["wait_for_initialization"] = lambda self: None
    if generation >= LAYOUTS:
        names |= {
            "supports_attention_dp": False,
            "cancel_load": lambda self, request, start, end: None,
            "request_reset": lambda self, request: None,
        }
        for flat in ("update_state_after_alloc", "request_finished"):
            names[f"{flat}_by_layer_group"] = _fold(f"{flat}_by_layer_group", flat)
    return type("KvCacheConnectorScheduler", (SchedulerBase,), names)


def _request_data(generation: int) -> type:
    fields: list[Any] = [
        ("request_id", int),
        ("new_tokens", list),
        ("new_block_ids", list),
        ("computed_position", int),
        ("num_scheduled_tokens", int),
    ]
    if generation >= SALTED:
        fields.append(("priorities", Any, None))
    if generation == SALTED:
        fields.append(("cache_salt_id", Any, None))
    if generation >= LAYOUTS:
        fields += [
            ("block_hashes", list, dataclasses.field(default_factory=list)),
            ("cache_salt", Any, None),
            ("new_block_ids_by_layer_group", Any, dataclasses.field(default_factory=list)),
        ]
    return dataclasses.make_dataclass("RequestData", fields)


def _scheduler_output(generation: int) -> type:
    fields: list[Any] = [
        ("new_requests", list, dataclasses.field(default_factory=list)),
        ("cached_requests", list, dataclasses.field(default_factory=list)),
    ]
    if generation >= LAYOUTS:
        fields.append(("attention_dp_rank", Any, None))
    if generation >= RESERVATIONS:
        fields.append(("prefix_loads", list, dataclasses.field(default_factory=list)))
    return dataclasses.make_dataclass("SchedulerOutput", fields)


@dataclasses.dataclass
class PrefixLoad:
    """A load that the engine has admitted."""

    reservation_id: int
    request_id: int
    start: int
    end: int
    is_async: bool
    block_ids_by_layer_group: list[list[int]]
    tokens: list[int]
    cache_salt: str | None = None


def _interface(generation: int) -> types.ModuleType:
    module = types.ModuleType(OLD_PATH if generation == FLAT else NEW_PATH)
    module.KvCacheConnectorWorker = _worker(generation)
    module.KvCacheConnectorScheduler = _scheduler(generation)
    module.RequestData = _request_data(generation)
    module.SchedulerOutput = _scheduler_output(generation)
    if generation >= RESERVATIONS:
        module.PrefixLoad = PrefixLoad
    return module


@contextlib.contextmanager
def installed(generation: int) -> Iterator[types.SimpleNamespace]:
    """Have this generation of TensorRT-LLM installed; gives its interface and the connector's module."""
    ours = [name for name in sys.modules if name == CONNECTOR or name.partition(".")[0] == "tensorrt_llm"]
    before = {name: sys.modules.pop(name) for name in ours}
    interface = _interface(generation)
    try:
        parts = interface.__name__.split(".")
        for depth in range(1, len(parts)):
            package = types.ModuleType(".".join(parts[:depth]))
            package.__path__ = []
            sys.modules[package.__name__] = package
        top = sys.modules["tensorrt_llm"]
        top.__version__, top.mpi_rank = f"1.{generation - 1}.0", lambda: process.rank
        sys.modules[interface.__name__] = interface
        yield types.SimpleNamespace(
            generation=generation, interface=interface, connector=importlib.import_module(CONNECTOR)
        )
    finally:
        for name in [name for name in sys.modules if name == CONNECTOR or name.partition(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]
        sys.modules.update(before)
