"""The hit rule: the longest prefix that every KV group can serve, and what has to be loaded for it.

This is the only place that rule lives. The server calls `longest_hit` for every lookup; the workers call `load_spans`
for every load, on the same geometry, so that only the hit's length travels between them.

An engine that resumes at token H of a prompt reads, of the tokens before H:

    full             all of them
    sliding window   the last `window - 1`: the token at H reads `window` tokens, itself included
    chunked local    those since the last multiple of `window`; none when H is one
    recurrent        the snapshot in the block that ends at H
    scratch          none

A hit ends at a chunk end, because only there a chunk keeps all that this needs. Where all cached groups are full every
block is kept, and a hit may end inside a chunk.
"""

import math
from collections.abc import Sequence

import attrs

from lmcache.errors import GeometryError
from lmcache.geometry.chunking import kept_span
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup


@attrs.frozen
class Hit:
    """A prefix that can be served."""

    tokens: int
    """Length of the prefix in tokens; 0 is a miss."""
    needs: tuple[range, ...]
    """For each group of the geometry, the numbers of the chunks whose object a load reads. Empty ranges for a miss."""


@attrs.frozen
class LoadSpan:
    """Blocks that are copied from one object to the engine."""

    chunk: int
    """Number of the chunk that the object belongs to."""
    first: int
    """Position, among the blocks that the chunk keeps, of the first one copied."""
    blocks: range
    """Where they go: block numbers of the sequence, to be looked up in the request's block table."""


def longest_hit(geometry: Geometry, chunk_size: int, sealed: Sequence[int], limit: int) -> Hit:
    """Find the longest prefix that every group can serve.

    `sealed[i]` tells which objects of chunk number `i` are readable: bit g is set for group g; a scratch group's bit is
    ignored. The hit covers no more than `limit` tokens and ends on the geometry's alignment. Time grows with the
    number of chunks times the number of groups. Never raises; nothing usable is a hit of 0 tokens.
    """
    full, partial = 0, []
    for number in geometry.cached_groups:
        if geometry.groups[number].kind is GroupKind.FULL:
            full |= 1 << number
        else:
            partial.append(number)
    chunks = _leading_chunks(sealed, full)
    if partial:
        tokens = _longest_end(geometry, chunk_size, sealed[: min(chunks, max(limit, 0) // chunk_size)], partial)
    else:
        tokens = max(min(chunks * chunk_size, limit), 0) // geometry.alignment * geometry.alignment
    return Hit(tokens, tuple(_needed_chunks(group, chunk_size, tokens) for group in geometry.groups))


def load_spans(group: KVGroup, chunk_size: int, hit_tokens: int, computed: int) -> list[LoadSpan]:
    """Say what a worker copies of one group for a hit, when the engine itself holds the first `computed` tokens.

    Blocks that end at or before `computed` are the engine's own, perhaps shared with other requests: they are never
    written. Raises GeometryError when `hit_tokens` is no length that `longest_hit` gives for this group.
    """
    if not group.cached or hit_tokens <= computed:
        return []
    first_block = max(_first_read(group, hit_tokens), computed) // group.tokens_per_block
    wanted = range(first_block, hit_tokens // group.tokens_per_block)
    spans = []
    for chunk in _needed_chunks(group, chunk_size, hit_tokens):
        kept = kept_span(group, chunk_size, chunk)
        blocks = range(max(kept.start, wanted.start), min(kept.stop, wanted.stop))
        if blocks:
            spans.append(LoadSpan(chunk, blocks.start - kept.start, blocks))
    if hit_tokens % group.tokens_per_block or sum(len(span.blocks) for span in spans) != len(wanted):
        raise GeometryError(
            f"a hit of {hit_tokens} tokens reads blocks of {group} that chunks of {chunk_size} tokens do not keep",
            remedy="load only hits whose length the server found for the same geometry and chunk size",
        )
    return spans


def _first_read(group: KVGroup, hit_tokens: int) -> int:
    """The first token whose page an engine reads when it resumes after `hit_tokens`; `hit_tokens` if it reads none."""
    match group.kind:
        case GroupKind.FULL:
            return 0
        case GroupKind.SLIDING_WINDOW:
            return max(hit_tokens - group.window + 1, 0)
        case GroupKind.CHUNKED_LOCAL:
            return hit_tokens - hit_tokens % group.window
        case GroupKind.RECURRENT:
            return max(hit_tokens - group.tokens_per_block, 0)
        case GroupKind.SCRATCH:
            return hit_tokens


def _needed_chunks(group: KVGroup, chunk_size: int, hit_tokens: int) -> range:
    """Numbers of the chunks that hold what `_first_read` tells, up to the hit's end."""
    first = _first_read(group, hit_tokens)
    return range(first // chunk_size, -(-hit_tokens // chunk_size)) if first < hit_tokens else range(0)


def _leading_chunks(sealed: Sequence[int], mask: int) -> int:
    """How many chunks, counted from the first, have all objects of `mask`."""
    lacking = {bits for bits in set(sealed) if bits & mask != mask}
    if lacking:  # chunks of one prompt are mostly alike: the set tells at once when none lacks anything
        for number, bits in enumerate(sealed):
            if bits in lacking:
                return number
    return len(sealed)


def _longest_end(geometry: Geometry, chunk_size: int, sealed: Sequence[int], partial: Sequence[int]) -> int:
    """The last aligned chunk end, in tokens, whose needs the `partial` groups (those that are not full) can serve."""
    gaps = [(geometry.groups[number], _gaps(sealed, 1 << number)) for number in partial]
    step = math.lcm(chunk_size, geometry.alignment) // chunk_size
    end = len(sealed) // step * step
    while end:
        for group, gap in gaps:
            if gap[end] >= _first_read(group, end * chunk_size) // chunk_size:
                # where reading starts never moves back as ends grow: no end behind the missing chunk can be served
                end = gap[end] // step * step
                break
        else:
            return end * chunk_size
    return 0


def _gaps(sealed: Sequence[int], bit: int) -> list[int]:
    """For each chunk end, counted in chunks, the number of the last chunk before it that lacks `bit`; -1 for none."""
    last = -1
    if all(bits & bit for bits in set(sealed)):
        return [last] * (len(sealed) + 1)
    gaps = [last]
    for number, bits in enumerate(sealed):
        if not bits & bit:
            last = number
        gaps.append(last)
    return gaps
