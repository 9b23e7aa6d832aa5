"""What a geometry means for a cache, by hand-worked figures; and geometries read back from a server's facts."""

from pathlib import Path

import attrs
import pytest

from lmcache.cli.geometry_facts import (
    GIB,
    Kept,
    advise,
    allowed_chunk_sizes,
    chosen_chunk_sizes,
    chunk_facts,
    full_bytes_per_token,
    stored_bytes,
)
from lmcache.cli.geometry_report import as_lines
from lmcache.cli.geometry_served import read_facts, served_geometries
from lmcache.cli.geometry_subject import explain_model
from lmcache.engines.models.describe import describe
from lmcache.engines.models.running import Running
from lmcache.engines.models.source import read_config
from lmcache.engines.reference.shapes import GEOMETRIES
from lmcache.errors import ConfigError, GeometryError, ProtocolError
from lmcache.geometry.fingerprint import geometry_facts
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

CONFIGS = Path(__file__).parents[1] / "engines" / "models" / "configs"
NAMES = sorted(folder.name for folder in CONFIGS.iterdir())
MIB = 1 << 20

FULL = KVGroup(GroupKind.FULL, 16, (4096, 4096))
WINDOW = KVGroup(GroupKind.SLIDING_WINDOW, 16, (4096,) * 6, window=100)
STATE = KVGroup(GroupKind.RECURRENT, 512, (300_000,) * 3)
SCRATCH = KVGroup(GroupKind.SCRATCH, 0, ())


def test_a_chunk_stores_all_of_full_groups_a_window_of_others_and_one_state() -> None:
    # 256 tokens are 16 blocks of 2 pages; the last 100 are in 7 blocks of 6 pages
    assert stored_bytes(Geometry((FULL,)), 256) == 16 * 2 * 4096
    assert stored_bytes(Geometry((FULL, WINDOW, SCRATCH)), 256) == (16 * 2 + 7 * 6) * 4096
    assert stored_bytes(Geometry((STATE, FULL)), 1024) == 3 * 300_000 + 64 * 2 * 4096
    # a window longer than the chunk keeps all of it
    assert stored_bytes(Geometry((WINDOW,)), 96) == 6 * 6 * 4096


def test_what_ranks_hold_apart_counts_for_each() -> None:
    split = attrs.evolve(FULL, shards=4)

    assert stored_bytes(Geometry((split,), ranks=4), 256) == 4 * 16 * 2 * 4096
    assert stored_bytes(Geometry((FULL,), ranks=4), 256) == 16 * 2 * 4096
    assert full_bytes_per_token(Geometry((split,), ranks=4)) == 4 * 2 * 256


def test_full_attention_everywhere_is_what_windows_and_states_are_compared_with() -> None:
    # 256 bytes a layer and token: 2 full layers, 6 with windows, and 3 with states that would be like a full one
    assert full_bytes_per_token(Geometry((FULL, WINDOW))) == 8 * 256
    assert full_bytes_per_token(Geometry((STATE, FULL))) == 5 * 256
    # nothing to compare a model with that has states only
    assert full_bytes_per_token(Geometry((STATE,))) == 0
    assert chunk_facts(Geometry((STATE,)), 512, [1], MIB).share_of_full == 1


def test_tokens_per_gb_count_whole_cells_as_the_server_does() -> None:
    geometry = Geometry((FULL, WINDOW))
    # 131,072 and 172,032 bytes: 2 and 3 cells of 64 KiB, so a GB of 16,384 cells holds 3,276 chunks
    small = chunk_facts(geometry, 256, [5040], 1 << 16)
    assert (small.cells, small.tokens_per_gb) == (5, 3276 * 256)
    # in cells of 1 MiB each object takes one
    large = chunk_facts(geometry, 256, [5040], MIB)
    assert (large.cells, large.tokens_per_gb) == (2, 512 * 256)
    assert chunk_facts(geometry, 256, [5040], 2 * GIB).tokens_per_gb == 0


def test_a_prompt_keeps_its_whole_chunks_and_hits_all_but_the_token_that_is_left_to_compute() -> None:
    full = chunk_facts(Geometry((FULL,)), 256, [100, 1024, 5040], MIB).prompts
    window = chunk_facts(Geometry((FULL, WINDOW)), 256, [100, 1024, 5040], MIB).prompts

    assert full == (Kept(100, 0, 0), Kept(1024, 1024, 1008), Kept(5040, 4864, 4864))
    # a hit ends at a chunk end where there is a window
    assert window == (Kept(100, 0, 0), Kept(1024, 1024, 768), Kept(5040, 4864, 4864))
    assert [f"{kept.share:.0%}" for kept in full] == ["0%", "100%", "97%"]
    assert f"{chunk_facts(Geometry((FULL,)), 1024, [5040], MIB).prompts[0].share:.0%}" == "81%"


def test_sizes_to_show_are_the_default_and_a_larger_one_unless_asked_for() -> None:
    assert chosen_chunk_sizes(Geometry((FULL,)), ()) == (256, 1024)
    assert chosen_chunk_sizes(Geometry((attrs.evolve(FULL, tokens_per_block=48),)), ()) == (288, 1152)
    assert chosen_chunk_sizes(Geometry((STATE, FULL)), ()) == (512,)
    assert chosen_chunk_sizes(Geometry((FULL,)), (512, 64, 512)) == (512, 64)
    assert allowed_chunk_sizes(Geometry((FULL, KVGroup(GroupKind.FULL, 24, (1,))))) == (48, 96, 144, 192)


def test_the_recommendation_is_what_a_server_does_by_itself_with_its_reason() -> None:
    assert advise(Geometry((FULL,))).reason == (
        "only whole chunks are stored, so of a prompt of 5,040 tokens 256 keeps 97% and 1,024 keeps 81%"
    )
    # of 8 layers 6 have the window: 74 of 128 pages in 256 tokens, 170 of 512 in 1,024
    assert advise(Geometry((FULL, WINDOW))).reason == (
        "only whole chunks are stored, so of a prompt of 5,040 tokens 256 keeps 97% and 1,024 keeps 81%; 1,024 would "
        "store 43% fewer bytes a token"
    )
    states = advise(Geometry((STATE, FULL)))
    assert states.chunk_size == 512
    assert states.reason == (
        "hits end only where a chunk ends with a state, and engines leave few of them, so the smallest size that fits, "
        "512, hits most"
    )


def test_a_size_that_does_not_fit_is_refused_by_the_servers_own_rule() -> None:
    with pytest.raises(GeometryError) as raised:
        chunk_facts(Geometry((FULL,)), 100, [1], MIB, "some model")
    assert str(raised.value) == (
        "chunk size 100 is not a multiple of 16, the tokens per block of KV group 0 of some model; use 96, 112, 256…"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_model_is_told_within_100_columns(name: str) -> None:
    lines = list(as_lines([explain_model(str(CONFIGS / name), Running(), "table", MIB)], (), ()))

    assert max(map(len, lines)) <= 100
    assert lines[0].startswith(f"{name} (")
    assert lines[-1].endswith(".")


# ------------------------------------------------------------------------------------------------ what a server tells


@pytest.mark.parametrize(
    "geometry",
    [
        *(shape.geometry(ranks) for shape in GEOMETRIES.values() for ranks in (1, 4)),
        *(describe(read_config(CONFIGS / name), Running()).geometry for name in NAMES),
    ],
)
def test_a_geometry_is_read_back_from_its_facts(geometry: Geometry) -> None:
    facts = geometry_facts(geometry, geometry.block_multiple)
    read = read_facts({"model": "a/b", **facts})

    unnamed = tuple(attrs.evolve(group, layers=()) for group in geometry.groups)
    assert read == attrs.evolve(geometry, groups=unnamed, hit_alignment=geometry.alignment)
    assert geometry_facts(read, geometry.block_multiple) == facts


@pytest.mark.parametrize(
    "changed",
    [
        {"geometry.ranks": "many"},
        {"geometry.group.0": "twisted, 16 tokens per block, window 0, 1 shards, pages 4096*2"},
        {"geometry.group.0": "full, 16 tokens per block"},
        {"geometry.group.one": "scratch"},
    ],
)
def test_facts_that_say_something_else_are_refused_as_another_version(changed: dict[str, str]) -> None:
    facts = geometry_facts(Geometry((FULL,)), 256)

    with pytest.raises(ProtocolError) as raised:
        read_facts(facts | changed)
    assert str(raised.value).startswith("the server describes a geometry in words that this lmcache does not read: ")
    assert raised.value.remedy == "install the same lmcache version on both sides"


def test_facts_that_lack_a_number_are_refused() -> None:
    facts = geometry_facts(Geometry((FULL,)), 256)
    del facts["geometry.ranks"]

    with pytest.raises(ProtocolError):
        read_facts(facts)


def test_a_server_that_nobody_registered_at_has_nothing_to_explain() -> None:
    with pytest.raises(ConfigError) as raised:
        served_geometries({"namespaces": [], "address": "127.0.0.1:1"})
    assert str(raised.value).startswith("no engine has registered at 127.0.0.1:1; ")
