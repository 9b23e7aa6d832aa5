"""How vLLM 0.32 sorts layers into KV groups, without vLLM.

A group's layers share block ids, so they share a block size, and what holds for one holds for all. Groups share memory:
where the pages of a layer lie together (`blocks_outermost` is False) all groups must have equal pages and equally many
layers, so block sizes are scaled, pages padded, and kinds with more layers split. Otherwise groups are packed into
blocks as wide as the widest.

Follows `get_kv_cache_groups` of `vllm.v1.core.kv_cache_utils`, function by function.
"""

from collections.abc import Sequence

import attrs

from lmcache.engines.models.layers import CacheLayer, Heads, Layers, LayerSpec, State
from lmcache.errors import GeometryError

VERSION = "0.32"
"""Of the vLLM whose rules these are."""

Group = tuple[CacheLayer, ...]


def group_layers(layers: Layers) -> tuple[Group, ...]:
    """Sort what a model keeps into KV groups, in vLLM's order. Raises GeometryError where vLLM could not."""
    every = layers.layers
    if _one_family(every):
        return (every,)
    if layers.blocks_outermost and len({layer.spec.page_bytes for layer in every}) > 1:
        return _packed(every)
    return _equal_pages(_unified(every))


def _one_family(layers: Sequence[CacheLayer]) -> bool:
    return len({(layer.spec.family, layer.spec.block_size) for layer in layers}) == 1


# ---------------------------------------------------------------------------------------------- pages of one size


def _unified(layers: Group) -> Group:
    """All pages made as large as the largest: by longer blocks where that fits, else by padding."""
    page = max(layer.spec.page_bytes for layer in layers)
    return tuple(attrs.evolve(layer, spec=_widened(layer, page)) for layer in layers)


def _widened(layer: CacheLayer, page: int) -> LayerSpec:
    spec = layer.spec
    if spec.page_bytes == page:
        return spec
    if isinstance(spec, State):
        return attrs.evolve(spec, padded=page)
    if page % spec.page_bytes == 0:
        return attrs.evolve(spec, block_size=spec.block_size * (page // spec.page_bytes))
    if isinstance(spec, Heads):
        return attrs.evolve(spec, padded=page)
    raise GeometryError(
        f"a page of layer {layer.name} has {spec.page_bytes} bytes, which do not divide the {page} of the largest",
        remedy="start the engine, which may know a way, and ask it with --server",
    )


def _equal_pages(layers: Group) -> tuple[Group, ...]:
    """Groups of equally many layers: as many as the rarest kind has."""
    kinds: dict[LayerSpec, list[CacheLayer]] = {}
    for layer in layers:
        kinds.setdefault(layer.spec, []).append(layer)
    counts = [len(each) for each in kinds.values()]
    # a few missing layers are better than twice as many groups
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups: list[Group] = []
    for each in kinds.values():
        number = -(-len(each) // size)
        groups += [tuple(each[first::number]) for first in range(number)]
    return tuple(groups)


# ------------------------------------------------------------------------------------------ blocks of many pages


@attrs.frozen
class _Bucket:
    """Layers of one family and block size."""

    layers: Group

    @property
    def spec(self) -> LayerSpec:
        return self.layers[0].spec

    @property
    def by_page(self) -> dict[int, list[CacheLayer]]:
        """Layers by the weight of their pages."""
        found: dict[int, list[CacheLayer]] = {}
        for layer in self.layers:
            found.setdefault(layer.spec.page_bytes, []).append(layer)
        return found

    @property
    def repeats(self) -> int:
        """How often the pattern of pages repeats."""
        return max(map(len, self.by_page.values()))

    @property
    def balanced(self) -> bool:
        """Whether each page size has equally many layers, so that a part of the layers is a smaller such bucket."""
        return len(set(map(len, self.by_page.values()))) == 1

    def widest(self, groups: int) -> int:
        """Bytes of a block in the largest of so many groups."""
        return sum(-(-len(layers) // groups) * page for page, layers in self.by_page.items())

    def split(self, groups: int) -> tuple[Group, ...]:
        """Every `groups`-th repeat of the pattern to each group."""
        if groups == 1:
            return (self.layers,)
        repeats = list(zip(*self.by_page.values(), strict=False))
        return tuple(tuple(layer for repeat in repeats[n::groups] for layer in repeat) for n in range(groups))


def _packed(layers: Group) -> tuple[Group, ...]:
    buckets = _buckets(layers)
    mixed = [bucket.repeats for bucket in buckets if bucket.balanced and len(bucket.by_page) > 1]
    repeats = _repeats([b.repeats for b in buckets if b.balanced], max(mixed)) if mixed else 0
    numbers = [-(-b.repeats // repeats) if repeats and b.balanced else 1 for b in buckets]
    # what a block must hold anyhow; states are then split so that they do not widen it
    anchor = max(
        b.widest(len(b.layers) if _splits_freely(b, repeats) else n) for b, n in zip(buckets, numbers, strict=True)
    )
    groups: list[Group] = []
    for bucket, number in zip(buckets, numbers, strict=True):
        if _splits_freely(bucket, repeats):
            fits = max(anchor // bucket.spec.page_bytes, 1)
            number = max(number, -(-len(bucket.layers) // fits))  # noqa: PLW2901 - the number for this bucket
        groups += bucket.split(number)
    return tuple(groups)


def _buckets(layers: Group) -> list[_Bucket]:
    found: dict[object, list[CacheLayer]] = {}
    for layer in layers:
        found.setdefault((layer.spec.family, layer.spec.block_size), []).append(layer)
    return [_Bucket(tuple(each)) for each in found.values()]


def _splits_freely(bucket: _Bucket, repeats: int) -> bool:
    """Whether a group of a single layer of it would do."""
    if bucket.spec.spec in {"MambaSpec", "CircularBufferSpec"}:
        return True
    return not repeats and bucket.spec.spec in {"SlidingWindowSpec", "SlidingWindowMLASpec"}


def _repeats(counts: Sequence[int], least: int) -> int:
    """The number, from `least` on, that `counts` round up to with the least waste; the largest of several."""
    tried = range(least, max(*counts, least) + 1)
    return min(tried, key=lambda number: (sum(-count % number for count in counts), -number))
