"""The class that SGLang's HiCache drives, from and to its host memory: storage backend `dynamic`.

SGLang makes one in the scheduler process of each rank and calls it from threads of its own, so nothing here hurries.
Each pool is a namespace with a client of its own, for SGLang asks for the pages of one pool at a time, and says itself
which of them a prefix needs.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from lmcache import __version__
from lmcache.core.client import Client, Engine
from lmcache.core.keys import HASH_BYTES
from lmcache.core.protocol import Role
from lmcache.engines.sglang.adapter import SglangAdapter
from lmcache.engines.sglang.checks import STORAGE_NEEDED, check_door, check_parallelism
from lmcache.engines.sglang.hicache_keys import SGLANGS_OWN
from lmcache.engines.sglang.host_pools import host_pool, page_blocks
from lmcache.engines.sglang.identity import namespace_facts, updated_facts
from lmcache.engines.sglang.page_keys import chain_hashes
from lmcache.engines.sglang.page_store import Pages, PageStore
from lmcache.engines.sglang.pools import build_geometry
from lmcache.engines.sglang.process import served_model
from lmcache.engines.sglang.settings import read_settings
from lmcache.engines.sglang.trailing import restorable_ends
from lmcache.engines.sglang.weight_updates import watched_updates
from lmcache.engines.versions import warn_of_version
from lmcache.errors import ConfigError, GeometryError, ProtocolError
from lmcache.geometry.groups import GroupKind

log = logging.getLogger(__name__)

WHERE = "--hicache-storage-backend-extra-config"

SHARDED = frozenset({"mamba"})
"""Pools of which every rank holds its own part, also beside KV that all ranks hold alike."""


class LMCacheStorage(HiCacheStorage):
    """`"module_path": "lmcache.engines.sglang.hicache", "class_name": "LMCacheStorage", "interface_v1": 1`."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Read the settings. Raises ConfigError for what cannot be served."""
        check_door(sglang.__version__, HiCacheStorage, STORAGE_NEEDED, type(self))
        warn_of_version(SglangAdapter, sglang.__version__)
        extra = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            raise ConfigError(
                f"interface_v1 is not set in {WHERE}, so SGLang would copy every page through a tensor of its own",
                remedy='add "interface_v1": 1',
            )
        check_parallelism(
            attn_cp_size=getattr(storage_config, "attn_cp_size", 1), dcp_size=getattr(storage_config, "dcp_size", 1)
        )
        self._config = storage_config
        self._settings = read_settings(extra, WHERE, SGLANGS_OWN)
        self._stores: dict[str, PageStore] = {}
        self._pools: dict[str, Any] = {}
        self._cleared = 0
        self._page = 0
        self._updates = watched_updates()
        self._updated = self._updates.count
        self._renewing = threading.Lock()

    # -------------------------------------------------------------------------------------------------------- beginning

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool that all others follow: the KV itself."""
        super().register_mem_pool_host(mem_pool_host)
        self._page = int(mem_pool_host.page_size)
        self._register(PoolName.KV.value, mem_pool_host, self._updated)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool beside it; the KV itself comes by this way once more."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _name(host_pool_name)
        if self._pools.get(name) is not host_pool:
            self._register(name, host_pool, self._updated)

    def _register(self, name: str, pool: Any, updated: int) -> None:
        """Describe a pool and connect for it, after so many updates of the weights.

        Raises ConfigError or GeometryError for one that cannot be reached.
        """
        config = self._config
        # beside KV that all ranks hold alike, SGLang has rank 0 alone store most pools, split by heads or not
        replicated = bool(config.is_mla_model) and name not in SHARDED and "MHA" not in type(pool).__name__
        described = host_pool(name, pool, _indices, replicated=replicated)
        geometry = build_geometry([described], self._page, int(config.tp_size), kind=GroupKind.FULL)
        facts = namespace_facts(
            served_model(name=str(config.model_name or "")),
            [described],
            f"stage {config.pp_rank} of {config.pp_size}",
            "host",
            self._settings.weights_id,
        )
        facts |= updated_facts(updated, self._cleared)
        client = Client(
            *(self._settings.address, Engine(facts, geometry, Role.WORKER, int(config.tp_rank))),
            *(self._settings.client, self._refused),
        )
        # where the first pool has found no server, the others do not wait for it, too
        client.start(self._settings.start_wait if all(store.linked for store in self._stores.values()) else 0.0)
        before = self._stores.pop(name, None)
        if before is not None:
            before.close()
        self._pools[name] = pool
        self._stores[name] = PageStore(
            client, geometry, int(config.tp_rank), {0: described.make}, tenant=self._settings.tenant
        )
        log.info(
            "lmcache %s serves SGLang %s through %s: pool %s, layout %s, pages of %d tokens, rank %d of %d",
            *(__version__, sglang.__version__, type(self).__module__, name, pool.layout, self._page),
            *(config.tp_rank, config.tp_size),
        )

    def _refused(self, error: ProtocolError) -> None:
        log.error("lmcache: the server at %s refuses this engine: %s", self._settings.address, error)

    # ------------------------------------------------------------------------------------------------------ looking up

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many of these pages, from the first on, can be restored."""
        return self._leading(PoolName.KV.value, chain_hashes(keys))

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The same where other pools have to have theirs, too: all pages, or the last ones before the prefix's end."""
        hashes = chain_hashes(keys)
        hits = {PoolName.KV: self._leading(PoolName.KV.value, hashes)}
        whole, trailing = hits[PoolName.KV], {}
        for transfer in pool_transfers or ():
            name = _name(transfer.name)
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                hits[transfer.name] = self._leading(name, hashes[: whole * HASH_BYTES])
                whole = hits[transfer.name]
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                trailing[transfer.name] = max(1, len(transfer.keys or ()))
            else:
                whole = 0  # a rule that nobody knew when this was written
        ends = restorable_ends(whole, trailing, lambda name, pages: self._leading_of(name, hashes, pages))
        longest = ends[-1] if ends else 0
        return PoolTransferResult(longest, hits | dict.fromkeys(trailing, longest), ends)

    def _leading_of(self, name: Any, hashes: bytes, pages: range) -> int:
        return self._leading(_name(name), hashes[pages.start * HASH_BYTES : pages.stop * HASH_BYTES])

    def _leading(self, name: str, hashes: bytes) -> int:
        store = self._store(name)
        ends = store.restorable(hashes, longest=True) if store and hashes else []
        return ends[-1] if ends else 0

    def exists(self, key: str) -> bool:
        """Whether one page can be restored."""
        return bool(self.batch_exists([key]))

    # ------------------------------------------------------------------------------------------------ loading, storing

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Fill pages of the KV, straight from the server's memory."""
        return self._get(PoolName.KV.value, keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the KV, straight into the server's memory."""
        return self._set(PoolName.KV.value, keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Fill pages of other pools."""
        return {each.name: self._get(_name(each.name), each.keys or (), each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of other pools."""
        return {each.name: self._set(_name(each.name), each.keys or (), each.host_indices, None) for each in transfers}

    def _get(self, name: str, keys: Sequence[str], indices: Any) -> list[bool]:
        def fill(store: PageStore, blocks: list[int]) -> int:
            return store.load(chain_hashes(keys), {0: Pages(0, blocks)}, whole=False)

        filled = self._with_blocks(name, keys, indices, fill)
        return [True] * filled + [False] * (len(keys) - filled)

    def _set(self, name: str, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        before = getattr(extra_info, "prefix_keys", None) or ()
        parent = chain_hashes(before[-1:])

        def keep(store: PageStore, blocks: list[int]) -> int:
            return store.store(0, chain_hashes(keys), blocks, parent)

        return [bool(self._with_blocks(name, keys, indices, keep))] * len(keys)

    def _with_blocks(
        self, name: str, keys: Sequence[str], indices: Any, work: Callable[[PageStore, list[int]], int]
    ) -> int:
        """What `work` makes of these pages of a pool; 0 where there is no such pool, or the pages are none."""
        store, pool = self._store(name), self._pools.get(name)
        if store is None or pool is None or indices is None or not keys:
            return 0
        try:
            blocks = page_blocks(indices.tolist(), int(getattr(pool, "page_size", 1) or 1), len(keys))
        except GeometryError as error:
            log.warning("lmcache: pages of pool %s were left out: %s", name, error)
            return 0
        return work(store, blocks)

    # ------------------------------------------------------------------------------- the deprecated interface, not used

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: `interface_v1` has SGLang ask for pages in place."""
        return

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """As `get`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Nothing, as `get`."""
        return False

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """As `set`."""
        return False

    # ---------------------------------------------------------------------------------------------------------- ending

    def clear(self) -> None:
        """From now on this engine finds nothing that was stored before. What others find of it stays."""
        with self._renewing:
            self._cleared += 1
            self._renew(self._updated)

    def _store(self, name: str) -> PageStore | None:
        """The store of a pool; all are made anew once the weights were exchanged."""
        if self._updated != self._updates.count:
            with self._renewing:
                if self._updated != (count := self._updates.count):
                    self._renew(count)
                    # only now: SGLang's other threads would take the old weights' stores meanwhile
                    self._updated = count
        return self._stores.get(name)

    def _renew(self, updated: int) -> None:
        for name, pool in list(self._pools.items()):
            self._register(name, pool, updated)

    def close(self) -> None:
        """SGLang detaches the storage, or ends."""
        while self._stores:
            self._stores.popitem()[1].close()


def _name(name: Any) -> str:
    return str(getattr(name, "value", name))


def _indices(slots: range) -> torch.Tensor:
    return torch.arange(slots.start, slots.stop)
