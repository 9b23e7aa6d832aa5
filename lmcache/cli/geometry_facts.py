"""What a geometry means for a cache: what each chunk size stores of a prompt, and what that takes of L1.

Pure arithmetic on the same functions that the server runs, so that what is printed is what will happen.
"""

import math
from collections.abc import Sequence

import attrs

from lmcache.errors import ConfigError
from lmcache.geometry.chunking import cached_tokens, check_chunk_size, default_chunk_size, kept_blocks
from lmcache.geometry.groups import MAX_TOKENS, Geometry, GroupKind, KVGroup
from lmcache.geometry.hits import longest_hit
from lmcache.geometry.layout import object_cells

GIB = 1 << 30

LARGER = 1024
"""Tokens of the chunk that the default is compared with, where it fits."""

PROMPTS = (1000, 5040, 32000)
"""Tokens; looked at where nobody asks for others."""

TYPICAL_PROMPT = 5040
"""Tokens of the prompt that the recommendation argues with."""


@attrs.frozen
class Kept:
    """What one chunk size keeps of one prompt."""

    prompt_tokens: int
    cached: int
    """Tokens in whole chunks: what is stored."""
    hit: int
    """Tokens that come from the cache when the same prompt is asked again: at least one is left to compute."""

    @property
    def share(self) -> float:
        """Of the prompt, stored."""
        return self.cached / self.prompt_tokens


@attrs.frozen
class ChunkFacts:
    """What one chunk size means."""

    chunk_size: int
    """Tokens."""
    bytes_per_token: float
    """Stored, over all groups, layers and distinct ranks. With states at most: of a chunk at whose end the engine left
    none, none is stored."""
    share_of_full: float
    """Of what full attention in all layers would store; 1 where nothing can be compared."""
    cells: int
    """Cells of L1 that a chunk takes."""
    tokens_per_gb: int
    """Tokens whose chunks fit a GB (2^30 bytes) of L1, rounding up to cells included."""
    prompts: tuple[Kept, ...]


@attrs.frozen
class Advice:
    """A chunk size, and why."""

    chunk_size: int
    reason: str
    """One sentence."""


def chunk_facts(
    geometry: Geometry, chunk_size: int, prompts: Sequence[int], cell_bytes: int, model: str = ""
) -> ChunkFacts:
    """Work out what `chunk_size` stores. Raises GeometryError, which names the model, for one that does not fit."""
    check_chunk_size(geometry, chunk_size, model)
    cells = sum(object_cells(group, chunk_size, cell_bytes) * group.shards for group in geometry.groups)
    stored = stored_bytes(geometry, chunk_size) / chunk_size
    full = full_bytes_per_token(geometry)
    return ChunkFacts(
        chunk_size,
        stored,
        stored / full if full else 1.0,
        cells,
        GIB // cell_bytes // cells * chunk_size,
        tuple(_kept(geometry, chunk_size, prompt) for prompt in prompts),
    )


def _kept(geometry: Geometry, chunk_size: int, prompt: int) -> Kept:
    cached = cached_tokens(chunk_size, prompt)
    every = sum(1 << number for number in geometry.cached_groups)
    hit = longest_hit(geometry, chunk_size, [every] * (cached // chunk_size), prompt - 1)
    return Kept(prompt, cached, hit.tokens)


def stored_bytes(geometry: Geometry, chunk_size: int) -> int:
    """Bytes of one chunk's pages, over all groups and distinct ranks."""
    return sum(kept_blocks(g, chunk_size) * g.block_bytes * g.shards for g in geometry.groups if g.cached)


def token_bytes(group: KVGroup) -> float:
    """Bytes that a token takes in the engine, over a group's layers and distinct ranks. Not for states."""
    return group.block_bytes * group.shards / group.tokens_per_block


def full_bytes_per_token(geometry: Geometry) -> float:
    """Bytes of a token if every layer had full attention.

    A window's layer would keep each token as it keeps those of its window; a layer with a state would keep what a layer
    of the model's own full attention keeps. 0 where a model has states and no full attention to compare them with.
    """
    cached = [geometry.groups[number] for number in geometry.cached_groups]
    full = [group for group in cached if group.kind is GroupKind.FULL]
    states = sum(len(group.page_bytes) for group in cached if group.kind is GroupKind.RECURRENT)
    if states and not full:
        return 0.0
    layer = max((max(g.page_bytes) * g.shards / g.tokens_per_block for g in full), default=0.0)
    return states * layer + sum(token_bytes(group) for group in cached if group.kind is not GroupKind.RECURRENT)


def chosen_chunk_sizes(geometry: Geometry, asked: Sequence[int]) -> tuple[int, ...]:
    """The sizes to show: those asked for, else the default, and the larger one that it is compared with.

    With states there is nothing to compare: a larger chunk rarely ends where the engine left one.
    """
    best = default_chunk_size(geometry)
    return tuple(dict.fromkeys(asked)) or ((best,) if keeps_states(geometry) else (best, _larger(geometry, best)))


def keeps_states(geometry: Geometry) -> bool:
    """Whether a hit needs a state."""
    return any(group.kind is GroupKind.RECURRENT for group in geometry.groups)


def allowed_chunk_sizes(geometry: Geometry) -> tuple[int, ...]:
    """The smallest sizes that fit; all their multiples fit as well."""
    return tuple(geometry.block_multiple * number for number in (1, 2, 3, 4))


def checked_prompts(prompts: Sequence[int]) -> tuple[int, ...]:
    """The prompt lengths to show. Raises ConfigError."""
    for prompt in prompts:
        if not 1 <= prompt <= MAX_TOKENS:
            raise ConfigError(f"--prompt-tokens {prompt} is no length of a prompt", remedy=f"use 1 to {MAX_TOKENS}")
    return tuple(dict.fromkeys(prompts)) or PROMPTS


def advise(geometry: Geometry) -> Advice:
    """The chunk size that a server takes by itself, and what speaks for it: the same rule, in words."""
    best = default_chunk_size(geometry)
    if keeps_states(geometry):
        return Advice(
            best,
            "hits end only where a chunk ends with a state, and engines leave few of them, so the smallest size that "
            f"fits, {best:,}, hits most",
        )
    larger = _larger(geometry, best)
    small, large = (cached_tokens(size, TYPICAL_PROMPT) / TYPICAL_PROMPT for size in (best, larger))
    reason = f"only whole chunks are stored, so of a prompt of {TYPICAL_PROMPT:,} tokens {best:,} keeps {small:.0%}"
    reason += f" and {larger:,} keeps {large:.0%}" if large < small else ""
    less = 1 - (stored_bytes(geometry, larger) / larger) / (stored_bytes(geometry, best) / best)
    return Advice(best, reason + (f"; {larger:,} would store {less:.0%} fewer bytes a token" if less >= 0.005 else ""))


def _larger(geometry: Geometry, chunk_size: int) -> int:
    """The size to compare with: 1,024 or what fits from there on, and some four times as large."""
    multiple = geometry.block_multiple
    return max(math.ceil(LARGER / multiple) * multiple, 4 * chunk_size)
