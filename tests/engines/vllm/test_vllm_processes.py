"""Engines of several processes on a real vLLM: tensor parallel ranks, a restarted engine, an engine that is killed."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_stand import SHARED_ENGINE, EngineProcess, Stand, prompt, same_answer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("llama_stand", "plain")]

CHUNK = ("--chunk-size", "256")


@pytest.fixture(scope="module")
def stand(llama_stand: Stand) -> Iterator[Stand]:
    llama_stand.serve(*CHUNK)
    yield llama_stand
    llama_stand.server.kill()


@pytest.mark.may_leave(
    "a vLLM that is slow to end is killed, and leaves the shared memory that its processes talk through"
)
def test_another_engine_finds_what_the_first_one_stored(stand: Stand, models: Path, tmp_path: Path) -> None:
    ids = prompt(100, 2600)
    [cold] = stand.engine.generate(ids)
    stand.server.settle()
    transfer = stand.transfer(**{"lmcache.staging": True})
    transfer["kv_connector_module_path"] = "lmcache.engines.vllm.connector"
    # other memory, an engine core of its own, no plugin that registers the connector, and copies as an accelerator's
    other = Stand(
        tmp_path,
        models / "llama",
        clients=2,
        kv_transfer_config=transfer,
        num_gpu_blocks_override=60,
        **SHARED_ENGINE,
    )
    try:
        other.start_engine(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_PLUGINS="")
        other.engine.await_start()
        stand.server.await_clients(4)
        [warm] = other.engine.generate(ids)
        log = other.engine.log.read_text()
        assert warm["cached"] == 2560, log[-3000:]
        assert same_answer(cold, warm)
        assert "through lmcache.engines.vllm.connector" in log
        assert "group_tokens_per_block=[128], scheduler_block_size=128" in log
    finally:
        other.close()
    stand.engine.forget()
    stand.server.quiet()


@pytest.mark.may_leave("a killed vLLM leaves the shared memory that its processes talk through")
def test_two_ranks_hit_with_the_same_answer_and_a_killed_engine_leaves_nothing(
    models: Path, tmp_path: Path, plain: EngineProcess
) -> None:
    # ranks of vLLM wait for each other in loops that take a processor each
    stand = Stand(tmp_path, models / "llama", clients=3, deadline=30, tensor_parallel_size=2, **SHARED_ENGINE)
    try:
        stand.serve(*CHUNK)
        # forked, because a spawned process imports for half a minute what its parent has imported already
        stand.start_engine(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_WORKER_MULTIPROC_METHOD="fork")
        stand.await_engine()
        for length, hit in ((1537, 1536), (2600, 2560)):
            ids = prompt(length, length)
            [single] = plain.generate(ids)
            [cold] = stand.engine.generate(ids)
            stand.server.settle()
            stand.engine.forget()
            [warm] = stand.engine.generate(ids)
            assert (cold["cached"], warm["cached"]) == (0, hit), stand.engine.log.read_text()[-3000:]
            assert same_answer(cold, warm)
            assert cold["tokens"] == single["tokens"]
        report = stand.server.quiet()
        # every chunk has an object of each rank
        assert report["counters"]["shards_committed"] == 2 * (6 + 10)
        other_weights_are_never_answered_with_pages_of_the_old_ones(stand, tmp_path / "second")
        stand.engine.ask("generate", prompts=[prompt(101, 5000)], max_tokens=100, salt=None)
        time.sleep(0.5)
        stand.engine.kill()
        stand.engine = None
        stand.server.await_clients(0)
        stand.server.quiet()
    finally:
        stand.close()


def other_weights_are_never_answered_with_pages_of_the_old_ones(stand: Stand, folder: Path) -> None:
    """Both workers exchange them, and nobody tells the connector."""
    make = (
        "import pathlib, sys; from lmcache.engines.vllm.tiny_models import make_model;"
        "make_model(pathlib.Path(sys.argv[1]), 'llama', seed=1)"
    )
    subprocess.run([sys.executable, "-c", make, str(folder)], check=True, stdout=subprocess.DEVNULL)
    ids = prompt(2600, 2600)
    path = str(folder / "llama")
    [before] = stand.engine.generate(ids)
    stand.engine.run("llm.collective_rpc('reload_weights', kwargs={'weights_path': path})", path=path)
    answers = []
    for salt in (None, "another", None, None):
        stand.engine.forget()
        answers += stand.engine.generate(ids, salt=salt)
        stand.server.settle()
    assert [answer["cached"] for answer in answers] == [0, 0, 0, 2560], stand.engine.log.read_text()[-3000:]
    assert all(same_answer(answers[1], answer) for answer in answers)
    assert answers[1]["tokens"] != before["tokens"]
