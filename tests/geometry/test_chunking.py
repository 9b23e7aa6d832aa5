"""Which chunk sizes a geometry allows, what a chunk keeps, and what a chunk size caches of a prompt."""

import pytest

from lmcache.errors import GeometryError
from lmcache.geometry.chunking import (
    cached_tokens,
    check_chunk_size,
    chosen_chunk_size,
    default_chunk_size,
    kept_blocks,
    kept_span,
)
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

SCRATCH = KVGroup(GroupKind.SCRATCH, 0, ())


def group(kind, tokens_per_block, window=0):
    return KVGroup(kind, tokens_per_block, (64,), window=window)


def full(tokens_per_block):
    return group(GroupKind.FULL, tokens_per_block)


@pytest.mark.parametrize(
    ("chunk_size", "prompt", "cached"),
    [
        (256, 5040, 4864),
        (1024, 5040, 4096),
        (256, 1535, 1280),
        (256, 1536, 1536),
        (256, 1537, 1536),
        (256, 2600, 2560),
        (256, 255, 0),
        (256, 0, 0),
    ],
)
def test_a_prompt_is_cached_in_whole_chunks(chunk_size, prompt, cached):
    assert cached_tokens(chunk_size, prompt) == cached


@pytest.mark.parametrize(
    ("geometry", "chunk_size", "model", "message"),
    [
        (
            Geometry((full(64), SCRATCH)),
            100,
            "GLM-5.3",
            "chunk size 100 is not a multiple of 64, the tokens per block of KV group 0 of GLM-5.3; use 64, 128, 256…",
        ),
        (
            Geometry((SCRATCH, full(16), full(48))),
            256,
            "",
            "chunk size 256 is not a multiple of 48, the tokens per block of KV group 2; use 240, 288, 336…",
        ),
        (
            Geometry((full(64),)),
            1000,
            "",
            "chunk size 1000 is not a multiple of 64, the tokens per block of KV group 0; use 256, 960, 1024…",
        ),
        (
            Geometry((group(GroupKind.RECURRENT, 528), full(16))),
            256,
            "",
            "chunk size 256 is not a multiple of 528, the tokens per block of KV group 0; use 528, 1056, 1584…",
        ),
        (
            Geometry((full(64),)),
            0,
            "m",
            "chunk size 0 is not a positive number of tokens; use 64, 256, 320…",
        ),
        (
            Geometry((full(64),)),
            -64,
            "m",
            "chunk size -64 is not a positive number of tokens; use 64, 256, 320…",
        ),
    ],
)
def test_a_chunk_size_that_does_not_fit_names_the_group_and_sizes_that_fit(geometry, chunk_size, model, message):
    with pytest.raises(GeometryError) as caught:
        check_chunk_size(geometry, chunk_size, model)
    assert str(caught.value) == message


@pytest.mark.parametrize("chunk_size", [48, 96, 4800])
def test_multiples_of_every_block_size_are_accepted(chunk_size):
    check_chunk_size(Geometry((full(16), SCRATCH, full(24))), chunk_size)


@pytest.mark.parametrize(
    ("groups", "chunk_size"),
    [
        ((full(16),), 256),
        ((full(64), SCRATCH), 256),
        ((full(48),), 288),
        ((full(16), full(528)), 528),
        ((full(16), group(GroupKind.SLIDING_WINDOW, 128, 1024)), 256),
        ((full(16), group(GroupKind.RECURRENT, 64)), 64),
        ((full(16), group(GroupKind.RECURRENT, 400)), 400),
    ],
)
def test_the_default_is_256_rounded_up_and_the_smallest_allowed_beside_recurrent_groups(groups, chunk_size):
    geometry = Geometry(groups)
    assert default_chunk_size(geometry) == chunk_size
    check_chunk_size(geometry, chunk_size)


@pytest.mark.parametrize(
    ("kept_group", "blocks"),
    [
        (full(64), 4),
        (SCRATCH, 0),
        (group(GroupKind.RECURRENT, 64), 1),
        (group(GroupKind.SLIDING_WINDOW, 16, 1), 1),
        (group(GroupKind.SLIDING_WINDOW, 16, 128), 8),
        (group(GroupKind.SLIDING_WINDOW, 16, 129), 9),
        (group(GroupKind.SLIDING_WINDOW, 16, 512), 16),
        (group(GroupKind.CHUNKED_LOCAL, 16, 100), 7),
        (group(GroupKind.CHUNKED_LOCAL, 16, 8192), 16),
    ],
)
def test_a_chunk_of_256_tokens_keeps_what_a_hit_at_its_end_reads_of_it(kept_group, blocks):
    assert kept_blocks(kept_group, 256) == blocks


def test_kept_blocks_end_with_their_chunk():
    assert kept_span(full(64), 256, 0) == range(4)
    assert kept_span(full(64), 256, 3) == range(12, 16)
    assert kept_span(group(GroupKind.SLIDING_WINDOW, 16, 100), 256, 1) == range(25, 32)
    assert kept_span(group(GroupKind.SLIDING_WINDOW, 16, 1000), 256, 1) == range(16, 32)
    assert kept_span(group(GroupKind.RECURRENT, 128), 256, 2) == range(5, 6)
    assert not kept_span(SCRATCH, 256, 2)


def test_an_engine_whose_keys_come_by_pages_keeps_chunks_of_a_page_whatever_the_server_was_told():
    pages = Geometry((full(16),), own_chunk=16)

    assert chosen_chunk_size(pages, None) == 16
    assert chosen_chunk_size(pages, 256) == 16
    assert chosen_chunk_size(pages, 100) == 16
    assert chosen_chunk_size(Geometry((full(16),)), None) == 256
    assert chosen_chunk_size(Geometry((full(16),)), 64) == 64
    with pytest.raises(GeometryError, match="chunk size 100 is not a multiple of 16"):
        chosen_chunk_size(Geometry((full(16),)), 100)


def test_an_engine_s_own_chunks_end_at_block_ends():
    with pytest.raises(GeometryError, match="chunks of 24 tokens do not end at block ends of every KV group"):
        Geometry((full(16),), own_chunk=24)
