"""The simulator and a real server answer alike: request by request, and in the sum of what was recorded."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_stand import CELL, CHUNK, FACTS, GEOMETRY, PATIENCE_S, SETTINGS, RunningServer
from reference_stand import RunningServer as ServerProcess
from reference_stand import StartServer, prompt, start

from lmcache.core.client import Client, Engine
from lmcache.core.keys import tenant_of
from lmcache.core.link import Link
from lmcache.core.protocol import Role
from lmcache.engines.reference.engine import Engine as ReferenceEngine
from lmcache.engines.reference.shapes import GEOMETRIES
from lmcache.plugins.eviction.lru import LRU
from lmcache.simulator.reading import read_trace
from lmcache.simulator.replay import Replay

HEAD = Path(__file__).parents[2] / "traces" / "mooncake_conversation_head.jsonl"
CELLS = 600
"""Room for a few dozen of the prompts, so that most requests evict."""
REQUESTS = 250
SALTS = ("", "open sesame")
"""Of two tenants."""


@pytest.fixture
def link() -> Iterator[Link]:
    """A worker of a server with room for `CELLS` chunks."""
    server = RunningServer(l1_bytes=CELLS * CELL)
    client = Client(server.address, Engine(FACTS, GEOMETRY, Role.WORKER), SETTINGS)
    client.start(wait=30)
    yield client.link()
    client.close()
    server.stop()


def ask_server(link: Link, hashes: bytes) -> int:
    """One request, as an engine makes it; returns the chunks that hit."""
    found = link.lookup("", hashes, len(hashes) * CHUNK).wait()
    if found.ticket:
        link.open(found.ticket)
        assert link.confirm(found.ticket)
    reserved = link.reserve("", b"", hashes, 0, 0)
    if reserved.reservation:
        link.commit(reserved.reservation)
    return found.tokens // CHUNK


def test_every_request_hits_as_much_as_it_does_at_a_server(link) -> None:
    trace = read_trace(HEAD)
    replaying = Replay(trace, CELLS, LRU())
    events = list(enumerate(trace.events))[:REQUESTS]

    simulated = [replaying.take(number, event) // 512 for number, event in events]
    served = [ask_server(link, b"".join(event.hashes)) for _, event in events]

    assert simulated == served
    assert sum(served) > 0
    assert replaying.cache.counters.chunks_evicted > 1000


def simulate(*arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "lmcache", "simulate", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr
    (trace,) = json.loads(done.stdout)["traces"]
    return trace


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start `lmcache server ARGUMENTS`; it is killed if it still runs when the test has ended."""
    servers: list[ServerProcess] = []

    def starting(*arguments: str) -> ServerProcess:
        servers.append(start(*arguments))
        return servers[-1]

    yield starting
    for server in servers:
        if server.process.poll() is None:
            server.kill()


@pytest.mark.parametrize(
    ("name", "gigabytes", "ranks", "policy"),
    [
        ("llama", "0.006", 1, "LRU"),
        ("llama", "0.006", 2, "LRU"),
        ("gemma", "0.004", 1, "LRU"),
        ("hybrid", "0.002", 1, "LRU"),
        ("llama", "0.006", 2, "prefix-aware"),
        ("hybrid", "0.002", 1, "S3-FIFO"),
    ],
)
def test_a_recording_replays_to_the_servers_own_counters(
    name, gigabytes, ranks, policy, tmp_path, start_server
) -> None:
    """With the server's policy and size, whatever KV groups and ranks the engine has: the recording tells."""
    file = tmp_path / "recording.jsonl"
    server = start_server(
        "--record",
        str(file),
        "--chunk-size",
        "64",
        "--l1-size-gb",
        gigabytes,
        "--l1-cell-kb",
        "4",
        "--eviction-policy",
        policy,
    )
    shape = GEOMETRIES[name]
    with ReferenceEngine(shape, server=server.address, deadline=30.0, blocks=300, ranks=ranks) as engine:
        for turn in range(30):
            # two conversations that grow, and prompts that never come back
            which, length = (turn % 2, 200 + 25 * turn) if turn % 3 else (100 + turn, 500)
            # what a tenant asks for, no other finds
            engine.generate([prompt(length, which // 2)], max_tokens=2, salt=SALTS[which % 2])
            engine.drop_prefix_cache()
            server.wait_idle()
        counters = server.counters()
    server.process.terminate()
    assert server.process.wait(PATIENCE_S) == 0
    server.process.communicate()

    tenants = {json.loads(line).get("tenant", "") for line in file.read_text().splitlines()[2:]}
    assert tenants == {tenant_of(salt) for salt in SALTS}
    cells = int(float(gigabytes) * (1 << 30)) // 4096
    trace = simulate(str(file), "--policy", policy, "--capacity", f"{gigabytes}GB")
    assert trace["recorded"] == {
        "policy": policy,
        "l1_bytes": cells * 4096,
        "tokens_asked": counters["tokens_asked"],
        "tokens_hit": counters["tokens_hit"],
    }
    replayed = next(each for each in trace["results"] if each["policy"] == policy)
    assert replayed["cells"] == cells
    assert (replayed["tokens_hit"], replayed["chunks_evicted"]) == (counters["tokens_hit"], counters["chunks_evicted"])
    assert counters["tokens_hit"] > 0
    assert counters["chunks_evicted"] > 0
    assert counters["records_lost"] == 0
