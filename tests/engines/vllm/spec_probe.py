"""Checks on vLLM's own classes, without an engine. Runs in a process of its own, because importing vLLM takes its time.

python spec_probe.py          prints one JSON object: name of each check → "ok", or how it failed
"""

import json
import os
import sys
import traceback
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_NO_USAGE_STATS"] = "1"

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.kv_cache_layout import KVCacheLayout

from lmcache.engines.copy import Copier, Pages
from lmcache.engines.copying import page_array
from lmcache.engines.staging import StagedCopier, StagedPages
from lmcache.engines.storage_bytes import StorageBytes
from lmcache.engines.vllm import register
from lmcache.engines.vllm.adapter import lmcache_classify_kv_spec as classify
from lmcache.engines.vllm.checks import check_connector
from lmcache.engines.vllm.connector import LMCacheMPConnector
from lmcache.engines.vllm.describe import build_geometry, logged_blocks, page_view, spec_groups
from lmcache.engines.vllm.registration import without_borrowers
from lmcache.errors import ConfigError, GeometryError
from lmcache.geometry.groups import GroupKind, KVGroup
from lmcache.geometry.layout import object_layout

BF16 = torch.bfloat16
LATENT = kv.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=BF16, max_tp_shards=1)
INDEXER = kv.MLAAttentionSpec(
    block_size=64,
    num_kv_heads=1,
    head_size=132,
    dtype=torch.uint8,
    max_tp_shards=1,
    cache_role=kv.SparseCacheRole.INDEXER,
)
FULL = kv.FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=BF16)
RING = kv.CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=128, dtype=BF16)


def classes_are_known_exactly() -> None:
    common = {"block_size": 16, "num_kv_heads": 4, "head_size": 64, "dtype": BF16}
    window = {**common, "sliding_window": 128}
    expected = [
        (FULL, GroupKind.FULL),
        (LATENT, GroupKind.FULL),
        (kv.SlidingWindowSpec(**window), GroupKind.SLIDING_WINDOW),
        (kv.SlidingWindowMLASpec(**window), GroupKind.SLIDING_WINDOW),
        (kv.SlidingWindowMLASpec(**window, bounded_replay=True), GroupKind.SCRATCH),
        (kv.ChunkedLocalAttentionSpec(**common, attention_chunk_size=64), GroupKind.CHUNKED_LOCAL),
        (kv.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(BF16,)), GroupKind.RECURRENT),
        (RING, GroupKind.SCRATCH),
        (kv.HiSparseHotSpec(block_size=16, page_size=64, blocks_per_request=1), GroupKind.SCRATCH),
        (kv.RSWASpec(**common, rswa_window=64), None),
        (kv.SinkFullAttentionSpec(**common, sink_len=4), None),
        (kv.HiddenStateCacheSpec(**common), None),
        (kv.CrossAttentionSpec(**common), None),
        (kv.FullAttentionSpec(**common, non_causal=True), None),
    ]
    for spec, kind in expected:
        assert classify("vllm", spec) is kind, (spec, classify("vllm", spec))


def glm() -> Any:
    """Two layers as GLM-5.3's, each with a latent and an indexer page, and the ring that its Flash variant adds."""
    layers = {f"layers.{n}.{part}": spec for n in (0, 1) for part, spec in (("attn", LATENT), ("indexer", INDEXER))}
    wrapped = kv.UniformTypeKVCacheSpecs.from_specs(layers)
    assert wrapped is not None
    return [
        kv.KVCacheGroupSpec(list(layers), wrapped),
        kv.KVCacheGroupSpec(["layers.0.kpool"], RING),
    ]


def glm_shows_one_group_of_64_and_a_scratch_group() -> None:
    groups = spec_groups(SimpleNamespace(kv_cache_groups=glm()), 8, classify)
    assert logged_blocks(groups) == "group_tokens_per_block=[64, 0]"
    assert (groups[0].shards, len(groups[0].layers)) == (1, 4)


def views(layout: KVCacheLayout, blocks: int) -> dict[str, torch.Tensor]:
    """vLLM's own views of random memory: the two latent layers, then the two indexer layers, placed as vLLM does."""
    made: dict[str, torch.Tensor] = {}
    offset, total = 0, 2 * (LATENT.page_size_bytes + INDEXER.page_size_bytes)
    raw = torch.randint(0, 256, (total * blocks,), dtype=torch.uint8).view(torch.int8)
    for part, spec in (("attn", LATENT), ("indexer", INDEXER)):
        names, page = [f"layers.{n}.{part}" for n in (0, 1)], spec.page_size_bytes
        packed = layout.is_block_outermost
        place = kv.KVCacheTensor(
            size=len(raw),
            layers=names,
            layer_stride=page if packed else page * blocks,
            block_stride=total if packed else page,
            offset=offset,
        )
        made |= dict(zip(names, kv.create_kv_cache_views(raw, spec, blocks, layout, place), strict=True))
        offset += 2 * page * (1 if packed else blocks)
    return made


def check_copies(layout: KVCacheLayout, *, staged: bool) -> None:
    blocks = 12
    tensors = views(layout, blocks)
    groups = spec_groups(SimpleNamespace(kv_cache_groups=glm()), 1, classify)
    found = {name: page_view(name, tensor, blocks) for name, tensor in tensors.items()}
    geometry = build_geometry(groups, found, 1, 64)
    assert geometry.groups[0].page_bytes == (73728, 8448, 73728, 8448)
    cell = 1 << 17
    plan = object_layout(geometry.groups[0], 256, cell)
    names = groups[0].layers
    if staged:
        copier: Any = StagedCopier(
            StagedPages([tensors[n] for n in names], [found[n] for n in names], blocks), plan, cell
        )
    else:
        storages = StorageBytes()
        copier = Copier(Pages([page_array(storages.of(tensors[n]), found[n], blocks) for n in names]), plan, cell)
    arena, cells = np.zeros(plan.cells * cell, np.uint8), list(range(plan.cells))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    copier.store(arena, cells, [7, 2, 9, 4])
    copier.load(arena, cells, [0, 1, 5, 11])
    copier.load(arena, cells, [3, 8], first=1)
    moved = {0: 7, 1: 2, 5: 9, 11: 4, 3: 2, 8: 9}
    for name, tensor in tensors.items():
        for block in range(blocks):
            bits = torch.uint8 if tensor.dtype == torch.uint8 else torch.int16
            assert torch.equal(tensor[block].view(bits), before[name][moved.get(block, block)].view(bits)), (
                name,
                block,
            )


def glm_pages_are_copied_with_layers_outermost() -> None:
    check_copies(KVCacheLayout.LBNHC, staged=False)


def glm_pages_are_copied_with_blocks_outermost() -> None:
    check_copies(KVCacheLayout.BLNHC, staged=False)


def glm_pages_are_copied_through_buffers() -> None:
    for layout in (KVCacheLayout.LBNHC, KVCacheLayout.BLNHC):
        check_copies(layout, staged=True)


def pages_of_any_alignment_are_copied_through_buffers() -> None:
    raw = torch.randint(0, 256, (1 + 7 * 50,), dtype=torch.uint8)
    tensor = raw[1:].view(50, 7)[:, :5]
    view = page_view("l", tensor, 50)
    group = KVGroup(GroupKind.FULL, 4, (5,))
    plan = object_layout(group, 16, 11)
    copier = StagedCopier(StagedPages([tensor], [view], 50), plan, 11)
    arena, before = np.zeros(44, np.uint8), tensor.clone()
    copier.store(arena, [3, 1], [9, 8, 7, 6])
    copier.load(arena, [3, 1], [1, 2, 3, 4])
    assert torch.equal(tensor[1:5], before[[9, 8, 7, 6]])
    assert torch.equal(tensor[5:], before[5:])


def a_block_that_is_not_there_moves_nothing_through_buffers() -> None:
    tensor = torch.zeros(4, 8, dtype=torch.uint8)
    group = KVGroup(GroupKind.FULL, 4, (8,))
    copier = StagedCopier(StagedPages([tensor], [page_view("l", tensor, 4)], 4), object_layout(group, 8, 64), 64)
    arena = np.ones(64, np.uint8)
    for attempt in (
        lambda: copier.store(arena, [0], [0, 4]),
        lambda: copier.store(arena, [0], [0]),
        lambda: copier.load(arena, [0], [-1, 0]),
    ):
        refused(IndexError, "of an engine with 4 blocks", attempt)
    assert not tensor.any()


def pages_with_heads_outside_blocks_are_refused() -> None:
    place = kv.KVCacheTensor(size=0, layers=["l"], layer_stride=FULL.page_size_bytes * 4, block_stride=4096)
    raw = torch.zeros(FULL.page_size_bytes * 4, dtype=torch.int8)
    [tensor] = kv.create_kv_cache_views(raw, FULL, 4, KVCacheLayout.LHBNC, place)
    refused(GeometryError, "not one run of bytes", lambda: page_view("l", tensor, 4))


def our_class_is_registered_however_often() -> None:
    for _ in range(3):
        register.register()
    assert KVConnectorFactory.get_connector_class_by_name("LMCacheMPConnector") is LMCacheMPConnector


def connector(extra: dict[str, Any] | None = None, groups: Any = None, **parallel: int) -> LMCacheMPConnector:
    sizes = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "rank": 0,
    }
    transfer = KVTransferConfig(
        kv_connector="LMCacheMPConnector", kv_role="kv_both", kv_connector_extra_config=extra or {}
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer, parallel_config=SimpleNamespace(**sizes | parallel), lora_config=None
    )
    cache = SimpleNamespace(kv_cache_groups=groups or [kv.KVCacheGroupSpec(["l"], FULL)])
    return LMCacheMPConnector(config, KVConnectorRole.WORKER, cache)


def a_connector_is_a_cache_that_survives_failed_loads() -> None:
    made = connector()
    assert made._kv_transfer_config.kv_load_failure_policy == "recompute"
    assert made.requires_kv_delivery is False
    assert supports_hma(LMCacheMPConnector)
    assert made.reset_cache() is True
    made.shutdown()
    made.shutdown()


def what_another_connector_found_out_in_the_workers_is_not_taken_for_ours() -> None:
    # vLLM's MultiConnector hands over the first metadata that any of its connectors has, to all of them
    foreign = {(0, 0): KVConnectorHandshakeMetadata()}
    refused(
        ConfigError, "name LMCacheMPConnector first", lambda: connector().set_xfer_handshake_metadata_pp_aware(foreign)
    )
    refused(ConfigError, "name LMCacheMPConnector first", lambda: connector().set_xfer_handshake_metadata_pp_aware({}))


def a_misspelt_key_is_refused() -> None:
    refused(ConfigError, "did you mean lmcache.mp.port?", lambda: connector({"lmcache.mp.prot": 1}))


def other_ways_to_split_a_model_are_refused() -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        refused(ConfigError, f"{name} is 2", lambda name=name: connector(**{name: 2}))


def a_recurrent_group_without_snapshots_is_refused_with_layer_and_class() -> None:
    state = kv.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(BF16,))
    groups = [kv.KVCacheGroupSpec(["model.layers.1.mixer"], state)]
    refused(
        GeometryError,
        "KV group 0 of MambaSpec (layer model.layers.1.mixer, …) is recurrent and keeps no state snapshots",
        lambda: connector(groups=groups),
    )


def a_layer_that_reads_the_pages_of_another_is_left_out() -> None:
    raw = torch.zeros(2, 6, 32, dtype=torch.uint8)
    tensors = {"own": raw[0], "also own": raw[1], "borrower": raw[0].view(6, 2, 16)}
    [group] = spec_groups(
        SimpleNamespace(kv_cache_groups=[kv.KVCacheGroupSpec(["own", "also own", "borrower"], FULL)]), 1, classify
    )
    assert without_borrowers(group, tensors).layers == ("own", "also own")
    assert without_borrowers(group, {"own": raw[0]}).layers == ("own", "also own", "borrower")


def another_vllm_is_refused_only_if_it_lacks_what_is_needed() -> None:
    check_connector("0.99.0", LMCacheMPConnector.__mro__)
    refused(ConfigError, "vllm 0.11.0 does not offer on_new_request", lambda: check_connector("0.11.0", [object]))


def refused(kind: type[Exception], words: str, attempt: Any) -> None:
    try:
        attempt()
    except kind as error:
        message = str(error)
    else:
        message = "nothing was refused"
    assert words in message, message


CHECKS = (
    classes_are_known_exactly,
    glm_shows_one_group_of_64_and_a_scratch_group,
    glm_pages_are_copied_with_layers_outermost,
    glm_pages_are_copied_with_blocks_outermost,
    glm_pages_are_copied_through_buffers,
    pages_of_any_alignment_are_copied_through_buffers,
    a_block_that_is_not_there_moves_nothing_through_buffers,
    pages_with_heads_outside_blocks_are_refused,
    our_class_is_registered_however_often,
    a_connector_is_a_cache_that_survives_failed_loads,
    what_another_connector_found_out_in_the_workers_is_not_taken_for_ours,
    a_misspelt_key_is_refused,
    other_ways_to_split_a_model_are_refused,
    a_recurrent_group_without_snapshots_is_refused_with_layer_and_class,
    a_layer_that_reads_the_pages_of_another_is_left_out,
    another_vllm_is_refused_only_if_it_lacks_what_is_needed,
)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    results = {}
    for check in CHECKS:
        try:
            check()
            results[check.__name__] = "ok"
        except Exception:  # noqa: BLE001 - the test is told
            results[check.__name__] = traceback.format_exc()
    print(json.dumps(results), file=answers, flush=True)


if __name__ == "__main__":
    sys.exit(main())
