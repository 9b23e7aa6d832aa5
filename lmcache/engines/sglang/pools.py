"""SGLang's memory pools in our words: one KV group each, whose block ids are pages.

Imports neither SGLang nor torch.
"""

import math
from collections.abc import Sequence

import attrs

from lmcache.engines.copying import MakeCopier
from lmcache.errors import GeometryError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

KINDS = {
    "kv": GroupKind.FULL,
    "indexer": GroupKind.FULL,
    "draft": GroupKind.FULL,
    "draft_indexer": GroupKind.FULL,
    "swa": GroupKind.SLIDING_WINDOW,
    "draft_swa": GroupKind.SLIDING_WINDOW,
    "mamba": GroupKind.RECURRENT,
}
"""By SGLang's name of the pool."""


@attrs.frozen
class Pool:
    """One of SGLang's pools, of device or of host memory."""

    name: str
    """As SGLang's `PoolName` has it."""
    page_bytes: tuple[int, ...]
    """Bytes of one page in each of the runs of memory that it is made of."""
    make: MakeCopier
    replicated: bool
    """Whether all ranks hold the same bytes."""
    facts: str
    """What tells how its bytes are to be read: class, layout, element type, shape."""


def build_geometry(
    pools: Sequence[Pool], page_size: int, ranks: int, window: int = 0, kind: GroupKind | None = None
) -> Geometry:
    """One group a pool, in their order; a chunk is a page, for SGLang's keys are those of pages.

    `window` is what SGLang keeps of a sliding window, in tokens; `kind` is that of all pools where SGLang itself says
    what a hit needs of each. Raises GeometryError for a pool of which nobody says so: it could only be guessed at.
    """
    return Geometry(
        tuple(_group(pool, page_size, ranks, window, kind) for pool in pools),
        ranks,
        hit_alignment=page_size,
        own_chunk=page_size,
    )


def _group(pool: Pool, page_size: int, ranks: int, window: int, kind: GroupKind | None) -> KVGroup:
    kind = kind or KINDS.get(pool.name)
    if kind is None:
        raise GeometryError(
            f"SGLang keeps a pool {pool.name!r} for this model, and lmcache does not know what a hit needs of it",
            remedy=f"serve it without lmcache; known pools are {', '.join(KINDS)}",
        )
    if kind is GroupKind.SLIDING_WINDOW and window <= 0:
        raise GeometryError(
            f"SGLang keeps a pool {pool.name!r} for this model and does not say how long its window is",
            remedy="report it, with the model and the version of SGLang",
        )
    # SGLang restores whole pages of a window, and one more than the model reads where it ends within a page
    whole = math.ceil(window / page_size) * page_size if kind is GroupKind.SLIDING_WINDOW else 0
    return KVGroup(kind, page_size, pool.page_bytes, window=whole, shards=1 if pool.replicated else ranks)
