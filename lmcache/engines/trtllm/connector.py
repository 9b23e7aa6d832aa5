"""The classes that TensorRT-LLM drives: they translate its calls to the scheduler's and the worker's half.

TensorRT-LLM makes a worker in each rank, and beside the one of rank 0 a scheduler (with attention DP, beside each).
"""

import logging
import os
import secrets
from typing import Any

from lmcache import __version__
from lmcache.core.client import Client, Engine
from lmcache.core.protocol import Role
from lmcache.engines.trtllm.adapter import TrtllmAdapter
from lmcache.engines.trtllm.checks import check_arguments
from lmcache.engines.trtllm.interface import engine_version, find_interface, rank_of_process
from lmcache.engines.trtllm.meeting import meeting_of
from lmcache.engines.trtllm.orders import StepOrders
from lmcache.engines.trtllm.registration import Registration, register_flat, register_layout
from lmcache.engines.trtllm.scheduler import SchedulerSide
from lmcache.engines.trtllm.settings import Settings, read_settings
from lmcache.engines.trtllm.worker import WorkerSide
from lmcache.engines.versions import warn_of_version
from lmcache.errors import LoadFailed, ProtocolError

log = logging.getLogger(__name__)

INTERFACE = find_interface()
_WORKER: Any = INTERFACE.worker
_SCHEDULER: Any = INTERFACE.scheduler


def _settings_of(llm_args: Any) -> Settings:
    return read_settings(getattr(llm_args.kv_connector_config, "server_url", None), os.environ)


def _ranks_of(llm_args: Any) -> int:
    return check_arguments(llm_args, layouts=INTERFACE.layouts, attention_dp=INTERFACE.attention_dp)


def _connect(settings: Settings, engine: Engine) -> Client:
    def refused(error: ProtocolError) -> None:
        log.error("lmcache: the server at %s refuses this engine: %s", settings.address, error)

    client = Client(settings.address, engine, settings.client, refused)
    client.start(settings.start_wait)
    return client


class LMCacheWorker(_WORKER):
    """TensorRT-LLM's `connector_worker_class`."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        """Check everything that can be refused, before the engine serves anybody. Raises ConfigError."""
        super().__init__(llm_args)
        self._arguments = llm_args
        self._settings = _settings_of(llm_args)
        self._ranks = _ranks_of(llm_args)
        self._rank_of_process = rank_of_process()
        self._side: WorkerSide | None = None

    # ---------------------------------------------------------------------------------------------------- its beginning

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """The KV cache as one tensor."""
        self._registered(register_flat(kv_cache_tensor, self._arguments, engine_version(), self._ranks, self._settings))

    def register_kv_cache_layout(self, layout: Any) -> None:
        """The KV cache as pools, for each layer group."""
        self._registered(register_layout(layout, self._arguments, engine_version(), self._ranks, self._settings))

    def _registered(self, found: Registration) -> None:
        self.close()
        rank = self._rank_of_process % self._ranks
        engine = Engine(found.facts, found.shape.geometry, Role.WORKER, rank, found.kernels.memory_node)
        client = _connect(self._settings, engine)
        self._side = WorkerSide(client, found.shape, rank, found.makers, found.kernels)
        meeting_of(self._arguments).registration = found

    # ----------------------------------------------------------------------------------------------------- in each step

    def start_load_kv(self, stream: Any) -> None:
        """Do what the step counts on. Raises LoadFailed rather than let the engine read what is not there."""
        orders = self._orders()
        if self._side is not None:
            self._side.load(orders.loads, stream)
        elif orders.loads:
            raise LoadFailed("loads were ordered of a worker whose KV cache was never registered")

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: what the step counts on is loaded before it begins. Hooks do not run inside replayed graphs."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: an object holds all layers, so it is stored when the last one is done."""

    def wait_for_save(self, stream: Any) -> None:
        """Store this step's chunks. When it returns, the engine may do with the blocks what it likes."""
        if self._side is not None:
            self._side.store(self._orders(), stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Requests that this rank has let go of, and parked ones that it has loaded."""
        if self._side is None:
            return list(finished_gen_req_ids), []
        return self._side.finished(finished_gen_req_ids, started_loading_req_ids)

    def get_finished_prefix_loads(self) -> list[int]:
        """Reservations that this rank has loaded."""
        return self._side.finished_prefixes() if self._side is not None else []

    def _orders(self) -> StepOrders:
        orders = self.get_connector_meta()
        if not isinstance(orders, StepOrders):
            return StepOrders()
        if orders.owner is not None and orders.owner != self._rank_of_process:
            raise LoadFailed(f"rank {self._rank_of_process} was given the blocks of rank {orders.owner}")
        return orders

    def close(self) -> None:
        """The engine ends, or allocates its KV cache anew. Idempotent."""
        if self._side is not None:
            self._side.close()
        self._side = None


class LMCacheScheduler(_SCHEDULER):
    """TensorRT-LLM's `connector_scheduler_class`."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        """Check what can be refused, and say what is served. Raises ConfigError."""
        super().__init__(llm_args)
        self._arguments = llm_args
        self._settings = _settings_of(llm_args)
        _ranks_of(llm_args)
        self._engine_id = secrets.token_hex(16)
        self._side: SchedulerSide | None = None
        self._seen: Registration | None = None
        log.warning(
            "lmcache %s serves TensorRT-LLM %s through %s: simulator-tested, not validated on TensorRT-LLM",
            *(__version__, engine_version(), INTERFACE),
        )
        warn_of_version(TrtllmAdapter, engine_version())

    def _scheduler(self) -> SchedulerSide | None:
        """The half that decides; None until the worker of this process has seen its KV cache."""
        found = meeting_of(self._arguments).registration
        if found is not None and found is not self._seen:
            self.close()
            engine = Engine(found.facts, found.shape.geometry, Role.SCHEDULER)
            self._seen = found
            self._side = SchedulerSide(_connect(self._settings, engine), found.shape, self._settings, self._engine_id)
        return self._side

    def wait_for_initialization(self) -> None:
        """The workers have registered: connect now, and not with the first request."""
        self._scheduler()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the cache has beyond the engine's own."""
        side = self._scheduler()
        return side.matched(request, num_computed_tokens) if side is not None else (0, False)

    def reserve_prefix(self, request: Any, num_computed_tokens: int, reservation_id: int) -> tuple[int, bool]:
        """As `get_num_new_matched_tokens`, and what is answered stays until it is released."""
        side = self._scheduler()
        return side.reserve(request, num_computed_tokens, reservation_id) if side is not None else (0, False)

    def release_prefix_reservation(self, request: Any, reservation_id: int, start: int, end: int) -> None:
        """The engine needs a part of a reservation no more."""
        if self._side is not None:
            self._side.release(reservation_id, start, end)

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """The request has blocks."""
        self.update_state_after_alloc_by_layer_group(request, [block_ids])

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids_by_layer_group: Any) -> None:
        """The request has blocks, in each layer group."""
        if self._side is not None:
            self._side.allocated(request, block_ids_by_layer_group)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """The engine does not take a part of what it was offered."""
        if self._side is not None:
            self._side.cancelled(request, start, end)

    def request_reset(self, request: Any) -> None:
        """The request has lost its blocks and starts again."""
        if self._side is not None:
            self._side.reset(request)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        """The orders of this step."""
        return self._side.step(scheduler_output) if self._side is not None else StepOrders()

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """The request has ended. Stores are done within their step, so its blocks may go, unless it is being loaded."""
        return self._side.ended(request) if self._side is not None else False

    def request_finished_by_layer_group(self, request: Any, cache_block_ids_by_layer_group: Any) -> bool:
        """As `request_finished`."""
        return self.request_finished(request, [])

    def close(self) -> None:
        """The engine ends. Idempotent."""
        if self._side is not None:
            self._side.close()
        self._side = None
