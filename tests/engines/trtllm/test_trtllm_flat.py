"""One KV pool, under a model of TensorRT-LLM's executor, beside a real server: byte for byte."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="the simulated KV caches are torch tensors")

from trtllm_model import LayerGroup, Toy
from trtllm_names import FLAT, LAYOUTS, SALTED
from trtllm_stand import BLOCK, CHUNK, TrtllmServer, fresh, prompt

every_generation = pytest.mark.parametrize(
    "names", [FLAT, SALTED, LAYOUTS], indirect=True, ids=lambda generation: f"G{generation}"
)
oldest = pytest.mark.parametrize("names", [FLAT], indirect=True, ids=["G1"])
salted = pytest.mark.parametrize("names", [SALTED, LAYOUTS], indirect=True, ids=["G2", "G3"])
MLA = Toy((LayerGroup((0, 1, 2), roles=("key",)),))


@every_generation
def test_a_prompt_is_served_byte_for_byte_to_the_same_and_to_a_fresh_engine(names: Any, server: TrtllmServer) -> None:
    text = fresh(50)
    with server.engine(names) as engine:
        cold = engine.generate(text)
        warm = engine.generate(text)
        assert (cold.taken, warm.taken) == (0, 3 * CHUNK)
        assert warm.answer == cold.answer
        assert engine.trace[:7] == [
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "start_load_kv",
            "wait_for_save",
            "build_connector_meta",
            "start_load_kv",
        ]
    with server.engine(names) as engine:
        assert engine.generate(text).taken == 3 * CHUNK


@oldest
@pytest.mark.parametrize("around", [-1, 0, 1])
def test_a_hit_leaves_a_token_to_compute_and_ends_at_a_block(names: Any, server: TrtllmServer, around: int) -> None:
    text = fresh(3 * CHUNK + around)
    expected = min(len(text) // CHUNK * CHUNK, (len(text) - 1) // BLOCK * BLOCK)
    with server.engine(names) as engine:
        engine.generate(text, answer=1)
        assert engine.generate(text, answer=1).taken == expected


@oldest
def test_prompts_share_the_chunks_before_they_differ(names: Any, server: TrtllmServer) -> None:
    text = fresh(4 * CHUNK + 1)
    with server.engine(names) as engine:
        engine.generate(text)
        assert engine.generate([*text[: 2 * CHUNK + 3], *fresh(30)]).taken == 2 * CHUNK


@every_generation
@pytest.mark.parametrize("step_tokens", [8, 20, 36])
def test_later_pieces_of_a_prompt_are_stored_too(names: Any, server: TrtllmServer, step_tokens: int) -> None:
    text = fresh(7 * CHUNK + 2)
    with server.engine(names, step_tokens=step_tokens) as engine:
        cold = engine.generate(text)
        warm = engine.generate(text)
        assert (warm.taken, warm.answer) == (7 * CHUNK, cold.answer)
        # a hit whose rest is computed in pieces again
        longer = engine.generate([*text[: 3 * CHUNK + 1], *(tail := fresh(3 * CHUNK))])
        assert longer.taken == 3 * CHUNK
        assert engine.generate([*text[: 3 * CHUNK + 1], *tail]).taken == 6 * CHUNK


@every_generation
def test_what_was_generated_is_a_later_prompt(names: Any, server: TrtllmServer) -> None:
    text = fresh(CHUNK + 3)
    with server.engine(names) as engine:
        first = engine.generate(text, answer=3 * CHUNK)
        assert engine.generate([*text, *first.answer]).taken == 4 * CHUNK


@oldest
def test_what_was_generated_is_left_out_on_demand(
    names: Any, server: TrtllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_STORE_DECODE", "0")
    text = fresh(CHUNK + 3)
    with server.engine(names) as engine:
        first = engine.generate(text, answer=3 * CHUNK)
        assert engine.generate([*text, *first.answer]).taken == CHUNK


@salted
def test_salts_share_nothing(names: Any, server: TrtllmServer) -> None:
    text = fresh(50)
    with server.engine(names) as engine:
        taken = [engine.generate(text, salt=salt).taken for salt in (None, "a", "b", "", "a", "b")]
        assert taken == [0, 0, 0, 3 * CHUNK, 3 * CHUNK, 3 * CHUNK]


@oldest
def test_a_lora_shares_with_itself_in_one_engine_only(names: Any, server: TrtllmServer) -> None:
    text = fresh(50)
    with server.engine(names) as engine:
        taken = [engine.generate(text, lora=lora).taken for lora in (None, 1, 2, 1, None)]
        assert taken == [0, 0, 0, 3 * CHUNK, 3 * CHUNK]
    with server.engine(names) as engine:
        # its number may mean other weights here
        assert engine.generate(text, lora=1).taken == 0


@oldest
def test_images_share_when_they_are_the_same_at_the_same_place(names: Any, server: TrtllmServer) -> None:
    text = fresh(60)
    image, other = ([5, -6, 7, 8], 20, 10), ([5, -6, 7, 9], 20, 10)
    with server.engine(names) as engine:
        engine.generate(text, images=[image])
        assert engine.generate(text, images=[image]).taken == 3 * CHUNK
        assert engine.generate(text, images=[other]).taken == CHUNK
        assert engine.generate(text, images=[(image[0], 21, 10)]).taken == CHUNK
        assert engine.generate(text).taken == CHUNK


@oldest
def test_an_input_that_is_not_described_is_never_cached(names: Any, server: TrtllmServer) -> None:
    text = fresh(60)
    with server.engine(names) as engine:
        for attribute, value in (
            ("prompt_embedding_table", object()),
            ("multimodal_hashes", [[1, 2]]),
            ("is_dummy_request", True),
        ):
            for _ in range(2):
                run = engine.submit(text)
                setattr(run.request, attribute, value)
                engine.finish(run)
                assert run.taken == 0
        assert engine.generate(text).taken == 0


@every_generation
def test_what_the_engine_holds_itself_is_neither_loaded_nor_touched(names: Any, server: TrtllmServer) -> None:
    text = fresh(6 * CHUNK + 1)
    with server.engine(names) as engine:
        engine.generate(text)
    with server.engine(names, reuse=True) as engine:
        engine.generate(text[: 2 * CHUNK + BLOCK + 1])
        warm = engine.generate(text)
        assert (warm.computed, warm.taken) == (2 * CHUNK + BLOCK, 4 * CHUNK - BLOCK)
        again = engine.generate(text)
        assert (again.computed, again.taken) == (6 * CHUNK, 0)


@oldest
def test_nothing_is_offered_where_the_engine_holds_half_a_block(names: Any, server: TrtllmServer) -> None:
    text = fresh(4 * CHUNK + 1)
    with server.engine(names) as engine:
        engine.generate(text)
    with server.engine(names, reuse=True, partial=True) as engine:
        engine.generate(text[: CHUNK + 1])
        run = engine.generate(text)
        assert (run.computed, run.taken) == (CHUNK + 1, 0)


@every_generation
def test_pages_that_are_given_to_others_at_once_are_never_mixed_up(names: Any, server: TrtllmServer) -> None:
    texts = [fresh(3 * CHUNK + number) for number in range(6)]
    with server.engine(names, slots=32, step_tokens=12) as engine:
        for _ in range(2):
            runs = [engine.submit(text, answer=9) for text in texts]
            engine.finish(*runs)
        assert [run.taken for run in runs] == [min(3 * CHUNK, (len(text) - 1) // BLOCK * BLOCK) for text in texts]


@every_generation
@pytest.mark.parametrize("toy", [Toy(), MLA], ids=["heads", "mla"])
def test_ranks_are_served_their_own_bytes(names: Any, server: TrtllmServer, toy: Toy) -> None:
    text = fresh(4 * CHUNK + 1)
    before = server.running.gauges()["cells_used"]
    with server.engine(names, toy, ranks=2) as engine:
        cold = engine.generate(text)
        warm = engine.generate(text)
        assert (warm.taken, warm.answer) == (4 * CHUNK, cold.answer)
    objects = 4 if toy is MLA else 8
    assert server.running.gauges()["cells_used"] - before == objects


@oldest
@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_of_an_accelerator_carry_the_same_bytes(
    names: Any, server: TrtllmServer, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("LMCACHE_STAGING", "1")
    text = prompt(77, 50)
    with server.engine(names, ranks=ranks, step_tokens=20) as engine:
        engine.generate(text)
        assert engine.generate(text).taken == 3 * CHUNK
