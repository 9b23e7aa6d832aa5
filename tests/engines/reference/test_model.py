"""The model itself: exact in whatever pieces it is computed, and dependent on every page that it reads."""

import numpy as np
import pytest
from reference_stand import prompt

from lmcache.engines.reference.model import Model, Span
from lmcache.engines.reference.pages import Floats, PageMemory
from lmcache.engines.reference.shapes import GEOMETRIES, ModelShape
from lmcache.engines.reference.tables import first_needed_block

TOKENS = 300


def tables(shape: ModelShape) -> list[list[int]]:
    """Blocks for `TOKENS` tokens and a few more, in no order."""
    blocks = iter(np.random.default_rng(1).permutation(np.arange(1, 200)).tolist())
    return [
        [next(blocks) for _ in range(-(-(TOKENS + 8) // group.tokens_per_block) if group.tokens_per_block else 1)]
        for group in shape.groups
    ]


def computed(shape: ModelShape, cuts: list[int], tokens: list[int]) -> tuple[Floats, PageMemory, Model]:
    memory = PageMemory(shape, 1, 200)
    model = Model(shape, memory, seed=3, reduce=lambda partial: partial)
    table = tables(shape)
    logits = None
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        logits = model.compute(Span(start, tokens[start:stop], table))
    assert logits is not None
    return logits, memory, model


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_prompt_gives_the_same_logits_and_pages_in_whatever_pieces_it_is_computed(name: str) -> None:
    shape = GEOMETRIES[name]
    whole, pages, _ = computed(shape, [], prompt(TOKENS))
    for cuts in ([1], [31, 32, 33], [64, 128, 192, 256], [5, 100, 299]):
        logits, others, _ = computed(shape, cuts, prompt(TOKENS))
        assert np.array_equal(whole, logits)
        for group in shape.geometry().cached_groups:
            for mine, theirs in zip(pages.pages(group).layers, others.pages(group).layers, strict=True):
                assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_null_block_is_never_written(name: str) -> None:
    _, memory, _ = computed(GEOMETRIES[name], [77], prompt(TOKENS))
    for group in GEOMETRIES[name].geometry().cached_groups:
        assert not any(layer[0].any() for layer in memory.pages(group).layers)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_page_that_a_token_reads_changes_its_logits_and_no_other_page_does(name: str) -> None:
    shape = GEOMETRIES[name]
    tokens, table = prompt(TOKENS), tables(shape)
    # the first token of a block, so that what each group needs is whole blocks
    start = 256
    expected, memory, model = computed(shape, [start], tokens[: start + 1])
    for group in shape.geometry().cached_groups:
        kind = shape.groups[group]
        needed = first_needed_block(kind, start)
        for number in range(start // kind.tokens_per_block):
            pages = [layer.view(np.float32)[table[group][number]] for layer in memory.pages(group).layers]
            before = [page.copy() for page in pages]
            for page in pages:
                np.add(page, 1, out=page)
            again = model.compute(Span(start, [tokens[start]], table))
            for page, content in zip(pages, before, strict=True):
                page[:] = content
            if number >= needed:
                assert not np.array_equal(expected, again), f"group {group} reads nothing of block {number}"
            else:
                assert np.array_equal(expected, again), f"group {group} reads block {number}, long left behind"


@pytest.mark.parametrize("name", GEOMETRIES)
def test_answers_are_varied_enough_to_tell_prompts_apart(name: str) -> None:
    shape = GEOMETRIES[name]
    rows = {computed(shape, [], prompt(TOKENS, seed))[0].argmax() for seed in range(8)}
    assert len(rows) >= 6
