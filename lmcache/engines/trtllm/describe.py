"""TensorRT-LLM's KV cache in our words: the geometry of its layer groups, and where every page lies.

Nothing here assumes a shape: where a page lies, and how long it is, follows from strides alone. Every block of every
layer group is stored, those of sliding windows too: TensorRT-LLM may take less of a hit than it was offered, down to
any block, and what ends anywhere must be held everywhere. A load then skips the pages behind a window, for which the
engine holds no page.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from lmcache.engines.copying import PageView
from lmcache.errors import GeometryError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

UNKNOWN_LAYOUT = "report it: this TensorRT-LLM lays out its KV cache in a way that lmcache does not know"

VALUE = "value"
"""The role of a buffer that MLA does not have."""


@attrs.frozen
class PageGroup:
    """Pages that share block ids, and ranks that hold the same of them."""

    layer_group: int
    """TensorRT-LLM's number, which its block tables go by; 0 in a flat pool."""
    views: tuple[PageView, ...]
    tensors: tuple[Any, ...]
    """The tensor that each view is of."""
    blocks: int
    replicated: bool
    """Whether every rank holds the same bytes."""
    window: int = 0
    """Tokens of a sliding window; 0 for full attention."""
    what: str = ""
    """In words, what lies in a page in which order: a fact of the namespace."""


@attrs.frozen
class Shape:
    """What the scheduler has to know of the pages, too."""

    geometry: Geometry
    layer_groups: tuple[int, ...]
    """For each KV group, TensorRT-LLM's number of the layer group whose block tables it goes by."""
    windows: tuple[int, ...]
    """For each KV group, its window in tokens; 0 for full attention."""

    @property
    def fleeting(self) -> frozenset[int]:
        """KV groups whose pages are taken back while their request runs."""
        return frozenset(number for number, window in enumerate(self.windows) if window)


def flat_group(tensor: Any) -> PageGroup:
    """A pool of one tensor `[blocks, layers, K and V, bytes]`. Raises GeometryError for any other."""
    shape = tuple(tensor.shape)
    if len(shape) != 4 or 0 in shape:
        raise GeometryError(f"the KV cache has shape {list(shape)}, not blocks, layers, K and V", remedy=UNKNOWN_LAYOUT)
    views = _page_views(tensor)
    # K and V are one where MLA's latent stands for both, and that is the same on every rank
    return PageGroup(
        *(0, views, (tensor,) * len(views), shape[0], shape[2] == 1),
        what=f"{tensor.dtype} {list(shape[1:])} {list(tensor.stride()[1:])}",
    )


def _page_views(tensor: Any) -> tuple[PageView, ...]:
    """The runs of bytes that a block is made of, as few as its strides allow."""
    shape, strides, size = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    inner = len(shape)
    extent = 1
    while inner > 1 and (shape[inner - 1] == 1 or strides[inner - 1] == extent):
        inner -= 1
        extent *= shape[inner]
    if inner == len(shape):
        raise GeometryError(
            f"neighbours in a page do not lie side by side: shape {list(shape)}, strides {list(strides)}",
            remedy=UNKNOWN_LAYOUT,
        )
    if shape[0] > 1 and strides[0] < extent:
        raise GeometryError(f"blocks overlap: shape {list(shape)}, strides {list(strides)}", remedy=UNKNOWN_LAYOUT)
    return tuple(
        PageView((tensor.storage_offset() + _place(at, strides[1:inner])) * size, strides[0] * size, extent * size)
        for at in itertools.product(*map(range, shape[1:inner]))
    )


def _place(at: Sequence[int], strides: Sequence[int]) -> int:
    return sum(index * stride for index, stride in zip(at, strides, strict=True))


def layout_groups(layout: Any, as_bytes: Any) -> list[PageGroup]:
    """The layer groups of a `KvCacheLayout`; `as_bytes` is torch's uint8. Raises GeometryError for no pages."""
    roles = {
        buffer.role
        for group in layout.groups
        for region in (*group.regions, *getattr(group, "replicated_regions", ()))
        for buffer in region.buffers
    }
    found = []
    for group in layout.groups:
        # without values it is MLA's latent, which every rank computes for itself
        found += _region_group(group, group.regions, as_bytes, replicated=VALUE not in roles)
        found += _region_group(group, getattr(group, "replicated_regions", ()), as_bytes, replicated=True)
    if not found:
        raise GeometryError("the KV cache has no regions", remedy=UNKNOWN_LAYOUT)
    return found


def _region_group(group: Any, regions: Iterable[Any], as_bytes: Any, *, replicated: bool) -> list[PageGroup]:
    regions = tuple(regions)
    if not regions:
        return []
    tensors = tuple(region.as_tensor(as_bytes) for region in regions)
    views = []
    for region, tensor in zip(regions, tensors, strict=True):
        if tuple(tensor.shape) != (region.num_slots, region.size) or region.stride < region.size:
            raise GeometryError(
                f"a region of layer group {group.layer_group_id} has {region.num_slots} pages of {region.size} bytes "
                f"{region.stride} apart, and a view of shape {list(tensor.shape)}",
                remedy=UNKNOWN_LAYOUT,
            )
        views.append(PageView(tensor.storage_offset(), region.stride, region.size))
    return [
        PageGroup(
            *(
                int(group.layer_group_id),
                tuple(views),
                tensors,
                min(region.num_slots for region in regions),
                replicated,
            ),
            window=int(group.window_size or 0),
            what="; ".join(map(_what, regions)),
        )
    ]


def _what(region: Any) -> str:
    buffers = (f"{b.layer_id} {b.role} {getattr(b, 'expansion', 1)}" for b in region.buffers)
    return f"{region.size} bytes of {', '.join(buffers)}"


def shape_of(groups: Sequence[PageGroup], tokens_per_block: int, ranks: int) -> Shape:
    """Put the groups together. Raises GeometryError where nothing can be cached."""
    kv_groups = tuple(
        KVGroup(
            GroupKind.FULL,
            tokens_per_block,
            tuple(view.page_bytes for view in group.views),
            # which ranks share a head where there are fewer heads than ranks is not said, so those are kept apart
            shards=1 if group.replicated else ranks,
        )
        for group in groups
    )
    return Shape(
        Geometry(kv_groups, ranks),
        tuple(group.layer_group for group in groups),
        tuple(group.window for group in groups),
    )


def page_facts(groups: Sequence[PageGroup]) -> dict[str, str]:
    """Facts of the namespace: what lies in the pages of each group, where sizes alone do not tell."""
    return {f"kv.pages.{number}": f"{group.what}; window {group.window}" for number, group in enumerate(groups)}


def smallest_window(shape: Shape) -> int:
    """In tokens; 0 where no layer group has one."""
    return min((window for window in shape.windows if window), default=0)


def block_alignment(shape: Shape) -> int:
    """Tokens that a load begins and ends on multiples of."""
    return math.lcm(shape.geometry.alignment, shape.geometry.block_multiple)
