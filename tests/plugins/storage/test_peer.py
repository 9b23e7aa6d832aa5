"""`peer://`: another server as a tier, with two real servers and the reference engine at each."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from core_stand import PATIENCE_S, wait_until
from reference_stand import RunningServer, assert_same, prompt, start

from lmcache.cli.status import status
from lmcache.core.blob import BlobIdentity
from lmcache.core.control import Control, ServerAddress
from lmcache.core.curve import new_keys
from lmcache.core.keys import ChainHash
from lmcache.engines.reference.demo import expected_hit
from lmcache.engines.reference.engine import Engine
from lmcache.engines.reference.shapes import GEOMETRIES
from lmcache.errors import ConfigError, TierError
from lmcache.plugins.manager import PluginManager

PROMPT = 700
Start = Callable[..., RunningServer]


@pytest.fixture
def serve() -> Iterator[Start]:
    """Start servers with chunks of 64 tokens; all are ended after the test."""
    servers: list[RunningServer] = []

    def starting(*arguments: str, port: int = 0) -> RunningServer:
        servers.append(start("--chunk-size", "64", *arguments, port=port))
        return servers[-1]

    yield starting
    for server in servers:
        server.kill()


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as running:

        def starting(server: RunningServer | None, shape: str = "llama", **settings: Any) -> Engine:
            made = Engine(GEOMETRIES[shape], server=server.address if server else "", deadline=5.0, **settings)
            return running.enter_context(made)

        yield starting


def tier(server: RunningServer) -> dict[str, Any]:
    """The report of its only tier, when nothing is under way."""
    server.wait_idle()
    return told(server)


def told(server: RunningServer) -> dict[str, Any]:
    """The same, now."""
    with Control(ServerAddress.parse(server.address), PATIENCE_S) as control:
        (report,) = control.status()["tiers"]
    counters: dict[str, Any] = report["counters"]
    return counters


def row_of_the_peer(server: RunningServer) -> list[str]:
    """Words of the line in which `lmcache status` shows another server."""
    shown = CliRunner().invoke(status, ["--port", server.address.rpartition(":")[2]])
    (row,) = [line.split() for line in shown.output.splitlines() if line.startswith("peer ")]
    return row


def test_a_server_that_names_itself_serves_as_if_it_had_no_tier(engine: Callable[..., Engine], serve: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    itself = serve("--insecure", "--bulk-port", "0", "--l2", f"peer://localhost:{port}", port=port)
    mine = engine(itself)
    (cold,) = mine.generate([prompt(PROMPT)])
    mine.drop_prefix_cache()
    (again,) = mine.generate([prompt(PROMPT)])
    assert_same(cold, again)
    assert again.hit_tokens > 0
    seen = told(itself)
    assert (seen["stored"], seen["loaded"]) == (0, 0)
    assert seen["errors"] > 0


@pytest.mark.parametrize(("shape", "ranks"), [("llama", 1), ("hybrid", 1), ("gemma", 1), ("llama", 2)])
def test_what_another_servers_engines_have_stored_is_a_hit_here(
    serve: Start, engine: Callable[..., Engine], shape: str, ranks: int
) -> None:
    there = serve("--insecure", "--bulk-port", "0")
    here = serve("--l2", f"peer://{there.address}?store=never")
    tokens = prompt(PROMPT)
    (cold,) = engine(there, shape, ranks=ranks).generate([tokens])
    there.wait_idle()
    mine = engine(here, shape, ranks=ranks)
    (served,) = mine.generate([tokens])
    assert_same(cold, served)
    assert served.hit_tokens == expected_hit(GEOMETRIES[shape], ranks, PROMPT, 64) > 0
    seen = tier(here)
    assert seen["loaded"] > 0
    assert (seen["stored"], seen["lost"], seen["errors"], seen["damaged"]) == (0, 0, 0, 0)
    assert there.gauges()["tickets"] == 0
    mine.drop_prefix_cache()
    (again,) = mine.generate([tokens])
    assert_same(cold, again)
    assert tier(here)["loaded"] == seen["loaded"]  # it is in L1 by now


def test_what_is_stored_here_is_written_through_in_whole_chains(serve: Start, engine: Callable[..., Engine]) -> None:
    there = serve("--insecure", "--bulk-port", "0")
    here = serve("--l2", f"peer://{there.address}")
    tokens = prompt(PROMPT)
    (cold,) = engine(here).generate([tokens])
    seen = tier(here)
    assert seen["stored"] == there.counters()["shards_committed"] >= PROMPT // 64
    assert row_of_the_peer(there)[1] == "127.0.0.1"  # and no rank, as an engine has
    here.kill()
    (served,) = engine(there).generate([tokens])
    assert_same(cold, served)
    assert served.hit_tokens == expected_hit(GEOMETRIES["llama"], 1, PROMPT, 64)


def test_two_servers_that_name_each_other_do_not_echo(serve: Start, engine: Callable[..., Engine]) -> None:
    one = serve("--insecure", "--bulk-port", "0")
    port = int(one.address.rpartition(":")[2])
    two = serve("--insecure", "--bulk-port", "0", "--l2", f"peer://{one.address}")
    one.kill()
    one = serve("--insecure", "--bulk-port", "0", "--l2", f"peer://{two.address}", port=port)
    tokens = prompt(PROMPT)
    (cold,) = engine(one).generate([tokens])
    chunks = tier(one)["stored"]
    assert chunks >= PROMPT // 64
    assert (tier(two)["stored"], tier(one)["stored"]) == (0, chunks)
    assert one.counters()["shards_committed"] == two.counters()["shards_committed"] == chunks
    (served,) = engine(two).generate([tokens])
    assert_same(cold, served)


def test_a_peer_that_goes_comes_back_or_was_never_there_costs_misses(
    serve: Start, engine: Callable[..., Engine]
) -> None:
    there = serve("--insecure", "--bulk-port", "0")
    port = int(there.address.rpartition(":")[2])
    here = serve("--l2", f"peer://{there.address}?timeout_s=1")
    mine = engine(here)
    (cold,) = mine.generate([prompt(PROMPT)])
    there.kill()
    for seed in range(1, 4):
        mine.generate([prompt(PROMPT, seed)])
    assert told(here)["errors"] > 0
    assert here.counters()["internal_errors"] == 0
    mine.drop_prefix_cache()
    (served,) = mine.generate([prompt(PROMPT)])
    assert_same(cold, served)
    again = serve("--insecure", "--bulk-port", "0", port=port)
    fresh = itertools.count(10)

    def reaches_it() -> bool:
        mine.generate([prompt(PROMPT, next(fresh))])
        return again.counters()["shards_committed"] > 0

    wait_until(reaches_it)


@pytest.mark.parametrize("there_has", [("--chunk-size", "128"), ("--l1-cell-kb", "128")])
def test_a_peer_of_other_sizes_has_nothing_for_us(
    serve: Start, engine: Callable[..., Engine], there_has: tuple[str, str]
) -> None:
    there = serve("--insecure", "--bulk-port", "0", *there_has)
    here = serve("--l2", f"peer://{there.address}")
    tokens = prompt(PROMPT)
    (cold,) = engine(there).generate([tokens])
    there.wait_idle()
    (mine,) = engine(here).generate([tokens])
    assert mine.tokens == cold.tokens
    assert mine.hit_tokens == 0
    seen = tier(here)
    assert (seen["loaded"], seen["stored"], seen["errors"]) == (0, 0, 0)


def test_a_peer_with_keys_lets_in_who_has_them(
    serve: Start, engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = str(tmp_path / "keys")
    new_keys(Path(keys))
    here_with = serve("--port", "0")  # a server that is nobody's tier
    monkeypatch.setenv("LMCACHE_KEYS", keys)
    there = serve("--keys", keys)
    (cold,) = engine(there).generate([prompt(PROMPT)])
    there.wait_idle()
    address = there.address
    monkeypatch.delenv("LMCACHE_KEYS")
    knows = serve("--l2", f"peer://{address}?keys={keys}/client.key&store=never")
    stranger = serve("--l2", f"peer://{address}?store=never")
    (served,) = engine(knows).generate([prompt(PROMPT)])
    assert_same(cold, served)
    assert served.hit_tokens > 0
    (alone,) = engine(stranger).generate([prompt(PROMPT)])
    assert_same(cold, alone)
    assert alone.hit_tokens == 0
    assert tier(stranger)["errors"] > 0
    assert here_with.counters()["lookups"] == 0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("peer://", "--l2 peer:// names no server; write it like peer://10.0.0.2:5555"),
        ("peer://h/path", "--l2 peer://h/path names no server; write it like peer://10.0.0.2:5555"),
        ("peer://h?codec=zstd", "--l2 peer://h keeps chunks as they are; leave codec= out"),
        ("peer://h?keys=/nowhere", "the keys in /nowhere cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_work_is_refused_at_start(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        PluginManager().open_tier(url)
    assert message in str(error.value)


def test_a_call_that_finds_another_one_asking_the_peer_waits_no_longer_than_it_may() -> None:
    store = PluginManager().open_tier("peer://127.0.0.1:1").blobs
    identity = BlobIdentity(b"n" * 16, {}, ChainHash(b"c" * 16), 0, 0, "", 64)
    asking, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        with store._lock:
            asking.set()
            go_on.wait(60)

    other = threading.Thread(target=hang)
    other.start()
    asking.wait(60)
    with pytest.raises(TierError, match="has not answered another call that began before"):
        store.contains([identity], time.monotonic() + 0.05)
    go_on.set()
    other.join()
    store.close()
