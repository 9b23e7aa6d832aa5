"""Servers, clients and raw sockets for tests of the core; whatever a test starts is ended after it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from core_stand import FACTS, GEOMETRY, PATIENCE_S, SETTINGS, RawConnection, RunningServer, ServerProcess

from lmcache.core.client import Client, ClientSettings, Engine, ServerAddress
from lmcache.core.protocol import Role
from lmcache.geometry.groups import Geometry

Serve = Callable[..., RunningServer]
Start = Callable[..., ServerProcess]
Connect = Callable[..., Client]
Raw = Callable[[str], RawConnection]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers in threads; they are stopped at the end, and whatever failed in them fails the test."""
    with contextlib.ExitStack() as running:

        def start(**settings: Any) -> RunningServer:
            server = RunningServer(**settings)
            running.callback(server.stop)
            return server

        yield start


@pytest.fixture
def server(serve: Serve) -> RunningServer:
    return serve()


@pytest.fixture
def start_process() -> Iterator[Start]:
    """Start server processes; those still there at the end are killed."""
    with contextlib.ExitStack() as running:

        def start(port: int = 0, *options: str, **how: Any) -> ServerProcess:
            process = ServerProcess(port, *options, **how)
            running.callback(process.close)
            return process

        yield start


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Make clients and start them; they are closed at the end."""
    with contextlib.ExitStack() as running:

        def start(
            address: ServerAddress,
            role: Role = Role.WORKER,
            *,
            rank: int = 0,
            geometry: Geometry = GEOMETRY,
            facts: dict[str, str] = FACTS,
            settings: ClientSettings = SETTINGS,
            wait: float = PATIENCE_S,
            **options: Any,
        ) -> Client:
            client = Client(address, Engine(facts, geometry, role, rank), settings, **options)
            running.callback(client.close)
            client.start(wait)
            return client

        yield start


@pytest.fixture
def raw() -> Iterator[Raw]:
    """Open raw Unix connections; they are closed at the end."""
    with contextlib.ExitStack() as opened:

        def open_connection(address: str) -> RawConnection:
            connection = RawConnection(address)
            opened.callback(connection.close)
            return connection

        yield open_connection


@pytest.fixture
def zmq_socket() -> Iterator[Callable[[int], "zmq.Socket[bytes]"]]:
    """Make ZeroMQ sockets of any type."""
    with zmq.Context() as context, contextlib.ExitStack() as opened:

        def make(kind: int) -> "zmq.Socket[bytes]":
            made = opened.enter_context(context.socket(kind))
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
            return made

        yield make
