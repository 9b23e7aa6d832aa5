"""vLLM's KV cache in our words: the geometry of its KV groups, and a byte view of every page.

Both are made in each worker, from the specs and from the tensors that vLLM registers. Nothing here assumes a shape:
where a page lies, and how long it is, follows from strides alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from lmcache.engines.copying import PageView
from lmcache.engines.vllm.adapter import ENGINE
from lmcache.errors import GeometryError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

Classify = Callable[[str, object], GroupKind | None]
"""`PluginManager.classify_kv_spec`."""

UNKNOWN_LAYOUT = "report it: this vLLM lays out its KV cache in a way that lmcache does not know"

HAND_OVER = "align"
"""vLLM's mode of recurrent groups that tells connectors, step by step, which block holds which snapshot."""
RECURRENT_MODES = frozenset({HAND_OVER, "all"})


@attrs.frozen
class SpecGroup:
    """One of vLLM's KV cache groups, before its tensors exist."""

    kind: GroupKind
    tokens_per_block: int
    """0 for scratch."""
    shards: int
    """Ranks that hold distinct bytes."""
    layers: tuple[str, ...]
    """Empty for scratch."""
    window: int = 0
    """Tokens of a sliding window or of a chunked-local span."""
    handed_over: bool = False
    """vLLM names the blocks of its snapshots in each step; their place in the block table says nothing."""
    specs: str = ""
    """vLLM's own words for what is in a page: a fact of the namespace."""


def spec_groups(kv_cache_config: Any, ranks: int, classify: Classify) -> tuple[SpecGroup, ...]:
    """Classify vLLM's groups. Called in the scheduler and in each worker, when the connector is made.

    Raises GeometryError for a spec that no plugin knows and for a kind that this connector does not serve: either could
    only be guessed at, and a wrong guess is wrong tokens.
    """
    return tuple(
        _spec_group(number, group, ranks, classify) for number, group in enumerate(kv_cache_config.kv_cache_groups)
    )


def _spec_group(number: int, group: Any, ranks: int, classify: Classify) -> SpecGroup:
    spec, layers = group.kv_cache_spec, tuple(group.layer_names)
    # vLLM rebuilds such groups itself from the group they replicate
    if not getattr(group, "enable_kv_transfer", True):
        return SpecGroup(GroupKind.SCRATCH, 0, 1, ())
    name = f"KV group {number} of {type(spec).__name__} (layer {layers[0] if layers else 'none'}, …)"
    if getattr(group, "host_resident", False):
        raise GeometryError(f"{name} lives in a pool of its own in host memory", remedy="switch HiSparse off")
    kinds = {_kind(number, layer, one, classify) for layer, one in _layer_specs(spec, layers)}
    if len(kinds) != 1:
        raise GeometryError(
            f"{name} mixes layers of kinds {sorted(kind.value for kind in kinds)}",
            remedy="answer one kind for all of its specs in `lmcache_classify_kv_spec`",
        )
    kind = kinds.pop()
    if kind is GroupKind.SCRATCH:
        return SpecGroup(kind, 0, 1, ())
    return SpecGroup(
        kind,
        spec.block_size,
        _shards(spec, ranks),
        layers,
        window=_window(name, kind, spec),
        handed_over=kind is GroupKind.RECURRENT and _recurrent_mode(name, spec) == HAND_OVER,
        specs="; ".join(sorted({repr(one) for _, one in _layer_specs(spec, ())})),
    )


def _one_fact(name: str, spec: Any, read: Callable[[Any], Any], what: str) -> Any:
    """What all layers of a group agree on. Raises GeometryError where they do not, or do not say."""
    facts = {read(one) for _, one in _layer_specs(spec, ())}
    if len(facts) != 1 or None in facts:
        raise GeometryError(
            f"{name} has {what} {', '.join(map(str, sorted(facts, key=str)))}", remedy="describe layers alike, or apart"
        )
    return facts.pop()


def _window(name: str, kind: GroupKind, spec: Any) -> int:
    match kind:
        case GroupKind.SLIDING_WINDOW:
            window = _one_fact(name, spec, lambda one: getattr(one, "sliding_window", None), "a window of")
            # kept for drafts that vLLM may have to take back; its block table expects them in a hit as well
            extra = _one_fact(name, spec, lambda one: getattr(one, "extra_retained_tokens", 0), "retained tokens of")
            return int(window + extra)
        case GroupKind.CHUNKED_LOCAL:
            return int(_one_fact(name, spec, lambda one: getattr(one, "attention_chunk_size", None), "a span of"))
        case _:
            return 0


def _recurrent_mode(name: str, spec: Any) -> str:
    """In which of vLLM's modes the group keeps snapshots. Raises GeometryError where it keeps none."""
    mode = str(_one_fact(name, spec, lambda one: getattr(one, "mamba_cache_mode", None), "a cache mode of"))
    if mode not in RECURRENT_MODES:
        raise GeometryError(
            f"{name} is recurrent and keeps no state snapshots (mamba_cache_mode is {mode})",
            remedy=f"start vLLM with --enable-prefix-caching --mamba-cache-mode {HAND_OVER}",
        )
    return mode


def _layer_specs(spec: Any, layers: Sequence[str]) -> Iterable[tuple[str, Any]]:
    """The spec of each layer; one for all of them unless vLLM wrapped one a layer."""
    wrapped = getattr(spec, "kv_cache_specs", None)
    return wrapped.items() if wrapped else [(layers[0] if layers else "no layer", spec)]


def _kind(number: int, layer: str, spec: object, classify: Classify) -> GroupKind:
    kind = classify(ENGINE, spec)
    if kind is None:
        raise GeometryError(
            f"nobody knows what the KV spec {type(spec).__module__}.{type(spec).__qualname__} of layer {layer} "
            f"(KV group {number}) means to a prefix cache",
            remedy="install or write a plugin whose `lmcache_classify_kv_spec` answers for it",
        )
    return kind


def _shards(spec: Any, ranks: int) -> int:
    """How many of the ranks hold distinct bytes; vLLM gives replicas to neighbours, as `Geometry.shard_of` does."""
    limits = {_shard_limit(one) for _, one in _layer_specs(spec, ())}
    limit = limits.pop() if len(limits) == 1 else None
    # where it is not known, or does not divide, nothing is shared: that costs memory and is never wrong
    return limit if limit and ranks % limit == 0 else ranks


def _shard_limit(spec: Any) -> int | None:
    return 1 if getattr(spec, "tp_replicated", False) else getattr(spec, "max_tp_shards", None)


def spec_facts(groups: Sequence[SpecGroup]) -> dict[str, str]:
    """Facts of the namespace: what vLLM says is in the pages of each group, where their sizes alone do not tell."""
    return {f"kv.specs.{number}": group.specs for number, group in enumerate(groups) if group.layers}


def snapshot_note(groups: Sequence[SpecGroup], kv_cache_config: Any, block_size: int) -> str:
    """What the user should know about where vLLM keeps snapshots; empty where there are none, or many.

    `block_size` is the scheduler's, in tokens.
    """
    interval = getattr(kv_cache_config, "prefix_cache_retention_interval", None)
    if interval != 0 or not any(group.handed_over for group in groups):
        return ""
    return (
        "this model has recurrent layers, and vLLM keeps their states at the ends of prompts only, so prompts that "
        "share no more than a beginning find nothing of it; to keep them at the ends of steps as well, start vLLM with "
        f"--prefix-cache-retention-interval {block_size}"
    )


def logged_blocks(groups: Sequence[SpecGroup]) -> str:
    """The start of the line that people grep for: `group_tokens_per_block=[64, 0]`; 0 is a scratch group."""
    return f"group_tokens_per_block={[group.tokens_per_block for group in groups]}"


# ----------------------------------------------------------------------------------------------- tensors, in the worker


def page_view(layer: str, tensor: Any, blocks: int) -> PageView:
    """Find the pages of one layer: its first axis counts `blocks` blocks, or a multiple where kernels split them.

    Raises GeometryError when a page is not one run of bytes.
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    if not shape or shape[0] % blocks:
        raise GeometryError(
            f"the KV cache of layer {layer} has shape {list(shape)}, which does not begin with {blocks} blocks",
            remedy=UNKNOWN_LAYOUT,
        )
    split = shape[0] // blocks
    inner = sorted(zip((strides[0], *strides[1:]), (split, *shape[1:]), strict=True))
    extent = 1
    for stride, size in inner:
        if size > 1 and stride != extent:
            raise GeometryError(
                f"a page of layer {layer} is not one run of bytes: shape {list(shape)}, strides {list(strides)}",
                remedy="set VLLM_KV_CACHE_LAYOUT to LBNHC or LBHNC",
            )
        extent *= size
    size = tensor.element_size()
    return PageView(tensor.storage_offset() * size, strides[0] * split * size, extent * size, split)


def build_geometry(
    groups: Sequence[SpecGroup], views: Mapping[str, PageView], ranks: int, hit_alignment: int
) -> Geometry:
    """Put specs and pages together. `hit_alignment` is vLLM's own granularity of hits, in tokens; 0 if it has none.

    vLLM itself may hit inside a block of a recurrent group. A chunk keeps no such snapshot, so hits of ours end at
    block ends, which every granularity of vLLM's allows.
    """
    whole = Geometry(tuple(_kv_group(group, views) for group in groups), ranks)
    return attrs.evolve(whole, hit_alignment=math.lcm(hit_alignment or 1, whole.block_multiple))


def _kv_group(group: SpecGroup, views: Mapping[str, PageView]) -> KVGroup:
    if group.kind is GroupKind.SCRATCH:
        return KVGroup(group.kind, 0, ())
    return KVGroup(
        group.kind,
        group.tokens_per_block,
        tuple(views[layer].page_bytes for layer in group.layers),
        window=group.window,
        shards=group.shards,
        layers=group.layers,
    )


def cached_layers(groups: Sequence[SpecGroup], kv_caches: Mapping[str, Any]) -> list[str]:
    """Names of the layers whose pages are stored, in order. Raises GeometryError when vLLM did not register one."""
    names = [layer for group in groups for layer in group.layers]
    missing = [name for name in names if name not in kv_caches]
    if missing:
        raise GeometryError(f"vLLM registered no KV cache for layers {missing}", remedy=UNKNOWN_LAYOUT)
    return names
