"""The hit rule against a brute-force replay of what an engine reads.

The oracle knows nothing of `hits.py` and shares no arithmetic with it: it lays a prompt out token by token, writes down
the pages that each chunk stores, resumes at every possible length, longest first, and replays, token by token, which
earlier tokens the next ones read. The first length whose pages are all stored is the answer.

By default a few thousand cases. `LMCACHE_HIT_CASES=1000000 pytest tests/geometry/test_hit_oracle.py` runs a million
(about ten minutes), other ones with `LMCACHE_HIT_SEED=7`; a failure prints the case.
"""

import os
import random

import attrs
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.geometry.hits import load_spans, longest_hit

CASES = int(os.environ.get("LMCACHE_HIT_CASES", "4000"))
SEED = int(os.environ.get("LMCACHE_HIT_SEED", "0"))


@attrs.frozen
class Case:
    geometry: Geometry
    chunk_size: int
    sealed: list[int]
    limit: int

    @property
    def tokens(self):
        """Positions of all tokens of the known chunks."""
        return list(range(len(self.sealed) * self.chunk_size))


def draw_group(draw, kind, chunk_multiple):
    if kind is GroupKind.SCRATCH:
        return KVGroup(kind, 0, ())
    windowed = kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
    window = draw.randint(1, draw.choice([3, 3 * chunk_multiple, 30])) if windowed else 0
    return KVGroup(kind, draw.choice([1, 2, 3, 4]), (1,), window=window)


def draw_case(draw):
    """One random case, from a `random.Random` or from Hypothesis, which then shrinks it."""
    multiple = draw.randint(1, 3)
    palette = draw.sample(list(GroupKind), draw.randint(1, len(GroupKind)))
    kinds = [draw.choice(palette) for _ in range(draw.randint(1, 4))]
    if all(kind is GroupKind.SCRATCH for kind in kinds):
        kinds.append(GroupKind.FULL)
    groups = tuple(draw_group(draw, kind, multiple) for kind in kinds)
    block_multiple = Geometry(groups).block_multiple
    geometry = Geometry(groups, hit_alignment=block_multiple * draw.choice([0, 0, 1, 2, 3]))
    chunk_size = block_multiple * multiple
    stored = draw.choice([0.5, 0.8, 0.95, 1.0])
    chunks = draw.randint(0, 6)
    sealed = [sum((draw.random() < stored) << group for group in range(len(groups))) for _ in range(chunks)]
    return Case(geometry, chunk_size, sealed, draw.randint(0, (chunks + 1) * chunk_size))


def cut(tokens, length):
    """Consecutive runs of `length` tokens."""
    runs = []
    for token in tokens:
        if not runs or len(runs[-1]) == length:
            runs.append([])
        runs[-1].append(token)
    return runs


def keep(group, chunk_size, pages):
    """The pages, out of those of one chunk, that an object holds."""
    if group.kind is GroupKind.FULL:
        return pages
    if group.kind is GroupKind.RECURRENT:
        return pages[-1:]
    kept, missing = [], min(group.window, chunk_size)
    for page in reversed(pages):
        if missing > 0:
            kept.insert(0, page)
            missing -= len(page)
    return kept


def stored_pages(case, number):
    """Every page that some readable object holds: page number -> (chunk, position in the object)."""
    group, found = case.geometry.groups[number], {}
    pages = list(enumerate(cut(case.tokens, group.tokens_per_block)))
    for chunk, tokens in enumerate(cut(case.tokens, case.chunk_size)):
        mine = [page for page in pages if page[1][-1] in tokens]
        kept = keep(group, case.chunk_size, [page for _, page in mine])
        numbers = [page_number for page_number, page in mine if page in kept]
        if case.sealed[chunk] >> number & 1:
            found |= {page: (chunk, position) for position, page in enumerate(numbers)}
    return found


def tokens_read_by(group, reader):
    """Positions that the token at `reader` attends to, itself included."""
    upto = list(range(reader + 1))
    if group.kind is GroupKind.FULL:
        return upto
    if group.kind is GroupKind.SLIDING_WINDOW:
        return upto[-group.window :]
    return cut(upto, group.window)[-1]


def pages_read(case, group, resume):
    """Numbers of the pages that an engine reads of its past when it goes on with the token at `resume`."""
    pages = cut(case.tokens, group.tokens_per_block) if group.cached else []
    if group.kind is GroupKind.RECURRENT:
        read = {resume - 1}
        return {number for number, page in enumerate(pages) if page[-1] in read}
    read = set()
    for reader in range(resume, resume + 3 if group.cached else resume):
        read |= {token for token in tokens_read_by(group, reader) if token < resume}
    return {number for number, page in enumerate(pages) if read.intersection(page)}


def possible_ends(case):
    """Every length at which a hit may end, right or not, longest first."""
    whole_chunks = {tokens[-1] + 1 for tokens in cut(case.tokens, case.chunk_size)}
    on_alignment = {tokens[-1] + 1 for tokens in cut(case.tokens, case.geometry.alignment)}
    if any(group.kind not in (GroupKind.FULL, GroupKind.SCRATCH) for group in case.geometry.groups):
        on_alignment &= whole_chunks
    aligned = set(range(0, len(case.tokens) + 1, case.geometry.alignment))
    return sorted((end for end in on_alignment & aligned if end <= case.limit), reverse=True)


def longest_right_prefix(case, stored):
    for end in possible_ends(case):
        if all(
            pages_read(case, group, end) <= stored[number].keys() for number, group in enumerate(case.geometry.groups)
        ):
            return end
    return 0


def check_load(case, hit, stored, number, computed):
    """What load_spans copies, with what the engine holds at `computed`, is what the engine reads, and no more."""
    group = case.geometry.groups[number]
    read = pages_read(case, group, hit.tokens)
    loaded = set()
    for span in load_spans(group, case.chunk_size, hit.tokens, computed):
        assert span.chunk in hit.needs[number]
        for position, page in enumerate(span.blocks, span.first):
            assert stored[number][page] == (span.chunk, position)
            loaded.add(page)
    if computed >= hit.tokens:
        assert not loaded
        return
    held = pages_read(case, group, computed) if computed else set()
    assert read <= loaded | held
    assert loaded <= read
    if group.kind is not GroupKind.RECURRENT:
        assert not loaded & held


def check(case, computed_lengths):
    stored = [stored_pages(case, number) if group.cached else {} for number, group in enumerate(case.geometry.groups)]
    hit = longest_hit(case.geometry, case.chunk_size, case.sealed, case.limit)
    assert hit.tokens == longest_right_prefix(case, stored)
    for number, group in enumerate(case.geometry.groups):
        read = pages_read(case, group, hit.tokens) if hit.tokens else set()
        assert set(hit.needs[number]) == {stored[number][page][0] for page in read}
        for computed in computed_lengths:
            check_load(case, hit, stored, number, computed)


def draw_computed(draw, case):
    """Lengths that an engine might hold itself: nothing, a few whole blocks, more than any hit."""
    ends = range(0, len(case.tokens) + 1, case.geometry.block_multiple)
    return {0, draw.choice(ends), draw.choice(ends), ends[-1]}


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_hit_is_the_longest_right_prefix_and_its_load_is_what_the_engine_reads(draw):
    case = draw_case(draw)
    note(case)
    check(case, draw_computed(draw, case))


@pytest.mark.timeout(180 + CASES // 100)  # a million cases take about ten minutes
def test_the_same_holds_for_as_many_seeded_cases_as_asked_for():
    draw = random.Random(SEED)
    for number in range(CASES):
        case = draw_case(draw)
        try:
            check(case, draw_computed(draw, case))
        except Exception as error:
            error.add_note(f"case {number} of seed {SEED}: {case}")
            raise


def test_the_cases_reach_every_branch_of_the_rule():
    """Guards the generator: misses, cuts inside chunks, holes before a hit, windows over several chunks all occur."""
    draw, seen = random.Random(SEED), set()
    for _ in range(2000):
        case = draw_case(draw)
        hit = longest_hit(case.geometry, case.chunk_size, case.sealed, case.limit)
        ends_at = hit.tokens // case.chunk_size
        seen.add("hit" if hit.tokens else "miss")
        if hit.tokens % case.chunk_size:
            seen.add("cut inside a chunk")
        if hit.tokens and not all(case.sealed[:ends_at]):
            seen.add("hole before the hit")
        for group, needs in zip(case.geometry.groups, hit.needs, strict=True):
            if hit.tokens and len(needs) > 1:
                seen.add(f"{group.kind.value} over several chunks")
            if hit.tokens and group.cached and not needs:
                seen.add(f"{group.kind.value} that needs nothing")
            if hit.tokens and needs and needs[0] > 0:
                seen.add(f"{group.kind.value} without the first chunk")
    assert seen == {
        "hit",
        "miss",
        "cut inside a chunk",
        "hole before the hit",
        "full over several chunks",
        "sliding_window over several chunks",
        "chunked_local over several chunks",
        "sliding_window that needs nothing",
        "chunked_local that needs nothing",
        "sliding_window without the first chunk",
        "chunked_local without the first chunk",
        "recurrent without the first chunk",
    }
