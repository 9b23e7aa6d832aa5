"""Specs and tensors of vLLM, described in our words; those here are only as much of vLLM's as is looked at."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmcache.engines.copying import page_array
from lmcache.engines.vllm.adapter import lmcache_classify_kv_spec
from lmcache.engines.vllm.describe import (
    PageView,
    build_geometry,
    cached_layers,
    logged_blocks,
    page_view,
    snapshot_note,
    spec_facts,
    spec_groups,
)
from lmcache.errors import GeometryError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup


def spec(name: str, module: str = "vllm.v1.kv_cache_interface", base: type = object, **fields: Any) -> Any:
    made = type(name, (base,), {"block_size": 64, **fields})
    made.__module__ = module
    return made()


def config(*groups: tuple[Any, Sequence[str]]) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=one, layer_names=list(names)) for one, names in groups]
    )


def described(*groups: tuple[Any, Sequence[str]], ranks: int = 1) -> Any:
    return spec_groups(config(*groups), ranks, lmcache_classify_kv_spec)


def tensor(shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0, item: int = 2) -> Any:
    """As much of a torch tensor as `page_view` asks; dense unless strides are given, in elements."""
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return SimpleNamespace(
        shape=shape,
        stride=lambda: tuple(strides or dense),
        element_size=lambda: item,
        storage_offset=lambda: offset,
    )


# ---------------------------------------------------------------------------------------------------------------- kinds


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("FullAttentionSpec", GroupKind.FULL),
        ("MLAAttentionSpec", GroupKind.FULL),
        ("SlidingWindowSpec", GroupKind.SLIDING_WINDOW),
        ("SlidingWindowMLASpec", GroupKind.SLIDING_WINDOW),
        ("ChunkedLocalAttentionSpec", GroupKind.CHUNKED_LOCAL),
        ("MambaSpec", GroupKind.RECURRENT),
        ("KpoolTailSpec", GroupKind.SCRATCH),
        ("RSWASpec", None),
        ("SinkFullAttentionSpec", None),
        ("HiddenStateCacheSpec", None),
    ],
)
def test_specs_are_known_by_their_exact_class(name: str, kind: GroupKind | None) -> None:
    base = type("FullAttentionSpec", (), {})
    assert lmcache_classify_kv_spec("vllm", spec(name, base=base)) is kind
    assert lmcache_classify_kv_spec("another", spec(name)) is None


def test_a_spec_that_says_it_is_no_prefix_cache_is_scratch_whatever_its_class() -> None:
    assert lmcache_classify_kv_spec("vllm", spec("CircularBufferSpec", prefix_cacheable=False)) is GroupKind.SCRATCH
    assert lmcache_classify_kv_spec("vllm", spec("OfAPlugin", "a.plugin", prefix_cacheable=False)) is GroupKind.SCRATCH
    assert lmcache_classify_kv_spec("vllm", spec("KpoolTailSpec", prefix_cacheable=True)) is None


def test_a_class_of_the_same_name_from_elsewhere_is_not_known() -> None:
    assert lmcache_classify_kv_spec("vllm", spec("FullAttentionSpec", "a.plugin")) is None


def test_attention_that_looks_ahead_is_not_known() -> None:
    assert lmcache_classify_kv_spec("vllm", spec("FullAttentionSpec", non_causal=True)) is None


# --------------------------------------------------------------------------------------------------------------- groups


def test_glm_shows_one_group_of_64_tokens_and_a_scratch_group_as_0() -> None:
    wrapped = spec(
        "UniformTypeKVCacheSpecs",
        kv_cache_specs={
            "mla": spec("MLAAttentionSpec", max_tp_shards=1),
            "indexer": spec("MLAAttentionSpec", max_tp_shards=1),
        },
    )
    tail = spec("CircularBufferSpec", prefix_cacheable=False)
    groups = described((wrapped, ["mla", "indexer"]), (tail, ["kpool"]), ranks=8)
    assert logged_blocks(groups) == "group_tokens_per_block=[64, 0]"
    assert (groups[0].shards, groups[0].layers) == (1, ("mla", "indexer"))
    assert groups[1].layers == ()


@pytest.mark.parametrize(("limit", "ranks", "shards"), [(None, 8, 8), (1, 8, 1), (4, 8, 4), (16, 8, 8), (3, 8, 8)])
def test_ranks_share_bytes_only_where_vllm_says_how_many_hold_distinct_ones(
    limit: int | None, ranks: int, shards: int
) -> None:
    [group] = described((spec("FullAttentionSpec", max_tp_shards=limit), ["l"]), ranks=ranks)
    assert group.shards == shards


def test_an_unknown_spec_is_refused_by_class_layer_and_hook() -> None:
    with pytest.raises(GeometryError) as refused:
        described((spec("FullAttentionSpec"), ["a"]), (spec("RSWASpec"), ["b", "c"]))
    assert str(refused.value) == (
        "nobody knows what the KV spec vllm.v1.kv_cache_interface.RSWASpec of layer b (KV group 1) means to a prefix "
        "cache; install or write a plugin whose `lmcache_classify_kv_spec` answers for it"
    )


@pytest.mark.parametrize(
    ("one", "kind", "window"),
    [
        (spec("SlidingWindowSpec", sliding_window=128), GroupKind.SLIDING_WINDOW, 128),
        # drafts that vLLM may take back need what lies behind the window
        (spec("SlidingWindowSpec", sliding_window=128, extra_retained_tokens=3), GroupKind.SLIDING_WINDOW, 131),
        (spec("SlidingWindowMLASpec", sliding_window=512, prefix_cacheable=True), GroupKind.SLIDING_WINDOW, 512),
        (spec("ChunkedLocalAttentionSpec", attention_chunk_size=8192), GroupKind.CHUNKED_LOCAL, 8192),
        (spec("FullAttentionSpec", sliding_window=128), GroupKind.FULL, 0),
    ],
)
def test_a_window_is_what_the_block_table_of_a_hit_holds(one: Any, kind: GroupKind, window: int) -> None:
    [group] = described((one, ["l"]))
    assert (group.kind, group.window) == (kind, window)
    geometry = build_geometry([group], {"l": PageView(0, 64, 64, 1)}, 1, 0)
    assert geometry.groups[0].window == window


def test_layers_of_two_windows_in_one_group_are_refused() -> None:
    wrapped = spec(
        "UniformTypeKVCacheSpecs",
        kv_cache_specs={
            "a": spec("SlidingWindowSpec", sliding_window=128),
            "b": spec("SlidingWindowSpec", sliding_window=64),
        },
    )
    with pytest.raises(GeometryError, match=r"\(layer a, …\) has a window of 128, 64"):
        described((wrapped, ["a", "b"]))


@pytest.mark.parametrize(("mode", "handed_over"), [("align", True), ("all", False)])
def test_snapshots_are_handed_over_or_found_by_their_place(mode: str, handed_over: bool) -> None:
    window, snapshots = described(
        (spec("SlidingWindowSpec", sliding_window=128), ["a"]),
        (spec("MambaSpec", mamba_cache_mode=mode), ["b"]),
        ranks=2,
    )
    assert (snapshots.kind, snapshots.handed_over, snapshots.shards) == (GroupKind.RECURRENT, handed_over, 2)
    assert not window.handed_over


@pytest.mark.parametrize(
    ("mode", "interval", "said"), [("align", 0, True), ("align", 256, False), ("align", None, False), ("all", 0, False)]
)
def test_whoever_runs_recurrent_layers_is_told_where_states_are_kept(
    mode: str, interval: int | None, said: bool
) -> None:
    cache = config((spec("MambaSpec", mamba_cache_mode=mode), ["l"]))
    cache.prefix_cache_retention_interval = interval
    note = snapshot_note(spec_groups(cache, 1, lmcache_classify_kv_spec), cache, 544)
    assert note.endswith("start vLLM with --prefix-cache-retention-interval 544") == said
    assert bool(note) == said


def test_a_recurrent_state_that_every_rank_holds_is_stored_once() -> None:
    [group] = described((spec("MambaSpec", mamba_cache_mode="align", tp_replicated=True), ["l"]), ranks=4)
    assert group.shards == 1


def test_a_recurrent_group_without_snapshots_is_refused_with_the_flag_to_set() -> None:
    with pytest.raises(GeometryError) as refused:
        described((spec("MambaSpec", mamba_cache_mode="none"), ["model.layers.0.mixer"]))
    assert str(refused.value) == (
        "KV group 0 of MambaSpec (layer model.layers.0.mixer, …) is recurrent and keeps no state snapshots "
        "(mamba_cache_mode is none); start vLLM with --enable-prefix-caching --mamba-cache-mode align"
    )


def test_a_group_in_a_pool_of_host_memory_is_refused() -> None:
    cache = config((spec("FullAttentionSpec"), ["l"]))
    cache.kv_cache_groups[0].host_resident = True
    with pytest.raises(GeometryError, match=r"\(layer l, …\) lives in a pool of its own.*switch HiSparse"):
        spec_groups(cache, 1, lmcache_classify_kv_spec)


def test_a_group_that_vllm_rebuilds_itself_is_scratch() -> None:
    cache = config((spec("FullAttentionSpec"), ["l"]))
    cache.kv_cache_groups[0].enable_kv_transfer = False
    [group] = spec_groups(cache, 1, lmcache_classify_kv_spec)
    assert (group.kind, group.layers) == (GroupKind.SCRATCH, ())


def test_what_vllm_says_of_a_page_is_a_fact_though_its_size_is_the_same() -> None:
    first, second = (described((spec("FullAttentionSpec", __repr__=lambda _, d=d: d), ["l"])) for d in ("fp8", "int8"))
    assert spec_facts(first) == {"kv.specs.0": "fp8"}
    assert spec_facts(first) != spec_facts(second)


@pytest.mark.parametrize(("vllms", "ours"), [(0, 192), (64, 192), (16, 192), (384, 384), (128, 384)])
def test_hits_end_where_vllm_allows_and_every_group_has_a_block_end(vllms: int, ours: int) -> None:
    groups = described(
        (spec("FullAttentionSpec", block_size=64), ["a"]), (spec("FullAttentionSpec", block_size=96), ["b"])
    )
    views = {"a": PageView(0, 64, 64, 1), "b": PageView(0, 64, 64, 1)}
    assert build_geometry(groups, views, 1, vllms).alignment == ours


def test_layers_of_two_kinds_in_one_group_are_refused() -> None:
    wrapped = spec(
        "UniformTypeKVCacheSpecs",
        kv_cache_specs={"a": spec("FullAttentionSpec"), "b": spec("CircularBufferSpec", prefix_cacheable=False)},
    )
    with pytest.raises(GeometryError, match=r"mixes layers of kinds \['full', 'scratch'\]"):
        described((wrapped, ["a", "b"]))


def test_a_layer_that_vllm_does_not_register_is_missed_by_name() -> None:
    groups = described((spec("FullAttentionSpec"), ["a", "b"]))
    with pytest.raises(GeometryError, match=r"no KV cache for layers \['b'\]"):
        cached_layers(groups, {"a": None})


def test_the_geometry_has_the_pages_of_each_layer_in_order() -> None:
    groups = described((spec("FullAttentionSpec"), ["a", "b"]), ranks=2)
    views = {"a": PageView(0, 128, 128, 1), "b": PageView(0, 96, 96, 1)}
    geometry = build_geometry(groups, views, 2, 64)
    assert geometry == Geometry((KVGroup(GroupKind.FULL, 64, (128, 96), shards=2, layers=("a", "b")),), 2, 64)


# ---------------------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize(
    ("shape", "strides", "view"),
    [
        # blocks, heads, tokens, content: dense
        ([10, 4, 128, 64], None, PageView(0, 65536, 65536, 1)),
        # heads and tokens swapped in memory: still one run
        ([10, 4, 16, 8], [512, 8, 32, 1], PageView(0, 1024, 1024, 1)),
        # padded behind each page
        ([10, 1, 1, 100], [256, 100, 100, 1], PageView(0, 512, 200, 1)),
        # all layers of a block side by side
        ([10, 1, 16, 36], [4608, 576, 36, 1], PageView(0, 9216, 1152, 1)),
        # two kernel blocks a block
        ([20, 1, 16, 8], None, PageView(0, 512, 512, 2)),
    ],
    ids=["dense", "permuted", "padded", "block outermost", "kernel blocks"],
)
def test_pages_are_found_by_strides(shape: list[int], strides: list[int] | None, view: PageView) -> None:
    assert page_view("l", tensor(shape, strides), 10) == view


def test_a_page_may_start_anywhere_in_its_storage() -> None:
    assert page_view("l", tensor([10, 16], offset=33), 10).offset == 66


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ([10, 4, 16, 8], [128, 1280, 8, 1]),  # heads outside blocks
        ([20, 1, 16, 8], [256, 128, 8, 1]),  # kernel blocks with a gap between them
        ([10, 4, 16, 8], [512, 128, 0, 1]),  # the same bytes twice
    ],
)
def test_a_page_that_is_no_run_of_bytes_is_refused_with_the_layout_to_set(shape: list[int], strides: list[int]) -> None:
    with pytest.raises(GeometryError) as refused:
        page_view("model.layers.3.attn", tensor(shape, strides), 10)
    assert "model.layers.3.attn" in str(refused.value)
    assert refused.value.remedy == "set VLLM_KV_CACHE_LAYOUT to LBNHC or LBHNC"


def test_a_first_axis_that_counts_no_blocks_is_refused() -> None:
    with pytest.raises(GeometryError, match="does not begin with 10 blocks"):
        page_view("l", tensor([2, 10, 16]), 10)


def test_writing_a_page_writes_the_storage() -> None:
    storage = np.zeros(1000, np.uint8)
    pages = page_array(storage, PageView(10, 100, 40, 1), 9)
    pages[2] = 7
    assert np.flatnonzero(storage).tolist() == list(range(210, 250))
    assert pages.shape == (9, 40)
