"""The hit rule by example. `test_hit_oracle.py` tests the same rule against a replay of what engines read."""

import pytest

from lmcache.errors import GeometryError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.geometry.hits import Hit, LoadSpan, load_spans, longest_hit

FULL = KVGroup(GroupKind.FULL, 16, (64,))
MLA = KVGroup(GroupKind.FULL, 64, (73_728,))
SCRATCH = KVGroup(GroupKind.SCRATCH, 0, ())
RECURRENT = KVGroup(GroupKind.RECURRENT, 64, (64,))


def window(tokens, kind=GroupKind.SLIDING_WINDOW):
    return KVGroup(kind, 16, (64,), window=tokens)


def hit(groups, sealed, limit, alignment=0):
    return longest_hit(Geometry(groups, hit_alignment=alignment), 256, sealed, limit)


def test_nothing_stored_is_a_miss():
    assert hit((FULL, SCRATCH), [], 1000) == Hit(0, (range(0), range(0)))


@pytest.mark.parametrize(("prompt", "tokens"), [(1535, 1280), (1536, 1520), (1537, 1536), (2600, 2560)])
def test_a_full_hit_leaves_one_token_to_compute_and_may_end_inside_the_last_chunk(prompt, tokens):
    stored = [1] * (prompt // 256)
    assert hit((FULL,), stored, prompt - 1) == Hit(tokens, (range(-(-tokens // 256)),))


def test_full_attention_stops_at_the_first_missing_chunk():
    assert hit((FULL,), [1, 1, 0, 1], 2000) == Hit(512, (range(2),))


def test_every_full_group_is_needed():
    assert hit((FULL, MLA), [3, 3, 1, 3], 2000) == Hit(512, (range(2), range(2)))


def test_glm_5_3_cuts_at_its_block_of_64_tokens_and_ignores_the_scratch_beside_it():
    assert hit((MLA, SCRATCH), [1] * 6, 1535) == Hit(1472, (range(6), range(0)))


@pytest.mark.parametrize("limit", [0, -1, 15])
def test_a_limit_below_one_block_is_a_miss(limit):
    assert hit((FULL,), [1, 1], limit).tokens == 0
    assert hit((FULL, window(128)), [3, 3], limit).tokens == 0


def test_hits_end_on_the_engines_alignment():
    assert hit((FULL,), [1] * 6, 1535, alignment=512).tokens == 1024
    assert hit((FULL, window(128)), [3] * 5, 1300, alignment=512).tokens == 1024
    assert hit((FULL, window(128)), [3] * 5, 1300, alignment=384).tokens == 768


def test_a_window_beside_full_attention_needs_its_last_chunk_only():
    assert hit((FULL, window(128)), [1, 1, 1, 3], 1200) == Hit(1024, (range(4), range(3, 4)))


def test_a_window_that_is_missing_at_the_end_shortens_the_hit_to_an_end_where_it_is_stored():
    assert hit((FULL, window(128)), [1, 3, 1, 1], 1200) == Hit(512, (range(2), range(1, 2)))


@pytest.mark.parametrize(("tokens", "first"), [(1, 4), (2, 3), (257, 3), (258, 2), (512, 2), (514, 1), (5000, 0)])
def test_a_window_larger_than_a_chunk_needs_several_chunks(tokens, first):
    needs = range(first, 4) if first < 4 else range(0)
    assert hit((FULL, window(tokens)), [3] * 4, 1024) == Hit(1024, (range(4), needs))


def test_a_window_without_full_attention_needs_no_earlier_chunks():
    assert hit((window(300),), [0, 0, 1, 1, 0], 2000) == Hit(1024, (range(2, 4),))


def test_a_prompt_shorter_than_the_window_needs_all_of_it():
    assert hit((window(5000),), [1, 1, 0], 2000) == Hit(512, (range(2),))
    assert hit((window(5000),), [0, 1, 1], 2000).tokens == 0


def test_chunked_local_needs_what_follows_its_last_multiple():
    local = window(1024, GroupKind.CHUNKED_LOCAL)
    assert hit((FULL, local), [1, 3, 3, 1, 3, 3], 1536) == Hit(1536, (range(6), range(4, 6)))
    assert hit((FULL, local), [1] * 6, 1536) == Hit(1024, (range(4), range(0)))


def test_a_recurrent_group_needs_the_snapshot_at_the_end_and_no_other():
    assert hit((FULL, RECURRENT), [1, 1, 3, 1], 2000) == Hit(768, (range(3), range(2, 3)))
    assert hit((RECURRENT,), [0, 0, 1, 0], 2000) == Hit(768, (range(2, 3),))


def test_all_groups_agree_on_one_end():
    groups = (RECURRENT, FULL, window(300), SCRATCH)
    assert hit(groups, [7, 6, 3, 7, 6], 2000) == Hit(256, (range(1), range(1), range(1), range(0)))
    assert hit(groups, [7, 6, 7, 6, 7], 2000) == Hit(1280, (range(4, 5), range(5), range(3, 5), range(0)))


def test_a_full_load_starts_where_the_engine_stops():
    assert load_spans(FULL, 256, 608, computed=288) == [
        LoadSpan(1, 2, range(18, 32)),
        LoadSpan(2, 0, range(32, 38)),
    ]


def test_a_window_load_brings_the_window_from_the_kept_end_of_the_chunk():
    assert load_spans(window(128), 256, 1024, computed=0) == [LoadSpan(3, 0, range(56, 64))]
    assert load_spans(window(129), 256, 1024, computed=0) == [LoadSpan(3, 1, range(56, 64))]
    assert load_spans(window(300), 256, 1024, computed=0) == [
        LoadSpan(2, 13, range(45, 48)),
        LoadSpan(3, 0, range(48, 64)),
    ]


def test_a_window_load_leaves_the_engines_own_blocks_alone():
    assert load_spans(window(300), 256, 1024, computed=768) == [LoadSpan(3, 0, range(48, 64))]


def test_a_chunked_local_load_starts_at_the_last_multiple():
    local = window(640, GroupKind.CHUNKED_LOCAL)
    assert load_spans(local, 256, 768, computed=0) == [LoadSpan(2, 8, range(40, 48))]
    assert load_spans(local, 256, 1280, computed=0) == []


def test_a_recurrent_load_brings_one_snapshot():
    assert load_spans(RECURRENT, 256, 768, computed=256) == [LoadSpan(2, 0, range(11, 12))]


@pytest.mark.parametrize("group", [FULL, window(300), RECURRENT, SCRATCH])
def test_a_hit_that_the_engine_holds_itself_loads_nothing(group):
    assert load_spans(group, 256, 768, computed=768) == []
    assert load_spans(group, 256, 768, computed=1024) == []


@pytest.mark.parametrize(("group", "tokens"), [(window(128), 992), (RECURRENT, 960), (FULL, 1000)])
def test_a_length_that_no_lookup_gives_is_refused_rather_than_half_loaded(group, tokens):
    with pytest.raises(GeometryError) as caught:
        load_spans(group, 256, tokens, computed=0)
    assert str(caught.value) == (
        f"a hit of {tokens} tokens reads blocks of {group} that chunks of 256 tokens do not keep; "
        "load only hits whose length the server found for the same geometry and chunk size"
    )


def test_scratch_loads_nothing():
    assert load_spans(SCRATCH, 256, 768, computed=0) == []
