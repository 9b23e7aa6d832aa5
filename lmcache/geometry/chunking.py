"""Chunk arithmetic: what a chunk keeps of each KV group, and which chunk sizes a geometry allows.

Any chunk end can be the end of another prompt's hit. So a chunk keeps, of every group, what a hit that ends with it
reads of *this* chunk: everything (full), its own last tokens (windows), the one snapshot at its end (recurrent).
"""

from lmcache.errors import GeometryError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

DEFAULT_CHUNK_SIZE = 256
"""Tokens per chunk where nobody asks for a size and the block sizes allow it."""


def kept_blocks(group: KVGroup, chunk_size: int) -> int:
    """How many blocks a chunk of `chunk_size` tokens keeps of `group`: 0 for scratch, else at least 1.

    `chunk_size` must have passed `check_chunk_size`.
    """
    if group.kind is GroupKind.SCRATCH:
        return 0
    if group.kind is GroupKind.RECURRENT:
        return 1
    kept_tokens = min(group.window, chunk_size) if group.window else chunk_size
    return -(-kept_tokens // group.tokens_per_block)


def kept_span(group: KVGroup, chunk_size: int, chunk: int) -> range:
    """The blocks that chunk number `chunk` keeps of `group`, as block numbers of the sequence; the last ends the chunk.

    A worker stores exactly these blocks, in this order. Empty for scratch.
    """
    if group.kind is GroupKind.SCRATCH:
        return range(0)
    end = (chunk + 1) * chunk_size // group.tokens_per_block
    return range(end - kept_blocks(group, chunk_size), end)


def check_chunk_size(geometry: Geometry, chunk_size: int, model: str = "") -> None:
    """Refuse a chunk size whose chunks do not end at block ends of every cached group.

    Raises GeometryError that names the first group it does not fit (and `model`, where given) and lists sizes that fit
    all of them. The server calls it when an engine registers.
    """
    wish = f"chunk size {chunk_size}"
    remedy = f"use {_allowed_sizes(geometry, chunk_size)}"
    if chunk_size < 1:
        raise GeometryError(f"{wish} is not a positive number of tokens", remedy=remedy)
    for number in geometry.cached_groups:
        tokens_per_block = geometry.groups[number].tokens_per_block
        if chunk_size % tokens_per_block:
            owner = f" of {model}" if model else ""
            raise GeometryError(
                f"{wish} is not a multiple of {tokens_per_block}, the tokens per block of KV group {number}{owner}",
                remedy=remedy,
            )


def _allowed_sizes(geometry: Geometry, wish: int) -> str:
    """At least three sizes that fit, in words: those next to the wish, and the default."""
    multiple = geometry.block_multiple
    below = max(wish, 0) // multiple * multiple
    sizes = {below, below + multiple, default_chunk_size(geometry)} - {0}
    while len(sizes) < 3:
        sizes.add(max(sizes) + multiple)
    return ", ".join(map(str, sorted(sizes))) + "…"


def chosen_chunk_size(geometry: Geometry, wish: int | None, model: str = "") -> int:
    """Tokens per chunk of an engine that registers: its own where its keys come by that many, else the server's.

    `wish` is what the server was started with, and strict for every engine that has a choice; None takes the default.
    Raises GeometryError as `check_chunk_size` does.
    """
    if geometry.own_chunk:
        return geometry.own_chunk
    if wish is None:
        return default_chunk_size(geometry)
    check_chunk_size(geometry, wish, model)
    return wish


def default_chunk_size(geometry: Geometry) -> int:
    """Tokens per chunk where nobody asks for a size: 256, rounded up to what every group allows.

    With a recurrent group it is the smallest size allowed: hits end only at snapshots, so short chunks hit most.
    """
    multiple = geometry.block_multiple
    if any(group.kind is GroupKind.RECURRENT for group in geometry.groups):
        return multiple
    return -(-DEFAULT_CHUNK_SIZE // multiple) * multiple


def cached_tokens(chunk_size: int, prompt_tokens: int) -> int:
    """How many of a prompt's first tokens are stored: its whole chunks. The rest is computed anew every time."""
    return prompt_tokens // chunk_size * chunk_size
