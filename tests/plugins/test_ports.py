"""Ports for servers that tests start later, or again."""

import socket

import pytest

from lmcache.plugins.testing import ports
from lmcache.plugins.testing.ports import free_port


def test_no_port_is_given_twice_nor_one_beside_another() -> None:
    given = [free_port() for _ in range(400)]
    for _ in range(100):
        port = free_port(beside=5000)
        given += [port, port + 5000]
    assert len(set(given)) == len(given) == 600
    assert 20_000 <= min(given) <= max(given) < 32_000


def test_a_port_that_somebody_listens_on_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken, free = listener.getsockname()[1], free_port()
        monkeypatch.setattr(ports, "_given", set())
        monkeypatch.setattr(ports, "_PORTS", [*[taken] * 20, free])
        assert free_port() == free
