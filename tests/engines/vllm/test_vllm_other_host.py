"""A real vLLM on another host: a network namespace of its own, with no Unix socket in reach."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from group_scenarios import cached
from other_host_stand import OtherHost, other_host
from reference_stand import RunningServer, start
from vllm_stand import BLOCKS, SHARED_ENGINE, EngineProcess, prompt, same_answer

from lmcache.core.curve import new_keys

pytestmark = pytest.mark.vllm


@pytest.fixture
def host() -> Iterator[OtherHost]:
    yield from other_host()


@pytest.fixture
def server(host: OtherHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    new_keys(tmp_path / "keys")
    monkeypatch.setenv("LMCACHE_KEYS", str(tmp_path / "keys"))
    options = ("--keys", str(tmp_path / "keys"), "--l1-size-gb", "1", "--chunk-size", "256")
    running = start("--host", host.here, *options)
    yield running
    running.kill()


def test_a_vllm_on_another_host_answers_the_same_from_the_bulk_channel(
    models: Path, plain: EngineProcess, host: OtherHost, server: RunningServer, tmp_path: Path
) -> None:
    where = {
        "lmcache.mp.host": server.address,
        "lmcache.mp.keys": str(tmp_path / "keys" / "client.key"),
        "lmcache.start_wait": 30,
        "lmcache.deadline": 5,
    }
    transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": where}
    options = {"model": str(models / "llama"), "kv_transfer_config": transfer, "num_gpu_blocks_override": BLOCKS}
    engine = EngineProcess(
        options | SHARED_ENGINE, tmp_path / "engine.log", {"LMCACHE_KEYS": ""}, command=host.command()
    )
    try:
        ids = prompt(41, 2000)
        [alone] = plain.generate(ids)
        [cold] = engine.generate(ids)
        server.wait_idle()
        assert engine.call("wipe")
        [served] = engine.generate(ids)
        assert same_answer(alone, cold)
        assert same_answer(alone, served)
        assert cached([cold, served]) == [0, 1792]
        counters = server.counters()
        assert counters["bulk_bytes_in"] == counters["bulk_bytes_out"] > 0
        assert server.gauges()["tickets"] == 0
    finally:
        engine.close()
