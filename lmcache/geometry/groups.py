"""KV groups and the geometry of an engine: what the bytes behind a block id are, per layer and rank.

Pure values, shared by every process: an adapter builds them, the wire carries them, the server sizes objects by them.
"""

import enum
import math

import attrs

from lmcache.errors import GeometryError


class GroupKind(enum.Enum):
    """How a KV group's tokens depend on each other, which decides what is stored of a chunk and what a hit needs."""

    FULL = "full"
    """Every token reads every token before it: a hit needs every chunk."""
    SLIDING_WINDOW = "sliding_window"
    """Every token reads the `window` tokens that end with it."""
    CHUNKED_LOCAL = "chunked_local"
    """Like a window that starts anew at each multiple of `window` tokens."""
    RECURRENT = "recurrent"
    """One state per sequence; a block holds the snapshot at the block's end. A hit needs the snapshot at its end."""
    SCRATCH = "scratch"
    """Belongs to one request and means nothing to another: never stored, never loaded, covers no tokens."""


MAX_RANKS = 4096
"""Far beyond any engine: what a peer may make the server keep for each chunk is bounded by this and `MAX_GROUPS`."""

MAX_GROUPS = 64

MAX_SHARDS = 4096
"""Shards of all groups together."""

MAX_LAYERS = 8192
"""Layers of all groups together."""

MAX_TOKENS = 1 << 24
"""Tokens of a block, a window, an alignment or a chunk."""

WINDOWED = frozenset({GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL})


@attrs.frozen
class KVGroup:
    """Layers that share block ids, a block size and a kind."""

    kind: GroupKind
    tokens_per_block: int
    """Tokens that one block id covers; 0 for scratch."""
    page_bytes: tuple[int, ...]
    """Bytes of one block in one layer, for each layer in order, on one rank. Empty for scratch."""
    window: int = 0
    """Tokens of a sliding window or of a chunked-local span; 0 for every other kind."""
    shards: int = 1
    """How many ranks hold distinct bytes: 1 = all ranks hold the same (MLA), `Geometry.ranks` = each its own."""
    layers: tuple[str, ...] = ()
    """Layer names, in the order of `page_bytes`; used in messages and logs only."""

    def __attrs_post_init__(self) -> None:
        if self.kind is GroupKind.SCRATCH:
            if self.tokens_per_block or self.page_bytes or self.window:
                raise GeometryError(
                    f"{self} is scratch, yet it has a block size, pages or a window",
                    remedy="describe scratch as KVGroup(GroupKind.SCRATCH, 0, ())",
                )
            return
        if self.tokens_per_block < 1:
            raise GeometryError(f"{self} has {self.tokens_per_block} tokens per block", remedy="give at least 1")
        if not self.page_bytes or min(self.page_bytes) < 1:
            raise GeometryError(f"{self} has pages of {self.page_bytes} bytes", remedy="give one positive size a layer")
        if self.layers and len(self.layers) != len(self.page_bytes):
            raise GeometryError(
                f"{self} names {len(self.layers)} layers for {len(self.page_bytes)} pages",
                remedy="name each layer once",
            )
        if self.window < 0 or (self.window > 0) != (self.kind in WINDOWED):
            raise GeometryError(
                f"{self} has a window of {self.window} tokens",
                remedy="give a positive window to sliding_window and chunked_local groups, and to no others",
            )

    def __str__(self) -> str:
        return f"KV group ({self.kind.value}, {self.layers[0] if self.layers else 'unnamed'})"

    @property
    def cached(self) -> bool:
        """Whether this group is stored at all."""
        return self.kind is not GroupKind.SCRATCH

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, on one rank."""
        return sum(self.page_bytes)


@attrs.frozen
class Geometry:
    """The ordered KV groups of one engine. Group numbers on the wire are positions in `groups`, scratch included."""

    groups: tuple[KVGroup, ...]
    ranks: int = 1
    """Worker processes that each hold one shard of every group."""
    hit_alignment: int = 0
    """Hits must end on multiples of this many tokens. 0 takes the least common multiple of the block sizes."""
    own_chunk: int = 0
    """Tokens of a chunk, where the engine's keys come ready-made for that many; 0 leaves the size to the server."""

    def __attrs_post_init__(self) -> None:
        if not any(group.cached for group in self.groups):
            raise GeometryError(
                f"none of the {len(self.groups)} KV groups can be cached", remedy="run without the cache"
            )
        if not 1 <= self.ranks <= MAX_RANKS:
            raise GeometryError(f"a geometry for {self.ranks} ranks", remedy=f"give 1 to {MAX_RANKS}")
        layers, shards = sum(len(g.page_bytes) for g in self.groups), sum(g.shards for g in self.groups)
        if layers > MAX_LAYERS or shards > MAX_SHARDS:
            raise GeometryError(
                f"a geometry of {layers} layers and {shards} shards",
                remedy=f"give at most {MAX_LAYERS} layers and {MAX_SHARDS} shards",
            )
        if max(self.block_multiple, self.hit_alignment, self.own_chunk, *(g.window for g in self.groups)) > MAX_TOKENS:
            raise GeometryError(
                "blocks, windows or an alignment of millions of tokens", remedy=f"give at most {MAX_TOKENS} tokens"
            )
        if len(self.groups) > MAX_GROUPS:
            raise GeometryError(f"a geometry of {len(self.groups)} KV groups", remedy=f"give at most {MAX_GROUPS}")
        for number, group in enumerate(self.groups):
            if group.shards < 1 or self.ranks % group.shards:
                raise GeometryError(
                    f"KV group {number} has {group.shards} shards, which do not divide {self.ranks} ranks",
                    remedy="let every shard be held by the same number of ranks",
                )
        if self.hit_alignment < 0 or (self.hit_alignment and self.hit_alignment % self.block_multiple):
            raise GeometryError(
                f"hits aligned to {self.hit_alignment} tokens do not end at block ends of every KV group",
                remedy=f"use a multiple of {self.block_multiple}",
            )

        if self.own_chunk < 0 or self.own_chunk % self.block_multiple:
            raise GeometryError(
                f"chunks of {self.own_chunk} tokens do not end at block ends of every KV group",
                remedy=f"use a multiple of {self.block_multiple}",
            )

    @property
    def block_multiple(self) -> int:
        """Least common multiple, in tokens, of the cached groups' block sizes: what every chunk size must divide by."""
        return math.lcm(*(group.tokens_per_block for group in self.groups if group.cached))

    @property
    def alignment(self) -> int:
        """Tokens that a hit's end must be a multiple of."""
        return self.hit_alignment or self.block_multiple

    @property
    def cached_groups(self) -> tuple[int, ...]:
        """Numbers of the groups that are stored, in order."""
        return tuple(number for number, group in enumerate(self.groups) if group.cached)

    def shard_of(self, group: int, rank: int) -> int:
        """The shard of `group` that `rank` holds: neighbouring ranks hold the same one."""
        return rank * self.groups[group].shards // self.ranks

    def writes(self, group: int, rank: int, chunk: int) -> bool:
        """Whether `rank` is the one that stores chunk number `chunk`: ranks with the same bytes take turns."""
        replicas = self.ranks // self.groups[group].shards
        return rank % replicas == chunk % replicas
