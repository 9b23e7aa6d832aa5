"""What a geometry accepts, what it says when it does not, and who holds and writes which bytes."""

import attrs
import pytest

from lmcache.errors import ConfigError, GeometryError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

FULL = KVGroup(GroupKind.FULL, 16, (64, 64), layers=("model.layers.0", "model.layers.1"))
SCRATCH = KVGroup(GroupKind.SCRATCH, 0, ())


def refusal(build, *args, **kwargs):
    with pytest.raises(GeometryError) as caught:
        build(*args, **kwargs)
    return str(caught.value)


def test_a_refused_group_is_a_config_error_and_a_value_error():
    with pytest.raises(ConfigError):
        KVGroup(GroupKind.FULL, 0, (64,))
    with pytest.raises(ValueError):
        KVGroup(GroupKind.FULL, 0, (64,))


def test_a_block_without_tokens_is_refused():
    assert refusal(KVGroup, GroupKind.FULL, 0, (64,)) == (
        "KV group (full, unnamed) has 0 tokens per block; give at least 1"
    )


def test_a_group_is_named_by_its_first_layer():
    assert refusal(KVGroup, GroupKind.RECURRENT, -1, (64,), layers=("mamba.0",)) == (
        "KV group (recurrent, mamba.0) has -1 tokens per block; give at least 1"
    )


@pytest.mark.parametrize("pages", [(), (64, 0), (-1,)])
def test_pages_without_bytes_are_refused(pages):
    assert refusal(KVGroup, GroupKind.FULL, 16, pages) == (
        f"KV group (full, unnamed) has pages of {pages} bytes; give one positive size a layer"
    )


def test_layer_names_must_match_the_pages():
    assert refusal(KVGroup, GroupKind.FULL, 16, (64, 64), layers=("a",)) == (
        "KV group (full, a) names 1 layers for 2 pages; name each layer once"
    )


@pytest.mark.parametrize(
    ("kind", "window"),
    [
        (GroupKind.FULL, 512),
        (GroupKind.FULL, -512),
        (GroupKind.RECURRENT, 512),
        (GroupKind.SLIDING_WINDOW, 0),
        (GroupKind.SLIDING_WINDOW, -512),
        (GroupKind.CHUNKED_LOCAL, 0),
    ],
)
def test_windows_belong_to_windowed_groups_and_to_no_others(kind, window):
    assert refusal(KVGroup, kind, 16, (64,), window=window) == (
        f"KV group ({kind.value}, unnamed) has a window of {window} tokens; "
        "give a positive window to sliding_window and chunked_local groups, and to no others"
    )


@pytest.mark.parametrize(("tokens_per_block", "pages", "window"), [(16, (), 0), (0, (64,), 0), (0, (), 512)])
def test_scratch_has_nothing_to_store(tokens_per_block, pages, window):
    assert refusal(KVGroup, GroupKind.SCRATCH, tokens_per_block, pages, window=window) == (
        "KV group (scratch, unnamed) is scratch, yet it has a block size, pages or a window; "
        "describe scratch as KVGroup(GroupKind.SCRATCH, 0, ())"
    )
    assert not SCRATCH.cached


def test_a_geometry_needs_a_group_that_is_stored():
    assert refusal(Geometry, (SCRATCH, SCRATCH)) == "none of the 2 KV groups can be cached; run without the cache"
    assert refusal(Geometry, ()) == "none of the 0 KV groups can be cached; run without the cache"


def test_a_geometry_needs_a_rank():
    assert refusal(Geometry, (FULL,), ranks=0) == "a geometry for 0 ranks; give 1 to 4096"


@pytest.mark.parametrize("shards", [0, -1, 3, 8])
def test_every_shard_is_held_by_the_same_number_of_ranks(shards):
    assert refusal(Geometry, (SCRATCH, attrs.evolve(FULL, shards=shards)), ranks=4) == (
        f"KV group 1 has {shards} shards, which do not divide 4 ranks; "
        "let every shard be held by the same number of ranks"
    )


@pytest.mark.parametrize("alignment", [-64, 32, 100])
def test_an_alignment_inside_a_block_is_refused(alignment):
    groups = (FULL, KVGroup(GroupKind.FULL, 64, (64,)))
    assert refusal(Geometry, groups, hit_alignment=alignment) == (
        f"hits aligned to {alignment} tokens do not end at block ends of every KV group; use a multiple of 64"
    )


def test_hits_end_at_block_ends_of_every_group_unless_the_engine_wants_more():
    groups = (SCRATCH, FULL, KVGroup(GroupKind.RECURRENT, 24, (64,)))
    assert Geometry(groups).block_multiple == 48
    assert Geometry(groups).alignment == 48
    assert Geometry(groups, hit_alignment=96).alignment == 96


def test_group_numbers_count_scratch_groups():
    assert Geometry((SCRATCH, FULL, SCRATCH, FULL)).cached_groups == (1, 3)


def test_a_block_weighs_its_pages_over_all_layers():
    assert KVGroup(GroupKind.FULL, 16, (64, 100, 64)).block_bytes == 228


def test_neighbouring_ranks_hold_the_same_shard():
    replicated, paired, split = (attrs.evolve(FULL, shards=shards) for shards in (1, 2, 4))
    geometry = Geometry((replicated, paired, split), ranks=4)
    assert [[geometry.shard_of(group, rank) for rank in range(4)] for group in range(3)] == [
        [0, 0, 0, 0],
        [0, 0, 1, 1],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize(("shards", "ranks"), [(1, 1), (1, 3), (2, 4), (2, 8), (4, 4), (3, 6)])
def test_each_chunk_of_each_shard_is_written_by_one_rank_that_holds_it_and_ranks_take_turns(shards, ranks):
    geometry = Geometry((attrs.evolve(FULL, shards=shards),), ranks=ranks)
    written = dict.fromkeys(range(ranks), 0)
    for chunk in range(24):
        writers = [rank for rank in range(ranks) if geometry.writes(0, rank, chunk)]
        assert sorted(geometry.shard_of(0, rank) for rank in writers) == list(range(shards))
        for rank in writers:
            written[rank] += 1
    assert set(written.values()) == {24 * shards // ranks}
