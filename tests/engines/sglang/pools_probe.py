"""Real pools of SGLang and both doors, without an engine: what is stored of a page comes back, byte for byte.

    python pools_probe.py PORT FOLDER      a server of ours listens on PORT; FOLDER holds a model

Prints one JSON line a case. Run in a process of its own: importing SGLang takes a quarter of a minute.
"""

import concurrent.futures
import json
import sys
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.utils import get_hash_str

from lmcache.engines.sglang.linker import LMCacheLinker

PAGE, SLOTS, LAYERS = 16, 256, 3
WINDOW = 2 * PAGE
PORT, FOLDER = int(sys.argv[1]), sys.argv[2]
SETTINGS = {"lmcache.mp.port": PORT, "lmcache.deadline": 5, "lmcache.start_wait": 5, "lmcache.weights_id": "probe"}


def fill(*buffers: torch.Tensor) -> None:
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))


def keys_of(seed: int, pages: int) -> list[str]:
    return get_hash_str([(i * seed) % 500 + 3 for i in range(pages * PAGE)], None, page_size=PAGE)


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages]).to(torch.int64)


def mha(kind: torch.dtype = torch.bfloat16) -> Any:
    return MHATokenToKVPool(SLOTS, PAGE, kind, 2, 16, LAYERS, "cpu", False)


def mla() -> Any:
    return MLATokenToKVPool(SLOTS, PAGE, torch.bfloat16, 32, 16, LAYERS, "cpu", False)


# ------------------------------------------------------------------------------------------------ HiCache's host memory


def host_case(kind: str, layout: str, allocator: str = "default") -> dict[str, Any]:
    device = mha() if kind == "mha" else mla()
    make = MHATokenToKVPoolHost if kind == "mha" else MLATokenToKVPoolHost
    more = {} if kind == "mha" else {"target_layer_num": LAYERS}
    host = make(
        *(device.get_device_pool_infos()[0].buffer_info, 2.0, 0, PAGE, layout),
        pin_memory=False,
        device_capacity_tokens=SLOTS,
        start_layer=0,
        end_layer=LAYERS,
        allocator_type=allocator,
        **more,
    )
    fill(host.kv_buffer)
    extra = {
        "backend_name": "lmcache",
        "module_path": "lmcache.engines.sglang.hicache",
        "class_name": "LMCacheStorage",
        "interface_v1": 1,
    }
    config = HiCacheStorageConfig(
        *(0, 1, 0, 1, 0, 1, kind == "mla", False, layout == "page_first", FOLDER), extra_config=extra | SETTINGS
    )
    storage = StorageBackendFactory.create_backend("dynamic", config, host)
    storage.register_mem_pool_host(host)
    try:
        keys = keys_of(len(layout) + len(kind) + len(allocator), 5)
        stored, loaded = slots(3, 1, 7, 4, 2), slots(9, 12, 11, 10, 15)
        pages = [host.get_data_page(int(stored[i * PAGE])).clone() for i in range(5)]
        others = [host.get_data_page(page * PAGE).clone() for page in (5, 13)]
        before = storage.batch_exists(keys)
        set_first = storage.batch_set_v1(keys[:3], stored[: 3 * PAGE])
        part = storage.batch_exists(keys)
        set_rest = storage.batch_set_v1(keys[3:], stored[3 * PAGE :], SimpleNamespace(prefix_keys=keys[:3]))
        got = storage.batch_get_v1([*keys, "f" * 64], torch.cat([loaded, slots(14)]))
        same = [torch.equal(host.get_data_page(int(loaded[i * PAGE])), pages[i]) for i in range(5)]
        untouched = [
            torch.equal(host.get_data_page(page * PAGE), was) for page, was in zip((5, 13), others, strict=True)
        ]
        middle = storage.batch_get_v1(keys[2:4], slots(5, 6))
        same += [torch.equal(host.get_data_page(5 * PAGE), pages[2])]
        again = storage.batch_set_v1(keys, stored)
        storage.clear()
        return {
            "exists": [before, part],
            "set": [set_first, set_rest, again],
            "got": got,
            "middle": middle,
            "same": same,
            "untouched": untouched,
            "cleared": storage.batch_exists(keys),
        }
    finally:
        storage.close()


def trailing_case() -> dict[str, Any]:
    """A second pool of which the last two pages before some lengths are stored."""
    kv, window = host_pool(), host_pool()
    extra = {"backend_name": "l", "module_path": "m", "class_name": "c", "interface_v1": 1}
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, FOLDER, extra_config=extra | SETTINGS)
    from lmcache.engines.sglang.hicache import LMCacheStorage

    storage = LMCacheStorage(config, {})
    storage.register_mem_pool_host(kv)
    storage.register_mem_host_pool_v2(kv, PoolName.KV)
    storage.register_mem_host_pool_v2(window, PoolName.SWA)
    storage.on_host_pools_registered()
    try:
        keys = keys_of(77, 6)

        def swa(some: list[str], at: torch.Tensor | None = None) -> PoolTransfer:
            return PoolTransfer(PoolName.SWA, host_indices=at, keys=some, hit_policy=PoolHitPolicy.TRAILING_PAGES)

        pages = [window.get_data_page(page * PAGE).clone() for page in (1, 2)]
        set_swa = storage.batch_set_v2([swa(keys[2:4], slots(1, 2))])
        nothing = storage.batch_exists_v2(keys, [swa(keys[:2])]).restorable_prefix_pages
        storage.batch_set_v1(keys[:4], slots(1, 2, 3, 4))
        first = storage.batch_exists_v2(keys, [swa(keys[:2])])
        storage.batch_set_v1(keys[4:], slots(5, 6), None)
        gap = storage.batch_exists_v2(keys, [swa(keys[:2])])
        storage.batch_set_v2([swa(keys[5:], slots(6))])
        hole = storage.batch_exists_v2(keys, [swa(keys[:2])])
        storage.batch_set_v2([swa(keys[4:5], slots(5))])
        full = storage.batch_exists_v2(keys, [swa(keys[:2])])
        got = storage.batch_get_v2([swa(keys[2:4], slots(9, 8))])
        return {
            "set": set_swa,
            "restorable": [nothing, *(each.restorable_prefix_pages for each in (first, gap, hole, full))],
            "longest": [each.kv_hit_pages for each in (first, gap, hole, full)],
            "got": got,
            "same": [
                torch.equal(window.get_data_page(page * PAGE), was) for page, was in zip((9, 8), pages, strict=True)
            ],
            "not by its name": storage.batch_get_v1(keys[2:4], slots(9, 8)) == [True, True]
            and not torch.equal(kv.get_data_page(9 * PAGE), pages[0]),
        }
    finally:
        storage.close()


def updates_case() -> dict[str, Any]:
    """Two of HiCache's threads come while the weights have been exchanged."""
    from lmcache.engines.sglang.hicache import LMCacheStorage

    config = HiCacheStorageConfig(
        0, 1, 0, 1, 0, 1, False, False, False, FOLDER, extra_config={"interface_v1": 1} | SETTINGS
    )
    storage = LMCacheStorage(config, {})
    storage.register_mem_pool_host(host_pool())
    keys = keys_of(91, 2)
    storage.batch_set_v1(keys, slots(1, 2))
    old, register = storage._store("kv"), storage._register
    begun, go_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> None:
        begun.set()
        go_on.wait(30)
        register(*arguments)

    storage._register = slowly
    storage._updates.count += 1
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            first = threads.submit(storage._store, "kv")
            begun.wait(30)
            second = threads.submit(storage._store, "kv")
            early, _ = concurrent.futures.wait([second], 1)
            go_on.set()
            new = [first.result(), second.result()]
        return {
            "second waits": not early,
            "both get the new one": new[0] is new[1] and new[0] is not old,
            "found of the old": storage.batch_exists(keys),
        }
    finally:
        storage.close()


def watched_case() -> dict[str, Any]:
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from lmcache.engines.sglang.weight_updates import BRACKETS, UPDATES

    return {"calls": [hasattr(getattr(WeightUpdater, name), "__wrapped__") for name in (*UPDATES, *BRACKETS)]}


def host_pool() -> Any:
    host = MHATokenToKVPoolHost(
        *(mha().get_device_pool_infos()[0].buffer_info, 2.0, 0, PAGE, "page_first_direct"),
        pin_memory=False,
        device_capacity_tokens=SLOTS,
        start_layer=0,
        end_layer=LAYERS,
    )
    fill(host.kv_buffer)
    return host


# ----------------------------------------------------------------------------------------------------------- the linker


class HybridLinearKVPool:
    """As SGLang's of that name is to the linker: attention beside states."""

    def __init__(self, full: Any) -> None:
        self.full_kv_pool = full
        self.device, self.size, self.layer_num = "cpu", full.size, LAYERS


def make_linker(kvcache: Any, states: Any = None, window: int = 0, **extra: Any) -> LMCacheLinker:
    params = SimpleNamespace(
        page_size=PAGE,
        pp_size=1,
        attn_cp_size=1,
        attn_tp_cache_group=None,
        tp_cache_group=None,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kvcache),
        req_to_token_pool=SimpleNamespace(mamba_pool=states, register_layer_transfer_counter=lambda counter: None),
        swa_retain_window=window or None,
    )
    args = SimpleNamespace(model_path=FOLDER, dcp_size=1)
    return LMCacheLinker(args, params, components=set(), extra_config=SETTINGS | extra, a_later_argument=True)


def transfer(name: PoolName, keys: list[str], indices: torch.Tensor | None = None) -> PoolTransfer:
    policy = PoolHitPolicy.ALL_PAGES if name is PoolName.KV else PoolHitPolicy.TRAILING_PAGES
    return PoolTransfer(name, device_indices=indices, keys=keys, hit_policy=policy)


def offloaded(linker: LMCacheLinker, *transfers: PoolTransfer) -> bool:
    assert linker.offload(list(transfers), session_id=None)
    end = time.monotonic() + 30
    while not linker.num_completed_offloads():
        assert time.monotonic() < end
        time.sleep(0.005)
    return linker.pop_completed_offload()


def plain_case(kvcache: Any, buffers: list[torch.Tensor], seed: int, **extra: Any) -> dict[str, Any]:
    fill(*buffers)
    linker = make_linker(kvcache, **extra)
    try:
        keys = keys_of(seed, 4)
        before = linker.lookup("r", [transfer(PoolName.KV, keys)])
        wanted = [buffer[slots(5, 2, 9, 3)].clone() for buffer in buffers]
        elsewhere = [buffer[slots(1, 10)].clone() for buffer in buffers]
        stored = offloaded(linker, transfer(PoolName.KV, keys, slots(5, 2, 9, 3)))
        again = offloaded(linker, transfer(PoolName.KV, keys, slots(5, 2, 9, 3)))
        found = linker.lookup("r", [transfer(PoolName.KV, [*keys, "e" * 64])])
        tail = linker.lookup("r", [transfer(PoolName.KV, keys[2:])])
        loaded = linker.load("r", [transfer(PoolName.KV, keys, slots(12, 11, 14, 13))])
        absent = linker.load("s", [transfer(PoolName.KV, [*keys, "e" * 64], slots(4, 6, 7, 8, 15))])
        crooked = linker.load("t", [transfer(PoolName.KV, keys[:1], torch.arange(3, 3 + PAGE))])
        return {
            "lookups": [before, found, tail],
            "stored": [stored, again],
            "loaded": [loaded, absent, crooked],
            "same": all(torch.equal(b[slots(12, 11, 14, 13)], w) for b, w in zip(buffers, wanted, strict=True)),
            "untouched": all(torch.equal(b[slots(1, 10)], w) for b, w in zip(buffers, elsewhere, strict=True)),
            "layers": [linker.start_layer_wise_loading(), linker.finish_layer_wise_loading(-1)],
        }
    finally:
        linker.close()


def window_case() -> dict[str, Any]:
    kvcache = SWAKVPool(
        size=SLOTS,
        size_swa=SLOTS,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=2,
        head_dim=16,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1],
        device="cpu",
    )
    full, swa = kvcache.full_kv_pool, kvcache.swa_kv_pool
    fill(*full.k_buffer, *full.v_buffer, *swa.k_buffer, *swa.v_buffer)
    linker = make_linker(kvcache, window=WINDOW)
    try:
        keys = keys_of(55, 6)
        wanted_full = [b[slots(1, 2, 3, 4, 5, 6)].clone() for b in (*full.k_buffer, *full.v_buffer)]
        wanted_swa = [b[slots(9, 8)].clone() for b in (*swa.k_buffer, *swa.v_buffer)]

        def ask(pages: int) -> list[int]:
            return linker.lookup("r", [transfer(PoolName.KV, keys[:pages]), transfer(PoolName.SWA, keys[-2:])])

        stored = [
            offloaded(
                linker,
                transfer(PoolName.SWA, keys[2:4], slots(7, 3)),
                transfer(PoolName.KV, keys[:4], slots(1, 2, 3, 4)),
            )
        ]
        first = [ask(6), ask(3)]
        stored += [
            offloaded(
                linker, transfer(PoolName.KV, keys[4:], slots(5, 6)), transfer(PoolName.SWA, keys[4:], slots(9, 8))
            )
        ]
        second = [ask(6), ask(5), ask(3)]
        every = linker._store.restorable(b"".join(bytes.fromhex(key)[:16] for key in keys), patience=1.0)
        loaded = linker.load(
            "r",
            [
                transfer(PoolName.KV, keys, slots(7, 8, 9, 10, 11, 12)),
                transfer(PoolName.SWA, keys[4:], slots(12, 14)),
            ],
        )
        return {
            "stored": stored,
            "lookups": [first, second],
            "every": every,
            "loaded": loaded,
            "same full": all(
                torch.equal(b[slots(7, 8, 9, 10, 11, 12)], w)
                for b, w in zip((*full.k_buffer, *full.v_buffer), wanted_full, strict=True)
            ),
            "same window": all(
                torch.equal(b[slots(12, 14)], w)
                for b, w in zip((*swa.k_buffer, *swa.v_buffer), wanted_swa, strict=True)
            ),
        }
    finally:
        linker.close()


def states_case() -> dict[str, Any]:
    full = mha(torch.float32)
    cache = SimpleNamespace(temporal=torch.zeros(2, 8, 3, 5), conv=[torch.zeros(2, 8, 7, dtype=torch.bfloat16)])
    fill(*full.k_buffer, *full.v_buffer, cache.temporal, *cache.conv)
    states = SimpleNamespace(mamba_cache=cache)
    linker = make_linker(HybridLinearKVPool(full), states)
    try:
        keys = keys_of(33, 4)
        wanted = [part[:, 5].clone() for part in (cache.temporal, *cache.conv)]
        stored = offloaded(
            linker,
            transfer(PoolName.KV, keys[:3], slots(1, 2, 3)),
            transfer(PoolName.MAMBA, keys[2:3], torch.tensor([5])),
        )
        stored_tail = offloaded(linker, transfer(PoolName.KV, keys[3:], slots(4)))
        found = linker.lookup("r", [transfer(PoolName.KV, keys), transfer(PoolName.MAMBA, keys[3:])])
        loaded = linker.load(
            "r",
            [
                transfer(PoolName.KV, keys[:3], slots(7, 8, 9)),
                transfer(PoolName.MAMBA, keys[2:3], torch.tensor([6])),
            ],
        )
        return {
            "stored": [stored, stored_tail],
            "lookup": found,
            "loaded": loaded,
            "same": all(
                torch.equal(part[:, 6], was) for part, was in zip((cache.temporal, *cache.conv), wanted, strict=True)
            ),
        }
    finally:
        linker.close()


def unknown_case() -> dict[str, Any]:
    class MHATokenToKVPoolOfTomorrow(MHATokenToKVPool):
        pass

    try:
        make_linker(MHATokenToKVPoolOfTomorrow(SLOTS, PAGE, torch.bfloat16, 2, 16, LAYERS, "cpu", False))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return {"refused": f"{type(error).__name__}: {error}"}
    return {}


def cases() -> Any:
    for kind in ("mha", "mla"):
        for layout in ("layer_first", "page_first", "page_first_direct"):
            yield f"hicache {kind} {layout}", lambda kind=kind, layout=layout: host_case(kind, layout)
    yield "hicache mha page_head", lambda: host_case("mha", "page_head")
    yield "hicache mha shm", lambda: host_case("mha", "page_first", "shm")
    yield "hicache trailing", trailing_case
    yield "hicache updates", updates_case
    yield "watched", watched_case
    pool = mha()
    yield "linker mha", lambda: plain_case(pool, [*pool.k_buffer, *pool.v_buffer], 21)
    latent = mla()
    yield "linker mla", lambda: plain_case(latent, list(latent.kv_buffer), 22)
    staged = mha(torch.float32)
    buffers = [*staged.k_buffer, *staged.v_buffer]
    yield "linker staged", lambda: plain_case(staged, buffers, 23, **{"lmcache.staging": True})
    yield "linker window", window_case
    yield "linker states", states_case
    yield "linker unknown", unknown_case


for name, case in cases():
    try:
        outcome = case()
    except Exception:  # noqa: BLE001 - the test is told
        outcome = {"error": traceback.format_exc()}
    print(json.dumps({"case": name, "outcome": outcome}, default=str), flush=True)
