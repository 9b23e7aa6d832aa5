"""The class that vLLM drives: translates its calls to the scheduler's and the worker's half, and decides nothing.

vLLM makes one in the scheduler's process and one in each worker. Both are told their settings by vLLM; the scheduler
gets what only workers know (pages, backends) through vLLM's own handshake, so it needs no server to start.
"""

import logging
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmcache import __version__
from lmcache.core.client import Client, Engine
from lmcache.core.protocol import Role
from lmcache.engines.versions import warn_of_version
from lmcache.engines.vllm.adapter import VllmAdapter
from lmcache.engines.vllm.checks import check_connector, check_parallelism
from lmcache.engines.vllm.describe import SpecGroup, logged_blocks, snapshot_note, spec_groups
from lmcache.engines.vllm.lora import watch_loads
from lmcache.engines.vllm.offering import Offering
from lmcache.engines.vllm.orders import StepOrders
from lmcache.engines.vllm.scheduler import SchedulerSide
from lmcache.engines.vllm.settings import Settings, read_settings
from lmcache.engines.vllm.worker import WorkerSide
from lmcache.errors import ConfigError, GeometryError, ProtocolError
from lmcache.geometry.groups import Geometry
from lmcache.plugins.manager import PluginManager

log = logging.getLogger(__name__)


class StepMetadata(KVConnectorMetadata):
    """A step's orders, as vLLM carries them to its workers."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class WorkerFacts(KVConnectorHandshakeMetadata):
    """What a worker found out about its pages, as vLLM carries it to the scheduler."""

    def __init__(self, facts: dict[str, str], geometry: Geometry) -> None:
        self.facts = facts
        self.geometry = geometry


class WorkerNews(KVConnectorWorkerMetadata):
    """What workers tell the scheduler after a step, as vLLM carries it."""

    def __init__(self, updates: int) -> None:
        """`updates` of the weights that there have been."""
        self.updates = updates

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of two ranks the one that has seen more: the other will have seen as many in a moment, or refuses orders."""
        return other if isinstance(other, WorkerNews) and other.updates > self.updates else self


class LMCacheMPConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's `"kv_connector": "LMCacheMPConnector"`."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Check everything that can be refused, before the engine serves anybody. Raises ConfigError."""
        super().__init__(vllm_config, role, kv_cache_config)
        show_logs(logging.getLogger("vllm"), logging.getLogger("lmcache"))
        transfer = vllm_config.kv_transfer_config
        check_connector(vllm.__version__, type(self).__mro__)
        self._settings: Settings = read_settings(transfer.kv_connector_extra_config)
        self._ranks: int = check_parallelism(vllm_config.parallel_config)
        self._groups: tuple[SpecGroup, ...] = spec_groups(
            kv_cache_config, self._ranks, PluginManager().classify_kv_spec
        )
        # a load that fails is computed instead; vLLM's default is to fail the user's request. Read after this returns
        transfer.kv_load_failure_policy = "recompute"
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._facts: WorkerFacts | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._announce()
        elif vllm_config.lora_config is not None:
            watch_loads()

    def _announce(self) -> None:
        warn_of_version(VllmAdapter, vllm.__version__)
        log.info("lmcache %s serves vLLM %s through %s", __version__, vllm.__version__, type(self).__module__)
        for note in self._settings.notes:
            log.info("lmcache: %s", note)
        scheduler_block_size, _ = resolve_kv_cache_block_sizes(self._kv_cache_config, self._vllm_config)
        log.info("%s, scheduler_block_size=%d", logged_blocks(self._groups), scheduler_block_size)
        if note := snapshot_note(self._groups, self._kv_cache_config, scheduler_block_size):
            log.info("lmcache: %s", note)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache delivers nothing to anybody: a store that is skipped is a later miss."""
        return False

    # -------------------------------------------------------------------------------------------- worker: its beginning

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describe the pages, and connect. Called when vLLM has allocated its KV cache; again if it allocates anew."""
        from lmcache.engines.vllm.registration import register_pages
        from lmcache.engines.vllm.weight_updates import watched_updates

        lost: set[str] = set()
        if self._worker is not None:
            lost = self._worker.unfinished
            self._worker.close()
        found = register_pages(
            self._vllm_config, self._kv_cache_config, self._groups, kv_caches, self._ranks, self._settings
        )
        rank = self._vllm_config.parallel_config.rank % self._ranks
        client = self._connect(Engine(found.facts, found.geometry, Role.WORKER, rank, found.kernels.memory_node))
        parts = client, found.geometry, rank, found.makers, found.kernels, watched_updates()
        self._worker = WorkerSide(*parts, lost=lost)
        self._facts = WorkerFacts(found.facts, found.geometry)

    def get_handshake_metadata(self) -> WorkerFacts | None:
        """What the scheduler has to know; collected by vLLM once every worker has registered."""
        return self._facts

    def _connect(self, engine: Engine) -> Client:
        client = Client(self._settings.address, engine, self._settings.client, self._refused)
        client.start(self._settings.start_wait)
        return client

    def _refused(self, error: ProtocolError) -> None:
        log.error("lmcache: the server at %s refuses this engine: %s", self._settings.address, error)

    # --------------------------------------------------------------------------------------------- worker: in each step

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        if self._worker is not None:
            orders = self._orders()
            self._worker.load(orders.loads, orders.updates)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, no running request waits for one."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: an object holds all layers, so it is stored when the last one is done."""

    def wait_for_save(self) -> None:
        """Store this step's chunks. When it returns, the engine may do with the blocks what it likes."""
        if self._worker is not None:
            orders = self._orders()
            self._worker.store(orders.stores, orders.namespace, orders.updates)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended since the last step; vLLM wants the failed ones under both names."""
        if self._worker is None:
            return KVConnectorTransferResults()
        ended, failed = self._worker.outcomes(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerNews | None:
        """What the scheduler does not know yet."""
        updates = self._worker.news() if self._worker is not None else None
        return WorkerNews(updates) if updates is not None else None

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        return metadata.orders if isinstance(metadata, StepMetadata) else StepOrders()

    # ------------------------------------------------------------------------------------------------------- scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """All workers have registered their pages: connect as the scheduler of this engine.

        Raises ConfigError or GeometryError for what cannot be served.
        """
        facts = [metadata[place] for place in sorted(metadata) if isinstance(metadata[place], WorkerFacts)]
        if len(facts) < max(1, len(metadata)):
            raise ConfigError(
                "vLLM's MultiConnector hands over what another connector found out in the workers, and not lmcache",
                remedy=f"name {type(self).__name__} first in its connectors, or alone in --kv-transfer-config",
            )
        first = facts[0]
        for other in facts[1:]:
            if (other.facts, other.geometry) != (first.facts, first.geometry):
                raise GeometryError(
                    "the workers of this engine lay out their KV caches differently",
                    remedy="run the same vLLM with the same settings for every rank",
                )
        transfer = self._vllm_config.kv_transfer_config
        self._scheduler = SchedulerSide(
            self._connect(Engine(first.facts, first.geometry, Role.SCHEDULER)),
            first.geometry,
            Offering(
                first.geometry,
                [number for number, group in enumerate(self._groups) if group.handed_over],
                decode=self._settings.store_decode,
            ),
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
        )

    def on_new_request(self, request: Any) -> None:
        """Look it up."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the cache has beyond vLLM's own; None while that is not known."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load, or learn that there will be none."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The orders of this step."""
        if self._scheduler is None:
            return StepMetadata(StepOrders())
        state = scheduler_output.kv_connector_block_state
        return StepMetadata(
            self._scheduler.step(
                scheduler_output.num_scheduled_tokens, state.get_block_ids, state.boundary_state_offloads
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn which loads have ended, on all ranks, and what else the workers have to tell."""
        if self._scheduler is None:
            return
        self._scheduler.loaded(connector_output.finished_recving or (), connector_output.failed_recving or ())
        if isinstance(news := connector_output.kv_connector_worker_meta, WorkerNews):
            self._scheduler.updated(news.updates)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """The request has ended. Its blocks may go at once: stores are done within the step, loads vLLM waits for."""
        if self._scheduler is not None:
            self._scheduler.ended(request)
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """As `request_finished_all_groups`, for vLLM's older way of asking."""
        return self.request_finished_all_groups(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping until the tickets of aborted requests are dropped."""
        return self._scheduler is not None and self._scheduler.busy()

    def reset_cache(self) -> bool:
        """Nothing stored before is found by this engine from now on. Called with `reset_connector=True` only."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def shutdown(self) -> None:
        """The process ends. Idempotent."""
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()
        self._worker = self._scheduler = None


def show_logs(engine: logging.Logger, ours: logging.Logger) -> None:
    """Let our log lines appear where vLLM's do, at vLLM's level; they have no handlers of their own."""
    if not ours.handlers:
        for handler in engine.handlers:
            ours.addHandler(handler)
        ours.setLevel(engine.level)
        ours.propagate = engine.propagate
