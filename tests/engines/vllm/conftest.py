"""The real engines that these tests share, and the models they run."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_stand import BLOCKS, SHARED_ENGINE, EngineProcess, ServerProcess, Stand
from worker_stand import CHUNK

from lmcache.plugins.testing.ports import free_port

pytest.register_assert_rewrite("group_scenarios")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny models."""
    folder = tmp_path_factory.mktemp("models")
    made = subprocess.run(
        [sys.executable, "-m", "lmcache.engines.vllm.tiny_models", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="session")
def plain(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The same engine without any connector: what every answer has to equal."""
    engine = EngineProcess(
        {"model": str(models / "llama"), "enable_prefix_caching": False} | SHARED_ENGINE,
        tmp_path_factory.mktemp("plain") / "engine.log",
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def llama_stand(models: Path, plain: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """The Llama engine that most tests share: prefills in pieces that are no multiple of a chunk, few blocks.

    It starts without a server; each module starts its own.
    """
    stand = Stand(
        tmp_path_factory.mktemp("llama"),
        models / "llama",
        clients=2,
        num_gpu_blocks_override=BLOCKS,
        **SHARED_ENGINE,
    )
    try:
        stand.start_engine()
        # the two start side by side
        plain.await_start()
        stand.engine.await_start()
        yield stand
    finally:
        stand.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server for tests without an engine, small cells and chunks."""
    process = ServerProcess(free_port(), tmp_path / "server.log", "--chunk-size", str(CHUNK), "--l1-cell-kb", "64")
    process.start()
    yield process
    process.kill()
