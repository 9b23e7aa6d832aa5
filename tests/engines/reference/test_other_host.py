"""The main job on another host: an engine without a Unix socket in reach, served over the bulk channel."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_stand import wait_until
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


def held(server: RunningServer) -> int:
    """Reservations, tickets and clients that the server still knows."""
    gauges = server.gauges()
    return gauges["reservations"] + gauges["tickets"] + gauges["clients"] + gauges["pinned_nodes"]


def test_a_server_killed_in_the_middle_costs_the_cache_and_no_answer(
    start_server: StartServer, host: OtherHost, keys: str
) -> None:
    server = start_server("--host", host.here, "--keys", keys)
    engine = host.engine("llama", server.address, keys)
    tokens = prompt(PROMPT)
    cold = engine.generate(tokens)
    server.wait_idle()
    engine.forget()
    engine.send(generate=tokens, max_tokens=64)
    wait_until(lambda: server.counters()["bulk_bytes_out"] > 0)
    server.kill()
    through = engine.ask()
    assert through["tokens"][:4] == cold["tokens"]
    engine.forget()
    alone = engine.generate(tokens)
    assert (alone["tokens"], alone["logits"], alone["hit"]) == (cold["tokens"], cold["logits"], 0)
    again = start_server("--host", host.here, "--keys", keys, port=int(server.address.rpartition(":")[2]))
    engine.await_links(again)  # it registers anew by itself
    engine.forget()
    engine.generate(tokens)
    again.wait_idle()
    engine.forget()
    served = engine.generate(tokens)
    assert (served["tokens"], served["logits"]) == (cold["tokens"], cold["logits"])
    assert served["hit"] == expected_hit(GEOMETRIES["llama"], 1, PROMPT)
    engine.close()


@pytest.mark.parametrize("after", ["bulk_bytes_in", "bulk_bytes_out"])
def test_an_engine_killed_while_bytes_travel_leaves_nothing_held(
    start_server: StartServer, host: OtherHost, keys: str, after: str
) -> None:
    server = start_server("--host", host.here, "--keys", keys)
    engine = host.engine("llama", server.address, keys, ranks=2)
    tokens = prompt(PROMPT)
    if after == "bulk_bytes_out":
        engine.generate(tokens)
        server.wait_idle()
        engine.forget()
    engine.send(generate=tokens, max_tokens=64)
    wait_until(lambda: server.counters()[after] > 0)
    engine.kill()
    wait_until(lambda: held(server) == 0)
    another = host.engine("llama", server.address, keys, ranks=2)
    cold = another.generate(prompt(PROMPT, seed=1))
    answer = another.generate(tokens)
    alone = host.engine("llama", "", ranks=2).generate(tokens)
    assert (answer["tokens"], answer["logits"]) == (alone["tokens"], alone["logits"])
    assert cold["hit"] == 0
    assert server.counters()["internal_errors"] == 0
    another.close()


def test_an_engine_that_falls_silent_is_given_up_and_comes_back(
    start_server: StartServer, host: OtherHost, keys: str
) -> None:
    server = start_server("--host", host.here, "--keys", keys)
    engine = host.engine("llama", server.address, keys)
    tokens = prompt(PROMPT)
    cold = engine.generate(tokens)
    server.wait_idle()
    assert server.gauges()["clients"] == 2
    host.cut()
    wait_until(lambda: held(server) == 0)  # nobody has said a word: heartbeats tell
    engine.forget()
    alone = engine.generate(tokens)
    assert (alone["tokens"], alone["logits"], alone["hit"]) == (cold["tokens"], cold["logits"], 0)
    host.mend()
    engine.await_links(server)
    engine.forget()
    served = engine.generate(tokens)
    assert (served["tokens"], served["logits"]) == (cold["tokens"], cold["logits"])
    assert served["hit"] == expected_hit(GEOMETRIES["llama"], 1, PROMPT)
    engine.close()


@pytest.mark.parametrize(
    ("servers", "clients", "says"),
    [
        ("keys", "", "if it wants keys, give its client.key"),
        ("keys", "others", "is no lmcache server with the keys that"),
        ("", "keys", "is no lmcache server with the keys that"),
    ],
)
def test_an_engine_without_the_right_keys_goes_on_without_the_cache(
    start_server: StartServer, host: OtherHost, keys: str, tmp_path: Path, servers: str, clients: str, says: str
) -> None:
    new_keys(tmp_path / "others")
    folder = {"": "", "keys": keys, "others": str(tmp_path / "others")}
    server = start_server("--host", host.here, *(("--keys", keys) if servers else ("--insecure",)))
    engine = host.engine("llama", server.address, folder[clients])
    tokens = prompt(300)
    first = engine.generate(tokens)
    engine.forget()
    second = engine.generate(tokens)
    assert (second["tokens"], second["logits"], second["hit"]) == (first["tokens"], first["logits"], 0)
    log = engine.close()
    assert says in log
    assert (
        says
        in host.run(
            *(sys.executable, "-m", "lmcache", "ping", "--host", host.here, "--port", port_of(server)),
            LMCACHE_KEYS=folder[clients],
        ).stderr
    )
    assert secret_of(keys) not in log


def port_of(server: RunningServer) -> str:
    return server.address.rpartition(":")[2]


def secret_of(folder: str) -> str:
    lines = Path(folder, "client.key").read_text().splitlines()
    return next(line for line in lines if line.startswith("secret = ")).removeprefix("secret = ")
