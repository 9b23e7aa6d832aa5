"""The class that SGLang's unified cache drives, straight from and to the pools of its attention.

SGLang makes one in the scheduler process of each rank and calls it from the scheduler's main thread, which everything
else waits for. So a lookup is one request to the server, under a short deadline; stores run on a thread, while SGLang
keeps the pages locked; and loads are done when SGLang asks for them, not later: a load that fails is then computed,
whereas SGLang aborts the requests of one that fails once it was begun.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from lmcache import __version__
from lmcache.core.client import Client, Engine
from lmcache.core.protocol import Role
from lmcache.engines.sglang.adapter import SglangAdapter
from lmcache.engines.sglang.checks import LINKER_NEEDED, check_door, check_parallelism
from lmcache.engines.sglang.device_pools import device_pools, kernels_of
from lmcache.engines.sglang.identity import namespace_facts, updated_facts
from lmcache.engines.sglang.offloads import Offloads
from lmcache.engines.sglang.page_keys import chain_hashes
from lmcache.engines.sglang.page_store import Pages, PageStore
from lmcache.engines.sglang.pools import build_geometry
from lmcache.engines.sglang.process import served_model
from lmcache.engines.sglang.ranks import RankGroup
from lmcache.engines.sglang.settings import read_settings
from lmcache.engines.sglang.weight_updates import watched_updates
from lmcache.engines.versions import warn_of_version
from lmcache.errors import ConfigError, GeometryError, ProtocolError
from lmcache.geometry.groups import GroupKind

log = logging.getLogger(__name__)

KV = "kv"
WHERE = "linker_extra_config of --unified-cache-external-linker-config"

LOCKED_SHARE = 4
"""Stores that wait lock at most one page in so many of the pool."""


class LMCacheLinker(UnifiedCacheLinker):
    """`"linker": "LMCacheLinker", "linker_module_path": "lmcache.engines.sglang.linker"`."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any = (),
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
        **_: Any,
    ) -> None:
        """Describe the pools and connect. Raises ConfigError or GeometryError for what cannot be served."""
        check_door(sglang.__version__, UnifiedCacheLinker, LINKER_NEEDED, type(self))
        warn_of_version(SglangAdapter, sglang.__version__)
        check_parallelism(
            pp_size=params.pp_size, attn_cp_size=params.attn_cp_size, dcp_size=getattr(server_args, "dcp_size", 1)
        )
        if getattr(params, "mtp_draft_device_pools", ()) or getattr(params, "sidecar_draft_device_pools", ()):
            raise ConfigError(
                "this engine drafts with a KV cache of its own, which the linker does not restore",
                remedy="use HiCache storage instead (see docs/engines/sglang.md)",
            )
        settings = read_settings(extra_config or {}, WHERE)
        self.forward_stream = forward_stream
        self._settings = settings
        self._page = int(params.page_size)
        self._group = RankGroup.of(params)
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        states = getattr(params.req_to_token_pool, "mamba_pool", None)
        pools = device_pools(kvcache, states, self._page, staging=settings.staging)
        window = getattr(params, "swa_retain_window", None) or getattr(params, "sliding_window_size", None) or 0
        geometry = build_geometry(pools, self._page, self._group.size, window)
        self._geometry = geometry
        self._groups = {pool.name: number for number, pool in enumerate(pools)}
        self.pools = {PoolName(pool.name): pool for pool in pools}
        self.layer_done_counter = LayerWiseLoadCounter(int(getattr(kvcache, "layer_num", 1)))
        if "mamba" in self._groups:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._facts = namespace_facts(
            served_model(server_args),
            pools,
            f"{getattr(kvcache, 'start_layer', 0)} to {getattr(kvcache, 'end_layer', '')}",
            torch.device(kvcache.device).type,
            settings.weights_id,
        )
        self._makers = {number: pool.make for number, pool in enumerate(pools)}
        self._kernels = kernels = kernels_of(kvcache, staging=settings.staging)
        self._updates = watched_updates()
        self._store = self._connect(settings.start_wait)
        self._offloads = Offloads(kernels.own_stream, int(kvcache.size) // self._page // LOCKED_SHARE)
        self._loaded: set[str] = set()
        log.info(
            "lmcache %s serves SGLang %s through %s: pages of %d tokens, pools %s, rank %d of %d",
            *(__version__, sglang.__version__, type(self).__module__, self._page),
            *(", ".join(self._groups), self._group.rank, self._group.size),
        )

    def _connect(self, wait: float) -> PageStore:
        """A store in the namespace of the weights that the engine has now."""
        self._updated = self._updates.count
        facts = self._facts | updated_facts(self._updated)
        engine = Engine(facts, self._geometry, Role.WORKER, self._group.rank, self._kernels.memory_node)
        client = Client(self._settings.address, engine, self._settings.client, self._refused)
        client.start(wait)
        return PageStore(
            *(client, self._geometry, self._group.rank, self._makers, self._kernels),
            tenant=self._settings.tenant,
            stream=self.forward_stream,
        )

    def _current(self) -> PageStore:
        """The store; another one once the weights were exchanged. What waits to be stored is of the old ones."""
        if self._updated != self._updates.count:
            self._offloads.drain()
            self._store.close()
            self._store = self._connect(self._settings.deadline)
        return self._store

    def _refused(self, error: ProtocolError) -> None:
        log.error("lmcache: the server at %s refuses this engine: %s", self._settings.address, error)

    # --------------------------------------------------------------------------------------------------------- loading

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Lengths, in pages, of prefixes that this rank can restore. One request to the server, and no exception."""
        hashes = chain_hashes(_kv(transfers).keys)
        return self._current().restorable(hashes, patience=self._settings.tier_wait, longest=self._group.size == 1)

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Fill the pages, now. False on every rank if it failed on any: the request is computed."""
        keys = _kv(transfers).keys
        hashes = chain_hashes(keys)
        wanted = self._wanted(keys, transfers)
        # what the lookup found may have left memory for a tier since: the scheduler waits no longer than in a lookup
        patience = self._settings.tier_wait
        loaded = bool(wanted) and self._current().load(hashes, wanted, whole=True, patience=patience) == len(keys)
        # ranks that disagreed would run different batches, and wait for each other for ever
        loaded = self._group.all_agree(loaded)
        if loaded:
            self._loaded.add(rid)
        return loaded

    def _wanted(self, keys: Sequence[str], transfers: Sequence[Any]) -> dict[int, Pages]:
        """The pages to fill, for each group; none of them where SGLang names what we do not have."""
        wanted = {}
        try:
            for transfer in transfers:
                # all but the KV itself are the last pages, or the last page's state
                first = len(keys) - len(transfer.keys)
                if list(transfer.keys) != list(keys[first:]):
                    raise GeometryError("SGLang loads pages that are not the last ones of a prefix")  # noqa: TRY301
                group = self._groups[transfer.name.value]
                wanted[group] = Pages(first, self._blocks(group, transfer))
        except (GeometryError, KeyError) as error:
            log.warning("lmcache: a load was left out: %s", error)
            return {}
        return wanted

    def start_layer_wise_loading(self) -> int:
        """Nothing is left to load: forward passes need not wait for any layer."""
        self._loaded.clear()
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """All that was loaded was there before the forward pass began."""
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Whether it was loaded for a batch that has not begun: nothing is written any more."""
        if rid not in self._loaded:
            return False
        self._loaded.discard(rid)
        return True

    # --------------------------------------------------------------------------------------------------------- storing

    def offload(self, transfers: Sequence[Any], session_id: str | None = None, **_: Any) -> bool:
        """Store the pages of one node, later. True on every rank: what becomes of it is told by the answers."""
        ready = self.record_offload_ready()
        store = self._current()

        def work() -> bool:
            for event in ready:
                event.synchronize()
            return self._store_all(store, transfers)

        self._offloads.put(work, sum(len(transfer.keys) for transfer in transfers))
        return True

    def _store_all(self, store: PageStore, transfers: Sequence[Any]) -> bool:
        """Store, on the thread that does it, what this rank has to; whether all of it is stored."""
        try:
            parts = [part for part in map(self._part, transfers) if part is not None]
        except (GeometryError, KeyError) as error:
            log.warning("lmcache: pages were not stored: %s", error)
            return False
        # full pools first: their pages are the parents of all others
        parts.sort(key=lambda part: self._geometry.groups[part[0]].kind is not GroupKind.FULL)
        stored = [store.store(*part) for part in parts]
        return all(stored)  # only now: a part that fails does not keep the others out

    def _part(self, transfer: Any) -> tuple[int, bytes, list[int]] | None:
        """Group, hashes and pages of what this rank stores of a transfer; None where another rank does."""
        group, hashes = self._groups[transfer.name.value], chain_hashes(transfer.keys)
        turn = int.from_bytes(hashes[:4], "little")
        if not self._geometry.writes(group, self._group.rank, turn):
            return None
        return group, hashes, self._blocks(group, transfer)

    def _blocks(self, group: int, transfer: Any) -> list[int]:
        """The pages that a transfer's slots are. Raises GeometryError for slots that are no whole pages."""
        slots = transfer.device_indices.detach().cpu().numpy().astype(np.int64, copy=False).ravel()
        state = self._geometry.groups[group].kind is GroupKind.RECURRENT
        blocks = slots if state else _pages_of(slots, self._page)
        if len(blocks) != len(transfer.keys):
            raise GeometryError(f"{len(blocks)} pages for {len(transfer.keys)} keys of pool {transfer.name.value}")
        return [int(block) for block in blocks]

    def num_completed_offloads(self) -> int:
        """How many stores have ended."""
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        """Whether the oldest of them stored everything."""
        return self._offloads.take()

    # ---------------------------------------------------------------------------------------------------------- ending

    def reset(self) -> None:
        """SGLang drops its own cache: finish what is under way. What is stored stays."""
        self._offloads.settle()
        self._loaded.clear()
        self.layer_done_counter.reset()

    def close(self) -> None:
        """The engine ends."""
        self._offloads.close()
        self._store.close()


def _kv(transfers: Sequence[Any]) -> Any:
    return next(transfer for transfer in transfers if transfer.name.value == KV)


def _pages_of(slots: "np.ndarray[Any, np.dtype[np.int64]]", page: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    if len(slots) % page:
        raise GeometryError(f"{len(slots)} slots are no whole pages of {page}")
    rows = slots.reshape(-1, page)
    starts = rows[:, 0]
    if np.any(starts % page) or not np.array_equal(rows, starts[:, None] + np.arange(page)):
        raise GeometryError(f"SGLang's slots are not the pages of {page} that they were allocated as")
    return starts // page
