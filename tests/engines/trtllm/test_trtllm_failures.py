"""Loads that fail, servers that go, requests that end early: never a wrong byte, and never a hang."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the simulated KV caches are torch tensors")

from trtllm_executor import Executor
from trtllm_model import LayerGroup, Toy
from trtllm_names import FLAT, LAYOUTS, RESERVATIONS, SALTED
from trtllm_requests import BAD_PAGE, Run
from trtllm_stand import BLOCK, CHUNK, TrtllmServer, fresh

from lmcache.errors import LoadFailed
from lmcache.plugins.testing.served import LoadFault, ServerUnderControl

WINDOWS = Toy((LayerGroup((0, 2)), LayerGroup((1,), window=24)))
DRIVER = Path(__file__).with_name("trtllm_driver.py")

flat = pytest.mark.parametrize("names", [FLAT, SALTED], indirect=True, ids=["G1", "G2"])
oldest = pytest.mark.parametrize("names", [FLAT], indirect=True, ids=["G1"])
newer = pytest.mark.parametrize("names", [LAYOUTS, RESERVATIONS], indirect=True, ids=["G3", "G4"])


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[ServerUnderControl]:
    """A server whose answers to loads can be told to be bad ones."""
    server = ServerUnderControl(tmp_path, "--chunk-size", str(CHUNK), "--l1-size-gb", "0.125", "--l1-cell-kb", "64")
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def waiting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether requests are parked while they are loaded."""
    monkeypatch.setenv("LMCACHE_ASYNC_LOADS", "1" if request.param else "0")
    return request.param


def await_links(engine: Executor, server: ServerUnderControl) -> None:
    """Return when this server has both sides of the engine, and they have it."""
    server.await_clients(2)
    server.wait_until(lambda: engine.linked, "scheduler and worker have their links")


@flat
@pytest.mark.parametrize("ranks", [1, 2])
def test_parked_requests_are_served_while_others_run(
    names: Any, server: TrtllmServer, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("LMCACHE_ASYNC_LOADS", "1")
    texts = [fresh(3 * CHUNK + 1) for _ in range(4)]
    with server.engine(names, ranks=ranks, step_tokens=20, slots=80) as engine:
        engine.finish(*[engine.submit(text) for text in texts[:2]])
        runs = [engine.submit(text, answer=8) for text in texts]
        engine.finish(*runs)
        assert [run.taken for run in runs] == [3 * CHUNK, 3 * CHUNK, 0, 0]


@flat
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_pages_of_a_parked_request_that_goes_stay_until_its_load_has_ended(
    names: Any, server: TrtllmServer, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setenv("LMCACHE_ASYNC_LOADS", "1")
    text = fresh(5 * CHUNK + 1)
    with server.engine(names, ranks=2) as engine:
        engine.generate(text)
        run = engine.submit(text)
        if steps == 0:
            # as early as can be: its load was begun, and nobody has asked about it yet
            [admitted] = [run for run in engine.runs if engine._admit(run)]
            engine._run_batch([])
            engine.abort(admitted)
            assert admitted.saving
        for _ in range(steps):
            engine.step()
        if not run.done and not run.saving:
            engine.abort(run)
        engine.finish(run)
        assert engine.generate(text).taken == 5 * CHUNK


@pytest.mark.parametrize("names", [FLAT, LAYOUTS, RESERVATIONS], indirect=True, ids=["G1", "G3", "G4"])
@pytest.mark.parametrize("fault", [LoadFault.OPEN, LoadFault.CONFIRM, LoadFault.LAST_RANK])
def test_a_load_that_fails_is_raised_and_never_wrong(
    names: Any, faulty: ServerUnderControl, fault: LoadFault, waiting: bool
) -> None:
    text = fresh(3 * CHUNK + 1)
    layouts = names.generation >= LAYOUTS
    engine = Executor(names, str(faulty.address), WINDOWS if layouts else Toy(), layouts=layouts, ranks=2)
    try:
        cold = engine.generate(text)
        faulty.await_stores()
        faulty.fail_loads(fault)
        with pytest.raises(LoadFailed, match="were promised to the engine and could not be loaded"):
            engine.generate(text)
    finally:
        engine.close()
    faulty.fail_loads(LoadFault.NONE)
    faulty.await_nothing_held()
    engine = Executor(names, str(faulty.address), WINDOWS if layouts else Toy(), layouts=layouts, ranks=2)
    try:
        assert engine.generate(text).taken == 3 * CHUNK
        assert engine.generate(text).answer == cold.answer
    finally:
        engine.close()


@pytest.mark.parametrize("names", [FLAT, LAYOUTS], indirect=True, ids=["G1", "G3"])
def test_without_a_server_everything_is_computed_and_one_that_comes_is_used(
    names: Any, faulty: ServerUnderControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_START_WAIT", "0")
    text = fresh(3 * CHUNK + 1)
    faulty.kill()
    engine = Executor(names, str(faulty.address))
    try:
        cold = engine.generate(text)
        faulty.start()
        await_links(engine, faulty)
        assert engine.generate(text).taken == 0
        faulty.await_stores()
        assert engine.generate(text).taken == 3 * CHUNK
        # the server dies in the middle of a prompt, and another one comes
        run = engine.submit(text, answer=2 * CHUNK)
        for _ in range(4):
            engine.step()
        faulty.kill()
        engine.step()
        faulty.start()
        await_links(engine, faulty)
        engine.finish(run)
        assert (run.taken, run.answer[:3]) == (3 * CHUNK, cold.answer)
        # the pages that it holds, those that were loaded among them, went to the new server
        faulty.await_stores()
        assert engine.generate([*text, *run.answer]).taken == 5 * CHUNK
    finally:
        engine.close()


@pytest.mark.parametrize("names", [LAYOUTS], indirect=True, ids=["G3"])
def test_a_new_server_is_given_no_page_that_has_left_its_window(names: Any, faulty: ServerUnderControl) -> None:
    text = fresh(2 * CHUNK)
    engine = Executor(names, str(faulty.address), WINDOWS, layouts=True)
    try:
        run = engine.submit(text, answer=3 * CHUNK)
        for _ in range(2 * CHUNK):
            engine.step()
        # what lies behind the window belongs to others by now: they write to it
        others = [engine.submit(fresh(CHUNK + 1), answer=CHUNK) for _ in range(2)]
        engine.step()
        faulty.kill()
        faulty.start()
        await_links(engine, faulty)
        engine.finish(run, *others)
        faulty.await_stores()
        served = engine.generate([*text, *run.answer])
        assert served.taken == 0  # the first chunk has no window pages, and a hit needs them all
    finally:
        engine.close()


@pytest.mark.parametrize("names", [FLAT, RESERVATIONS], indirect=True, ids=["G1", "G4"])
def test_a_server_that_dies_between_the_answer_and_the_load_is_raised(
    names: Any, faulty: ServerUnderControl, waiting: bool
) -> None:
    text = fresh(3 * CHUNK + 1)
    engine = Executor(names, str(faulty.address), layouts=names.generation >= LAYOUTS)
    try:
        engine.generate(text)
        faulty.await_stores()
        run = engine.submit(text)
        assert engine._admit(run)
        assert run.taken == 3 * CHUNK
        faulty.kill()
        with pytest.raises(LoadFailed, match="start the engine again"):
            go_on(engine, run)
    finally:
        engine.close()


def go_on(engine: Executor, run: Run) -> None:
    """The steps after a request was admitted."""
    engine._run_batch([] if run.waits else [(run, engine._tokens_of(run))])
    for _ in range(500):
        engine.step()


@oldest
def test_the_executor_is_kept_waiting_no_longer_than_it_was_told(
    names: Any, faulty: ServerUnderControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_LOOKUP_WAIT", "0")
    text = fresh(3 * CHUNK + 1)
    engine = Executor(names, str(faulty.address))
    try:
        engine.generate(fresh(BLOCK))  # this generation's scheduler connects with the first request
        await_links(engine, faulty)
        engine.generate(text)
        faulty.await_stores()
        faulty.stop()
        try:
            assert engine.scheduler.get_num_new_matched_tokens(engine.submit(text).request, 0) == (0, False)
        finally:
            faulty.go_on()
        engine.runs.clear()
        # the answer came too late: its ticket is given back in a later step
        faulty.wait_until(lambda: faulty.counters()["lookups"] >= 2, "the lookup is answered")
        engine.generate(fresh(BLOCK))
        engine.generate(fresh(BLOCK))
        faulty.await_nothing_held()
    finally:
        engine.close()


@pytest.mark.parametrize("generation", [SALTED, RESERVATIONS])
def test_another_process_is_served_what_this_one_has_stored(server: TrtllmServer, generation: int) -> None:
    text = fresh(4 * CHUNK + generation)
    cold, warm = (
        json.loads(
            subprocess.run(
                [sys.executable, str(DRIVER), server.running.address, str(generation), json.dumps(text)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
        )
        for _ in range(2)
    )
    assert (cold["taken"], warm["taken"]) == (0, 4 * CHUNK)
    assert cold["answer"] == warm["answer"]


@oldest
def test_engines_of_other_weights_dtypes_or_blocks_share_nothing(
    names: Any, server: TrtllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = fresh(3 * CHUNK + 1)
    with server.engine(names) as engine:
        engine.generate(text)
        for toy, arguments in (
            (Toy(), {"dtype": "bfloat16"}),
            (Toy(), {"cache": {"dtype": "fp8"}}),
            (Toy(), {"max_seq_len": 8192}),
            (Toy(tokens_per_block=8), {}),
            (Toy((LayerGroup((0, 1, 2)),)), {}),
        ):
            with server.engine(names, toy, **arguments) as other:
                assert other.generate(text).taken == 0, arguments
        monkeypatch.setenv("LMCACHE_WEIGHTS_ID", "others")
        with server.engine(names) as other:
            assert other.generate(text).taken == 0
        assert engine.generate(text).taken == 3 * CHUNK


@pytest.mark.parametrize("names", [LAYOUTS], indirect=True, ids=["G3"])
@pytest.mark.parametrize(("missing", "read"), [(9, False), (10, True), (15, True)])
def test_a_page_that_is_missing_where_the_next_token_reads_is_raised(
    names: Any, faulty: ServerUnderControl, waiting: bool, missing: int, read: bool
) -> None:
    text = fresh(4 * CHUNK + 1)  # 16 blocks; token 64 reads from token 41 on, which is in block 10
    engine = Executor(names, str(faulty.address), WINDOWS, layouts=True)
    try:
        cold = engine.generate(text)
        faulty.await_stores()
        allocate = engine.blocks.allocate

        def forget_one(run: Run, end: int, start: int) -> None:
            allocate(run, end, start)
            run.tables[1][missing] = BAD_PAGE

        engine.blocks.allocate = forget_one
        run = engine.submit(text)
        if read:
            with pytest.raises(LoadFailed, match="counts on blocks that it does not hold"):
                engine.finish(run)
        else:
            engine.finish(run)
            assert (run.taken, run.answer) == (4 * CHUNK, cold.answer)
    finally:
        engine.close()
