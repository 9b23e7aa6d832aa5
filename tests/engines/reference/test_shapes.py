"""The shapes that stand for real models, and how they are told to the cache."""

import attrs
import pytest

from lmcache.core.protocol import Role
from lmcache.engines.reference.describe import describe
from lmcache.engines.reference.pages import PageMemory
from lmcache.engines.reference.shapes import GEOMETRIES
from lmcache.geometry.groups import GroupKind


def test_there_is_a_shape_for_every_kind_of_group() -> None:
    kinds = {group.kind for shape in GEOMETRIES.values() for group in shape.groups}
    assert kinds == set(GroupKind)
    assert {"llama", "mla", "gemma", "chunked", "hybrid", "glm53", "glm53_flash"} <= set(GEOMETRIES)


def test_glm53_has_one_group_of_64_tokens_and_its_flash_version_a_scratch_group_beside_it() -> None:
    plain, flash = (GEOMETRIES[name].geometry().groups for name in ("glm53", "glm53_flash"))
    assert [(g.kind, g.tokens_per_block) for g in plain] == [(GroupKind.FULL, 64)]
    assert [(g.kind, g.tokens_per_block) for g in flash] == [(GroupKind.FULL, 64), (GroupKind.SCRATCH, 0)]
    assert flash[0].page_bytes == (64 * 32 * 4, 8 * 4) * 3, "a latent page and the mean of its index keys, per layer"


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_geometry_counts_the_bytes_that_the_pages_have(name: str, ranks: int) -> None:
    shape = GEOMETRIES[name]
    geometry, memory = shape.geometry(ranks), PageMemory(shape, ranks, 5)
    for number in geometry.cached_groups:
        pages = memory.pages(number)
        assert tuple(layer.shape[1] for layer in pages.layers) == geometry.groups[number].page_bytes
        assert pages.blocks == 5
    assert not geometry.groups[-1].page_bytes or geometry.groups[-1].cached


@pytest.mark.parametrize("name", GEOMETRIES)
def test_pages_of_different_layers_and_groups_share_no_byte(name: str) -> None:
    shape = GEOMETRIES[name]
    memory = PageMemory(shape, 1, 4)
    arrays = [layer for number in shape.geometry().cached_groups for layer in memory.pages(number).layers]
    for mark, array in enumerate(arrays, 1):
        array[:] = mark
    for mark, array in enumerate(arrays, 1):
        assert (array == mark).all()


def test_whatever_changes_the_bytes_changes_the_facts() -> None:
    shape = GEOMETRIES["llama"]
    facts = describe(shape, seed=1, ranks=1, role=Role.WORKER).facts
    assert describe(shape, seed=1, ranks=1, role=Role.SCHEDULER).facts == facts
    others = [attrs.evolve(shape, heads=8), attrs.evolve(shape, vocabulary=511), attrs.evolve(shape, hidden=128)]
    for other in others:
        assert describe(other, seed=1, ranks=1, role=Role.WORKER).facts != facts
    assert describe(shape, seed=2, ranks=1, role=Role.WORKER).facts != facts
