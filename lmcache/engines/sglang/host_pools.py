"""The pools of HiCache's host memory, as pools of ours. Imports neither SGLang nor torch.

Nothing here knows a layout: where a page lies follows from what SGLang tells zero-copy backends of it.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from lmcache.engines.copy import Bytes, Copier, Pages
from lmcache.engines.sglang.pools import Pool
from lmcache.errors import ConfigError, GeometryError

SHAPE = (
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "layer_num",
    "start_layer",
    "end_layer",
    "size_per_token",
    "storage_format_tag",
    "indexer_dtype",
    "temporal_dtype",
    "conv_dtype",
)
"""Attributes of SGLang's host pools that tell what their bytes are; no pool has all of them."""


@attrs.frozen
class Run:
    """One run of memory in every page of a pool."""

    base: int
    """Address of it in page 0."""
    stride: int
    """Bytes from one page to the next."""
    length: int
    """Bytes."""


def host_pool(name: str, pool: Any, indices: Callable[[range], Any], *, replicated: bool) -> Pool:
    """Describe a host pool. `indices` makes SGLang's index tensor of slots.

    Raises ConfigError for a pool whose pages move, or cannot be reached without a copy in this layout.
    """
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise ConfigError(
            f"SGLang moves the pages of its {name} host pool, which shares its memory with others",
            remedy="choose a host memory layout of its own with --hicache-mem-layout page_first",
        )
    pages = int(pool.size) // int(pool.page_size)
    runs = page_runs(name, pool, indices, pages)
    views = [_view(run, pages) for run in runs]
    return Pool(
        name,
        tuple(run.length for run in runs),
        functools.partial(Copier, Pages(views)),
        replicated,
        _facts(pool),
    )


def page_runs(name: str, pool: Any, indices: Callable[[range], Any], pages: int) -> list[Run]:
    """What every page is made of, from SGLang's word for the first, the second and the last page. Raises ConfigError,
    and GeometryError where these do not lie evenly."""
    size = int(pool.page_size)

    def lies(page: int) -> tuple[list[int], list[int]]:
        try:
            addresses, lengths = pool.get_page_buffer_meta(indices(range(page * size, (page + 1) * size)))
        except (ValueError, NotImplementedError, AttributeError) as error:
            raise ConfigError(
                f"SGLang's {name} host pool in layout {getattr(pool, 'layout', None)} has no zero-copy pages: {error}",
                remedy="choose another one with --hicache-mem-layout: page_first, page_first_direct",
            ) from error
        return [int(address) for address in addresses], [int(length) for length in lengths]

    (first, lengths), (second, _), (last, _) = lies(0), lies(min(1, pages - 1)), lies(pages - 1)
    runs = [Run(a, b - a, length) for a, b, length in zip(first, second, lengths, strict=True)]
    even = all(run.base + run.stride * (pages - 1) == end for run, end in zip(runs, last, strict=True))
    if not even or any(run.stride < run.length for run in runs) * (pages > 1):
        raise GeometryError(
            f"the pages of SGLang's {name} host pool do not lie at even distances",
            remedy="report it, with the layout that --hicache-mem-layout chose",
        )
    return runs


def page_blocks(slots: Sequence[int], page_size: int, keys: int) -> list[int]:
    """The pages that SGLang's slots are, one a key. Raises GeometryError where they are no whole pages."""
    starts = list(slots[::page_size])
    if len(slots) != keys * page_size or any(start % page_size for start in starts):
        raise GeometryError(
            f"SGLang named {len(slots)} slots for {keys} pages of {page_size}", remedy="report it, with its version"
        )
    return [start // page_size for start in starts]


def _view(run: Run, pages: int) -> Bytes:
    length = run.stride * (pages - 1) + run.length
    # of the pool's memory, not a copy: whoever keeps the view keeps the pool, too
    memory = (ctypes.c_uint8 * length).from_address(run.base)
    flat = np.ctypeslib.as_array(memory)
    return np.lib.stride_tricks.as_strided(flat, (pages, run.length), (run.stride or run.length, 1))


def _facts(pool: Any) -> str:
    shape = {name: getattr(pool, name, None) for name in SHAPE}
    told = ", ".join(f"{name} {value}" for name, value in shape.items() if value is not None)
    return f"{type(pool).__name__} on the host {pool.layout} {pool.dtype}, {told}"
