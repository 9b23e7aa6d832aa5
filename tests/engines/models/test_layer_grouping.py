"""The rules by which vLLM sorts layers into groups, one by one on small models. That they are vLLM's own: see
tests/engines/vllm/test_model_groups.py."""

import attrs
import pytest

from lmcache.engines.models.grouping import Group, group_layers
from lmcache.engines.models.layers import CacheLayer, Heads, Latent, Layers, LayerSpec, Ring, State
from lmcache.errors import GeometryError

FULL = Heads(16, 4, 64, "bfloat16")
WINDOW = Heads(16, 4, 64, "bfloat16", window=128)
LATENT = Latent(64, 576, "bfloat16")
KEYS = Latent(64, 132, "uint8", indexer=True)


def layers(*specs: LayerSpec, blocks_outermost: bool = False) -> Layers:
    return Layers(tuple(CacheLayer(f"{number}", spec) for number, spec in enumerate(specs)), blocks_outermost)


def names(groups: tuple[Group, ...]) -> list[str]:
    return ["".join(layer.name for layer in group) for group in groups]


def test_layers_of_one_family_are_one_group_whatever_their_pages_weigh() -> None:
    assert names(group_layers(layers(FULL, FULL))) == ["01"]
    assert names(group_layers(layers(KEYS, LATENT, KEYS, LATENT))) == ["0123"]
    assert names(group_layers(layers(FULL, Heads(16, 8, 64, "bfloat16")))) == ["01"]


def test_layers_of_unlike_kinds_are_split_to_groups_of_the_rarest_kind() -> None:
    assert names(group_layers(layers(WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL))) == ["03", "14", "25"]
    assert names(group_layers(layers(WINDOW, WINDOW, WINDOW, FULL))) == ["0", "1", "2", "3"]


def test_a_few_missing_layers_are_better_than_many_groups() -> None:
    # 3 is less than 1.5 × 2 + 1: groups of 3, one of them with a hole; 4 to 2 is split
    assert names(group_layers(layers(WINDOW, FULL, WINDOW, FULL, WINDOW, FULL, FULL))) == ["024", "1356"]
    assert names(group_layers(layers(WINDOW, FULL, WINDOW, FULL, FULL))) == ["02", "14", "3"]


def test_windows_of_unlike_length_are_groups_of_their_own() -> None:
    other = attrs.evolve(WINDOW, window=256)

    assert names(group_layers(layers(WINDOW, other, WINDOW, other))) == ["02", "13"]


def test_smaller_pages_get_longer_blocks_where_that_makes_them_equal() -> None:
    small = attrs.evolve(WINDOW, heads=1)
    (full,), (window,) = group_layers(layers(FULL, small))

    assert (full.spec.block_size, window.spec.block_size) == (16, 64)
    assert full.spec.page_bytes == window.spec.page_bytes == window.spec.content_bytes


def test_other_pages_are_padded() -> None:
    state = State(16, ((3, 100), (4, 16, 16)), ("bfloat16", "float32"))
    odd = attrs.evolve(WINDOW, heads=3)
    groups = group_layers(layers(FULL, state, odd))

    assert [group[0].spec.page_bytes for group in groups] == [16384] * 3
    assert [group[0].spec.content_bytes for group in groups] == [16384, 600 + 4096, 12288]


def test_latents_that_cannot_be_padded_are_refused() -> None:
    with pytest.raises(GeometryError) as raised:
        group_layers(layers(LATENT, attrs.evolve(WINDOW, block_size=64, heads=8)))

    assert str(raised.value) == (
        "a page of layer 0 has 73728 bytes, which do not divide the 131072 of the largest; start the engine, which may "
        "know a way, and ask it with --server"
    )


def test_blocks_of_many_pages_take_groups_as_they_come() -> None:
    ring = Ring(8, 2, 128, "bfloat16", "a tail")
    state = State(64, ((4, 64, 64),), ("float32",), padded=73728)
    made = layers(state, state, state, KEYS, ring, LATENT, blocks_outermost=True)

    # latents and keys are one pattern of a single repeat: states and rings are split to what fits beside it
    assert names(group_layers(made)) == ["0", "1", "2", "35", "4"]


def test_states_are_split_to_what_the_widest_group_leaves_room_for() -> None:
    states = (State(64, ((4, 64, 64),), ("float32",), padded=73728),) * 7
    made = group_layers(layers(*states, *(KEYS, LATENT) * 3, blocks_outermost=True))

    # a block holds three latents and three pages of keys, 246,528 bytes: room for 3 states, so 7 take three groups
    assert [len(group) for group in made] == [3, 2, 2, 6]


def test_groups_cover_the_number_of_repeats_that_wastes_least() -> None:
    window = Latent(64, 584, "uint8", window=128)
    made = group_layers(layers(*(window,) * 7, *(KEYS, LATENT) * 3, blocks_outermost=True))

    # 3 repeats a group would waste 2 places (7 → 9), 4 waste 1 + 1 (7 → 8, 3 → 4): as much, so the larger
    assert [len(group) for group in made] == [4, 3, 6]
