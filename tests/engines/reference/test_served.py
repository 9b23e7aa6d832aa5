"""The main job on every geometry: what comes from the server gives the very answer that computing it gives."""

import numpy as np
import pytest
from reference_stand import RunningServer, assert_different, assert_same, engine_at, prompt

from lmcache.engines.copy import Copier
from lmcache.engines.reference.engine import Engine
from lmcache.engines.reference.requests import Output
from lmcache.engines.reference.shapes import GEOMETRIES, ModelShape
from lmcache.geometry.groups import GroupKind

CHUNK = 64
"""Tokens per chunk of the module's server."""

WINDOW_EDGES = {"gemma": (99, 100, 101), "gptoss": (23, 24, 25), "chunked": (127, 128, 129), "everything": (39, 40, 41)}

LENGTHS = sorted(
    {k * CHUNK + around for k in (1, 2, 4) for around in (-1, 0, 1)} | {CHUNK + 16, 2 * CHUNK + 17, 4 * CHUNK + 40}
)


def expected_hit(shape: ModelShape, tokens: int) -> int:
    """By hand: whole chunks are stored; one token is left to compute; hits end at block ends where all is full, or else
    at chunk ends."""
    stored = tokens // CHUNK * CHUNK
    full_only = all(group.kind in {GroupKind.FULL, GroupKind.SCRATCH} for group in shape.groups)
    step = max(group.tokens_per_block for group in shape.groups) if full_only else CHUNK
    return min(stored, (tokens - 1) // step * step)


def twice(engine: Engine, server: RunningServer, tokens: list[int], salt: str = "") -> tuple[Output, Output]:
    """Cold, then again after the engine has forgotten."""
    (cold,) = engine.generate([tokens], salt=salt)
    server.wait_idle()
    engine.drop_prefix_cache()
    (served,) = engine.generate([tokens], salt=salt)
    return cold, served


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_prompt_that_comes_again_is_served_and_answered_the_same(server: RunningServer, seed: int, name: str) -> None:
    shape = GEOMETRIES[name]
    with engine_at(server, shape, seed=seed) as engine, Engine(shape, seed=seed) as alone:
        for tokens in (*LENGTHS, *(CHUNK + edge for edge in WINDOW_EDGES.get(name, ()))):
            # every length is a prompt of its own: nothing of it is there before
            asked = prompt(tokens, seed=tokens)
            (reference,) = alone.generate([asked])
            cold, served = twice(engine, server, asked)
            assert (cold.hit_tokens, served.hit_tokens) == (0, expected_hit(shape, tokens)), f"{tokens} tokens"
            assert served.computed_tokens == cold.computed_tokens - served.hit_tokens
            assert served.load_failures == 0
            assert_same(reference, cold)
            assert_same(reference, served)
        assert engine.unused_blocks == 511
    assert server.gauges()["tickets"] == server.gauges()["reservations"] == 0


@pytest.mark.parametrize("name", ["llama", "mla", "glm53_flash", "everything"])
def test_ranks_load_each_its_own_part(server: RunningServer, seed: int, name: str) -> None:
    shape = GEOMETRIES[name]
    with engine_at(server, shape, seed=seed, ranks=2) as engine:
        for tokens in (CHUNK * 5 - 1, CHUNK * 5, CHUNK * 5 + 1):
            cold, served = twice(engine, server, prompt(tokens, seed=tokens))
            assert (cold.hit_tokens, served.hit_tokens) == (0, expected_hit(shape, tokens))
            assert_same(cold, served)


def test_ranks_that_hold_the_same_bytes_store_them_once(server: RunningServer, seed: int) -> None:
    before = server.counters()["shards_committed"]
    with engine_at(server, GEOMETRIES["mla"], seed=seed, ranks=4) as engine:
        cold, served = twice(engine, server, prompt(CHUNK * 8 + 1))
    assert served.hit_tokens == CHUNK * 8
    assert server.counters()["shards_committed"] - before == 8
    assert_same(cold, served)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_another_engine_with_the_same_weights_is_served_what_the_first_has_stored(
    server: RunningServer, seed: int, name: str
) -> None:
    shape, asked = GEOMETRIES[name], prompt(CHUNK * 3 + 9)
    with engine_at(server, shape, seed=seed) as first:
        (cold,) = first.generate([asked])
    with engine_at(server, shape, seed=seed, blocks=333, step_tokens=50) as second:
        (served,) = second.generate([asked])
    assert served.hit_tokens == CHUNK * 3
    assert_same(cold, served)


def test_other_weights_under_the_same_name_share_nothing(server: RunningServer, seed: int) -> None:
    asked = prompt(CHUNK * 3 + 9)
    with engine_at(server, GEOMETRIES["llama"], seed=seed) as engine:
        (cold,) = engine.generate([asked])
    with engine_at(server, GEOMETRIES["llama"], seed=seed + 1_000_000) as other:
        (answer,) = other.generate([asked])
    assert answer.hit_tokens == 0
    assert_different(cold, answer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_number_of_ranks_is_another_namespace(server: RunningServer, seed: int, ranks: int) -> None:
    asked = prompt(CHUNK * 3 + 9)
    with engine_at(server, GEOMETRIES["llama"], seed=seed, ranks=ranks) as engine:
        engine.generate([asked])
    with engine_at(server, GEOMETRIES["llama"], seed=seed, ranks=3 - ranks) as other:
        (answer,) = other.generate([asked])
    assert answer.hit_tokens == 0


@pytest.mark.parametrize("salt", ["b", "a ", "A", "org/model@1", "ß" * 128, ""])
def test_another_salt_misses_and_its_own_hits(server: RunningServer, seed: int, salt: str) -> None:
    asked = prompt(CHUNK * 3 + 9)
    with engine_at(server, GEOMETRIES["llama"], seed=seed) as engine:
        cold, served = twice(engine, server, asked, salt="a")
        other, again = twice(engine, server, asked, salt=salt)
    assert (cold.hit_tokens, served.hit_tokens) == (0, CHUNK * 3)
    assert (other.hit_tokens, again.hit_tokens) == (0, CHUNK * 3)
    assert_same([cold, cold, cold], [served, other, again])


@pytest.mark.parametrize("name", GEOMETRIES)
def test_prompts_that_share_a_beginning_share_its_chunks(server: RunningServer, seed: int, name: str) -> None:
    shape = GEOMETRIES[name]
    system = prompt(CHUNK * 3, seed=1)
    tails = [prompt(length, seed=10 + length) for length in (1, 30, CHUNK, CHUNK * 2 + 5)]
    with engine_at(server, shape, seed=seed) as engine, Engine(shape, seed=seed) as alone:
        engine.generate([system + prompt(40, seed=2)])
        server.wait_idle()
        for tail in tails:
            engine.drop_prefix_cache()
            (served,) = engine.generate([system + tail])
            (reference,) = alone.generate([system + tail])
            assert served.hit_tokens == CHUNK * 3
            assert_same(reference, served)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_another_first_token_misses(server: RunningServer, seed: int, name: str) -> None:
    asked = prompt(CHUNK * 2 + 1)
    with engine_at(server, GEOMETRIES[name], seed=seed) as engine:
        engine.generate([asked])
        server.wait_idle()
        engine.drop_prefix_cache()
        (answer,) = engine.generate([[(asked[0] + 1) % 512, *asked[1:]]])
    assert answer.hit_tokens == 0


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_hit_goes_on_from_what_the_engine_still_holds_itself(server: RunningServer, seed: int, name: str) -> None:
    shape, asked = GEOMETRIES[name], prompt(CHUNK * 6 + 1)
    with engine_at(server, shape, seed=seed) as engine:
        (cold,) = engine.generate([asked])
        server.wait_idle()
        engine.drop_prefix_cache()
        (short,) = engine.generate([asked[: CHUNK * 2 + 1]])
        assert short.hit_tokens == CHUNK * 2
        (served,) = engine.generate([asked])
    assert served.own_hit_tokens == CHUNK * 2
    assert served.hit_tokens == CHUNK * 4
    assert_same(cold, served)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("step_tokens", [23, 100, 4096])
def test_every_chunk_is_stored_whatever_a_step_computes(
    server: RunningServer, seed: int, name: str, step_tokens: int
) -> None:
    shape, asked = GEOMETRIES[name], prompt(CHUNK * 4 + 3)
    with engine_at(server, shape, seed=seed, step_tokens=step_tokens) as engine:
        cold, served = twice(engine, server, asked)
    assert served.hit_tokens == CHUNK * 4
    assert_same(cold, served)


def test_what_was_generated_is_served_as_the_prompt_of_the_next_turn(server: RunningServer, seed: int) -> None:
    asked = prompt(CHUNK - 10)
    with engine_at(server, GEOMETRIES["everything"], seed=seed) as engine:
        (first,) = engine.generate([asked], max_tokens=40)
        server.wait_idle()
        engine.drop_prefix_cache()
        (second,) = engine.generate([asked + first.tokens])
    assert second.hit_tokens == CHUNK


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_load_that_copies_nothing_is_noticed(
    server: RunningServer, seed: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof that the tests above can fail: without the bytes, the answer is another."""
    with engine_at(server, GEOMETRIES[name], seed=seed) as engine:
        (cold,) = engine.generate([prompt(CHUNK * 2 + 1)])
        server.wait_idle()
    monkeypatch.setattr(Copier, "load", lambda *_, **__: None)
    with engine_at(server, GEOMETRIES[name], seed=seed) as engine:
        (served,) = engine.generate([prompt(CHUNK * 2 + 1)])
    assert served.hit_tokens == CHUNK * 2
    assert_different(cold, served)


def test_many_requests_at_once_are_answered_as_each_alone(server: RunningServer, seed: int) -> None:
    prompts = [prompt(length, seed=length) for length in (65, 100, 130, 200, 77)]
    with engine_at(server, GEOMETRIES["everything"], seed=seed, step_tokens=90) as engine:
        together = engine.generate(prompts)
        server.wait_idle()
        engine.drop_prefix_cache()
        served = engine.generate(prompts)
        alone = []
        for each in prompts:
            engine.drop_prefix_cache()
            alone += engine.generate([each], salt="another")
    assert [output.hit_tokens for output in served] == [64, 64, 128, 192, 64]
    assert [output.hit_tokens for output in alone] == [0, 0, 0, 0, 0]
    assert_same(together, served)
    assert_same(together, alone)
    assert np.isfinite(together[0].logits[0]).all()
