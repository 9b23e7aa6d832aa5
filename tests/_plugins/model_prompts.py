"""Prompts and geometries of the models that drive a cache by hypothesis, so small that calls meet the same chunks."""

import hashlib
from collections.abc import Sequence

import hypothesis.strategies as st

from lmcache.core.keys import ChainHash
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

CHUNK = 4
DEPTH = 4
CELL = 64

FULL = KVGroup(GroupKind.FULL, 2, (32,))
"""One cell a chunk; hits may end inside a chunk."""
GEOMETRIES = (
    Geometry((FULL,)),
    Geometry((KVGroup(GroupKind.FULL, 4, (64, 64)), KVGroup(GroupKind.SLIDING_WINDOW, 2, (32,), window=6))),
    Geometry((KVGroup(GroupKind.FULL, 4, (64,), shards=2), KVGroup(GroupKind.FULL, 4, (64,))), ranks=2),
    Geometry((KVGroup(GroupKind.SCRATCH, 0, ()), KVGroup(GroupKind.RECURRENT, 4, (64,)), FULL)),
)
"""One group; a window; two ranks; snapshots."""

PATHS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=DEPTH).map(tuple)
"""Mostly one prompt, at times a branch of it."""


def hash_of(path: Sequence[int]) -> ChainHash:
    """The same prompt has the same hashes in every namespace: only the namespace keeps them apart."""
    return ChainHash(hashlib.sha256(bytes(path)).digest()[:16])


def hashes_of(path: Sequence[int]) -> list[ChainHash]:
    return [hash_of(path[:length]) for length in range(1, len(path) + 1)]
