"""The main job on another host: an engine without a Unix socket in reach, served over the bulk channel."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from other_host_stand import OtherHost, other_host
from reference_stand import RunningServer, StartServer, prompt

from lmcache.core.curve import new_keys
from lmcache.engines.reference.demo import expected_hit
from lmcache.engines.reference.shapes import GEOMETRIES

PROMPT = 1537


@pytest.fixture
def host() -> Iterator[OtherHost]:
    yield from other_host()


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with keys; commands of the test use them."""
    folder = tmp_path / "keys"
    new_keys(folder)
    monkeypatch.setenv("LMCACHE_KEYS", str(folder))
    return str(folder)


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [("llama", 1), ("llama", 2), ("mla", 2), ("gemma", 1), ("chunked", 1), ("hybrid", 1), ("glm53", 1)],
)
def test_an_engine_on_another_host_is_served_what_it_had_computed(
    start_server: StartServer, host: OtherHost, keys: str, shape: str, ranks: int
) -> None:
    server = start_server("--host", host.here, "--keys", keys)
    engine = host.engine(shape, server.address, keys, ranks=ranks)
    tokens = prompt(PROMPT)
    cold = engine.generate(tokens)
    server.wait_idle()
    engine.forget()
    served = engine.generate(tokens)
    assert (served["tokens"], served["logits"]) == (cold["tokens"], cold["logits"])
    assert cold["hit"] == 0
    assert served["hit"] == expected_hit(GEOMETRIES[shape], ranks, PROMPT) > 0
    assert served["failures"] == 0
    assert moved(server) == (True, True)
    engine.close()


def moved(server: RunningServer) -> tuple[bool, bool]:
    counters = server.counters()
    return counters["bulk_bytes_in"] > 0, counters["bulk_bytes_out"] > 0
