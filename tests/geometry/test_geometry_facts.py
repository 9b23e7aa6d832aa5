"""Which differences between geometries keep engines from sharing bytes."""

import os
import subprocess
import sys

import attrs
import pytest

from lmcache.core.keys import namespace_digest
from lmcache.geometry.fingerprint import geometry_facts
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

FULL = KVGroup(GroupKind.FULL, 64, (73_728,) * 78)
WINDOW = KVGroup(GroupKind.SLIDING_WINDOW, 64, (4096, 4096, 1024), window=512, shards=2)
SCRATCH = KVGroup(GroupKind.SCRATCH, 0, ())
GEOMETRY = Geometry((FULL, WINDOW, SCRATCH), ranks=2)


def test_the_facts_read_as_text():
    assert geometry_facts(GEOMETRY, 256) == {
        "geometry.chunk_size": "256",
        "geometry.ranks": "2",
        "geometry.alignment": "64",
        "geometry.group.0": "full, 64 tokens per block, window 0, 1 shards, pages 73728*78",
        "geometry.group.1": "sliding_window, 64 tokens per block, window 512, 2 shards, pages 4096*2 1024*1",
        "geometry.group.2": "scratch",
    }


def window(**changes):
    return attrs.evolve(GEOMETRY, groups=(FULL, attrs.evolve(WINDOW, **changes), SCRATCH))


@pytest.mark.parametrize(
    "other",
    [
        window(kind=GroupKind.CHUNKED_LOCAL),
        window(tokens_per_block=32),
        window(window=513),
        window(shards=1),
        window(page_bytes=(4096, 4096)),
        window(page_bytes=(4096, 1024, 4096)),
        window(page_bytes=(4096, 4096, 1025)),
        attrs.evolve(GEOMETRY, ranks=4),
        attrs.evolve(GEOMETRY, hit_alignment=128),
        attrs.evolve(GEOMETRY, groups=(WINDOW, FULL, SCRATCH)),
        attrs.evolve(GEOMETRY, groups=(FULL, SCRATCH, WINDOW)),
        attrs.evolve(GEOMETRY, groups=(FULL, WINDOW)),
        attrs.evolve(GEOMETRY, groups=(FULL, WINDOW, SCRATCH, SCRATCH)),
    ],
)
def test_whatever_changes_the_meaning_of_bytes_changes_the_namespace(other):
    assert namespace_digest(geometry_facts(other, 256)) != namespace_digest(geometry_facts(GEOMETRY, 256))


def test_the_chunk_size_changes_the_namespace():
    assert namespace_digest(geometry_facts(GEOMETRY, 512)) != namespace_digest(geometry_facts(GEOMETRY, 256))


def test_layer_names_and_a_spelt_out_default_alignment_change_nothing():
    named = attrs.evolve(window(layers=("a", "b", "c")), hit_alignment=64)
    assert named != GEOMETRY
    assert geometry_facts(named, 256) == geometry_facts(GEOMETRY, 256)


@pytest.mark.parametrize("seed", ["0", "1"])
def test_another_process_finds_the_same_facts(seed):
    program = (
        "from lmcache.geometry.fingerprint import geometry_facts\n"
        "from lmcache.geometry.groups import Geometry, GroupKind, KVGroup\n"
        f"print(geometry_facts({_source(GEOMETRY)}, 256))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == str(geometry_facts(GEOMETRY, 256))


def _source(geometry):
    groups = ", ".join(
        f"KVGroup(GroupKind({group.kind.value!r}), {group.tokens_per_block}, {group.page_bytes}, "
        f"window={group.window}, shards={group.shards})"
        for group in geometry.groups
    )
    return f"Geometry(({groups}), ranks={geometry.ranks})"
