"""The simulated engine's surroundings: a generation of its interface, a server, and settings."""

from collections.abc import Iterator
from typing import Any

import pytest
from trtllm_names import installed


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every test has in its environment: weights that are known, and patience with a busy machine."""
    monkeypatch.setenv("LMCACHE_WEIGHTS_ID", "toy")
    monkeypatch.setenv("LMCACHE_DEADLINE", "5")
    monkeypatch.setenv("LMCACHE_LOOKUP_WAIT", "5")


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    from trtllm_stand import TrtllmServer

    with TrtllmServer() as running:
        yield running


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Iterator[Any]:
    """TensorRT-LLM of the generation that the test names."""
    with installed(request.param) as found:
        yield found
