"""Layer groups, sliding windows and reserved prefixes, under a model of TensorRT-LLM's executor: byte for byte."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="the simulated KV caches are torch tensors")

from trtllm_model import LayerGroup, Toy
from trtllm_names import LAYOUTS, RESERVATIONS
from trtllm_stand import BLOCK, CHUNK, TrtllmServer, fresh

from lmcache.engines import staging

generations = pytest.mark.parametrize(
    "names", [LAYOUTS, RESERVATIONS], indirect=True, ids=lambda generation: f"G{generation}"
)
layouts = pytest.mark.parametrize("names", [LAYOUTS], indirect=True, ids=["G3"])
reservations = pytest.mark.parametrize("names", [RESERVATIONS], indirect=True, ids=["G4"])

ONE = Toy()
WINDOWS = Toy((LayerGroup((0, 2)), LayerGroup((1,), window=18), LayerGroup((3, 4), window=33)))
ONLY_A_WINDOW = Toy((LayerGroup((0, 1), window=20),))
SIDE_CACHE = Toy((LayerGroup((0, 1), replicated=("index",)), LayerGroup((2,), window=24, replicated=("index",))))
MLA = Toy((LayerGroup((0, 1), roles=("key",)),))
TOYS = {"one": ONE, "windows": WINDOWS, "only a window": ONLY_A_WINDOW, "side cache": SIDE_CACHE, "mla": MLA}

every_toy = pytest.mark.parametrize("toy", TOYS.values(), ids=TOYS)
windowed = pytest.mark.parametrize("toy", [WINDOWS, ONLY_A_WINDOW], ids=["windows", "only a window"])


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def waiting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether requests are parked while they are loaded."""
    monkeypatch.setenv("LMCACHE_ASYNC_LOADS", "1" if request.param else "0")
    return request.param


@generations
@every_toy
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_layer_group_is_served_byte_for_byte(
    names: Any, server: TrtllmServer, toy: Toy, ranks: int, waiting: bool
) -> None:
    text = fresh(6 * CHUNK + 3)
    with server.engine(names, toy, layouts=True, ranks=ranks) as engine:
        cold = engine.generate(text)
        warm = engine.generate(text)
        assert (cold.taken, warm.taken) == (0, 6 * CHUNK)
        assert warm.answer == cold.answer
        asked = "reserve_prefix" if engine.reserving else "get_num_new_matched_tokens"
        assert engine.trace[:3] == [asked, "update_state_after_alloc", "build_connector_meta"]
    with server.engine(names, toy, layouts=True, ranks=ranks) as engine:
        assert engine.generate([*text[: 4 * CHUNK + 1], *fresh(9)]).taken == 4 * CHUNK


@layouts
@pytest.mark.parametrize("way", ["gather", "batch", "measure"])
@every_toy
def test_pages_are_served_as_on_a_device_behind_the_stream_of_forward_passes(
    names: Any, server: TrtllmServer, toy: Toy, way: str, waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_STAGING", "1")
    monkeypatch.setenv("LMCACHE_DEVICE_COPY", way)
    real, marks = staging.Device.mark, []

    def mark(device: staging.Device, *streams: Any) -> Any:
        marks.append([type(stream).__name__ for stream in streams])
        return real(device, *streams)

    monkeypatch.setattr(staging.Device, "mark", mark)
    text = fresh(4 * CHUNK + 3)
    with server.engine(names, toy, layouts=True) as engine:
        cold = engine.generate(text)
        marks.clear()
        warm = engine.generate(text)
        assert (warm.taken, warm.answer) == (4 * CHUNK, cold.answer)
        assert ["Stream"] in marks, "a load waits for what was submitted to the stream that TensorRT-LLM names"


@generations
@windowed
@pytest.mark.parametrize("step_tokens", [CHUNK, 3 * CHUNK])
def test_pages_behind_a_window_are_stored_before_they_go(
    names: Any, server: TrtllmServer, toy: Toy, step_tokens: int
) -> None:
    text = fresh(5 * CHUNK + 1)
    with server.engine(names, toy, layouts=True, step_tokens=step_tokens) as engine:
        first = engine.generate(text, answer=3 * CHUNK)
        # the windows are no shorter than a chunk: what was generated, token by token, is all there
        assert engine.generate([*text, *first.answer]).taken == 8 * CHUNK


@layouts
def test_a_chunk_that_outlives_a_short_window_is_not_stored_and_ends_the_hit(names: Any) -> None:
    toy = Toy((LayerGroup((0,)), LayerGroup((1,), window=9)))
    text = fresh(2 * CHUNK)
    with TrtllmServer() as server, server.engine(names, toy, layouts=True) as engine:
        first = engine.generate(text, answer=2 * CHUNK)
        # in decode the beginning of a chunk is behind the window when its end is computed
        assert engine.generate([*text, *first.answer]).taken == 2 * CHUNK


@generations
@windowed
def test_many_requests_share_few_pages_that_change_hands_at_once(
    names: Any, server: TrtllmServer, toy: Toy, waiting: bool
) -> None:
    texts = [fresh(3 * CHUNK + number) for number in range(5)]
    with server.engine(names, toy, layouts=True, ranks=2, slots=40, step_tokens=CHUNK) as engine:
        for _ in range(2):
            runs = [engine.submit(text, answer=BLOCK + 2) for text in texts]
            engine.finish(*runs)
        assert [run.taken for run in runs] == [3 * CHUNK - BLOCK, *[3 * CHUNK] * 4]


@generations
@windowed
@pytest.mark.parametrize("taken", [0, BLOCK, CHUNK + 2 * BLOCK])
@pytest.mark.parametrize("says_so", ["call", "note"])
def test_the_engine_may_take_less_than_it_is_offered_down_to_any_block(
    names: Any, server: TrtllmServer, toy: Toy, taken: int, says_so: str
) -> None:
    text = fresh(4 * CHUNK + 1)
    with server.engine(names, toy, layouts=True, take_at_most=taken, says_so=says_so) as engine:
        cold = engine.generate(text)
        warm = engine.generate(text, answer=CHUNK)
        assert (warm.offered, warm.taken) == (4 * CHUNK, taken)
        assert warm.answer[:3] == cold.answer
        # what it computed itself was not stored as anything that it is not
    with server.engine(names, toy, layouts=True) as engine:
        assert engine.generate(text).taken == 4 * CHUNK


@reservations
def test_a_reservation_that_is_refused_leaves_nothing_and_the_next_attempt_is_served(
    names: Any, server: TrtllmServer, waiting: bool
) -> None:
    text = fresh(4 * CHUNK + 1)
    with server.engine(names, WINDOWS, layouts=True, ranks=2) as engine:
        engine.generate(text)
    with server.engine(names, WINDOWS, layouts=True, ranks=2, refuse_reservations=2) as engine:
        run = engine.submit(text)
        engine.step()
        engine.step()
        assert (run.admitted, server.running.gauges()["tickets"]) == (False, 0)
        engine.finish(run)
        assert run.taken == 4 * CHUNK
        assert engine.trace.count("reserve_prefix") == 3


@generations
def test_a_request_that_goes_while_it_is_loaded_is_drained(
    names: Any, server: TrtllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_ASYNC_LOADS", "1")
    text = fresh(4 * CHUNK + 1)
    with server.engine(names, WINDOWS, layouts=True, ranks=2) as engine:
        engine.generate(text)
        run = engine.submit(text)
        [admitted] = [run for run in engine.runs if engine._admit(run)]
        engine._run_batch([])
        engine.abort(admitted)
        engine.finish(run)
        assert run.answer == []
        assert engine.generate(text).taken == 4 * CHUNK


@layouts
def test_a_request_that_loses_its_pages_and_starts_again_is_served_again(names: Any, server: TrtllmServer) -> None:
    text = fresh(4 * CHUNK + 1)
    with server.engine(names, WINDOWS, layouts=True, step_tokens=CHUNK) as engine:
        run = engine.submit(text)
        for _ in range(3):
            engine.step()
        engine.replay(run)
        engine.finish(run)
        assert run.taken == 3 * CHUNK
        assert engine.generate(text).taken == 4 * CHUNK


@layouts
def test_ranks_that_serve_requests_of_their_own_share_what_they_store(names: Any, server: TrtllmServer) -> None:
    text = fresh(4 * CHUNK + 1)
    apart = {"tensor_parallel_size": 2, "enable_attention_dp": True, "layouts": True}
    with server.engine(names, owner=0, **apart) as first, server.engine(names, owner=1, **apart) as second:
        cold = first.generate(text)
        warm = second.generate(text)
        assert (warm.taken, warm.answer) == (4 * CHUNK, cold.answer)


@layouts
def test_a_load_that_was_not_begun_when_a_request_loses_its_pages_is_withdrawn(
    names: Any, server: TrtllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_ASYNC_LOADS", "1")
    text = fresh(4 * CHUNK + 1)
    with server.engine(names, WINDOWS, layouts=True) as engine:
        engine.generate(text)
        run = engine.submit(text)
        assert engine._admit(run)
        # its blocks go to another request before the step begins in which they would have been filled
        engine.replay(run)
        run.loading = run.waits = False
        other = engine.submit(fresh(4 * CHUNK + 1))
        assert engine._admit(other)
        engine.finish(other)
        assert engine.generate(text).taken == 4 * CHUNK
