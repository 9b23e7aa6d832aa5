"""What the scheduler's half knows of each request."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from lmcache.core.client import Link
from lmcache.core.keys import ChainHasher
from lmcache.engines.trtllm.content import Content
from lmcache.engines.trtllm.describe import Shape
from lmcache.engines.trtllm.orders import BAD_PAGE

OVERLAP_TOKENS = 2
"""How far the engine may be ahead of what it says: with its overlap scheduler, a step."""


@attrs.define
class Offer:
    """A hit that the engine was told of, and the ticket that pins it."""

    link: Link
    ticket: int
    start: int
    """Tokens that the engine held itself."""
    end: int
    """Tokens that it will hold when the load is done."""
    parked: bool = False
    """Whether the engine was told that the request has to wait for its load."""


@attrs.define
class Tracked:
    """One request."""

    request: Any
    """As the engine handed it over when it asked; it may note there how much of the offer it takes."""
    content: Content
    prompt_tokens: int
    offer: Offer | None = None
    """Until its load is ordered, or none will be."""
    parked: bool = False
    """A load is under way and the request is in no batch."""
    loaded: int = 0
    """Tokens that ordered loads fill, counted from the prompt's beginning."""
    tokens: list[int] = attrs.field(factory=list)
    """All that the engine has told so far."""
    tables: dict[int, list[int]] = attrs.field(factory=dict)
    """Block ids, for each layer group."""
    stale: dict[int, int] = attrs.field(factory=dict)
    """For each layer group, how many of its blocks, from the first, are known to have been taken back."""
    hasher: ChainHasher | None = None
    chunk_size: int = 0
    """Of `hasher`."""
    offered: int = 0
    """Chunks that workers were told to store."""
    offered_in: str = ""
    """Epoch that `offered` counts in."""

    def hashes(self, chunk_size: int, tokens: Sequence[int]) -> bytes:
        """Chain hashes of the whole chunks of `tokens`, and of any that follow and are known already."""
        if self.hasher is None or self.chunk_size != chunk_size:
            self.chunk_size = chunk_size
            self.hasher = ChainHasher(self.content.root, chunk_size, self.content.items)
        return self.hasher.extend_to(tokens)

    def begin(self) -> None:
        """The engine tells of the request from its beginning."""
        self.tokens, self.tables, self.stale = [], {}, {}
        self.offered = 0

    def append(self, data: Any) -> None:
        """Take in what is new since the engine last told of the request."""
        self.tokens.extend(data.new_tokens)
        for layer_group, ids in tables_of(data).items():
            self.tables.setdefault(layer_group, []).extend(ids)

    def forget_stale(self, shape: Shape, position: int) -> None:
        """Blocks behind the window of the next token, number `position`, may be another request's by now."""
        for number, window in enumerate(shape.windows):
            if window:
                layer_group = shape.layer_groups[number]
                table = self.tables.get(layer_group, [])
                gone = (position - window + 1 + OVERLAP_TOKENS) // shape.geometry.groups[number].tokens_per_block
                known = self.stale.get(layer_group, 0)
                for block in range(known, min(gone, len(table))):
                    table[block] = BAD_PAGE
                self.stale[layer_group] = max(known, gone)

    def blocks(self, shape: Shape) -> tuple[list[int], ...]:
        """The block table of each KV group."""
        return blocks_of(self.tables, shape)


def tables_of(data: Any) -> dict[int, list[int]]:
    """The new block ids of a request's data, for each layer group."""
    grouped = getattr(data, "new_block_ids_by_layer_group", None)
    if not grouped:
        return {0: list(data.new_block_ids)}
    return tables_by_group(grouped)


def tables_by_group(grouped: Any) -> dict[int, list[int]]:
    """Block ids by layer group, which some versions give as a list and some as a mapping."""
    pairs = grouped.items() if isinstance(grouped, Mapping) else enumerate(grouped)
    return {int(layer_group): list(ids) for layer_group, ids in pairs}


def blocks_of(tables: Mapping[int, list[int]], shape: Shape) -> tuple[list[int], ...]:
    """The block table of each KV group, as it is now."""
    return tuple(list(tables.get(layer_group, [])) for layer_group in shape.layer_groups)
