"""A real server beside real engines."""

import itertools
from collections.abc import Iterator

import pytest
from core_stand import PATIENCE_S
from reference_stand import RunningServer, StartServer, start


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start `lmcache server ARGUMENTS`; all are killed when the test has ended."""
    servers: list[RunningServer] = []

    def starting(*arguments: str, port: int = 0) -> RunningServer:
        servers.append(start(*arguments, port=port))
        return servers[-1]

    yield starting
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server with chunks of 64 tokens, for a module. Tests keep apart by their engines' seeds."""
    running = start("--chunk-size", "64")
    yield running
    running.process.terminate()
    assert running.process.wait(PATIENCE_S) == 0
    running.process.communicate()


_seeds = itertools.count(1)


@pytest.fixture
def seed() -> int:
    """Weights that no other test has, and so a namespace of its own."""
    return next(_seeds)
