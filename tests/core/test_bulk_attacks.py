"""Clients of the bulk channel that know the protocol and mean harm, and hosts that run out of something."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from bulk_stand import RawBulk
from core_stand import CELL, CHUNK, FACTS, GEOMETRY, PATIENCE_S, RunningServer, prompt, wait_until

from lmcache.core.cells import pack_cells, unpack_cells
from lmcache.core.client import Engine, ServerAddress
from lmcache.core.protocol import (
    PROTOCOL,
    Commit,
    Drop,
    Error,
    Message,
    Open,
    Ping,
    Register,
    Registered,
    Reserve,
    Reserved,
    Role,
    Take,
    Write,
)
from lmcache.core.remote_link import RemoteLink
from lmcache.core.rights import Rights
from lmcache.errors import ProtocolError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup


@pytest.fixture
def server() -> Iterator[RunningServer]:
    running = RunningServer(insecure=True)
    yield running
    running.stop()


@pytest.fixture
def peer(server: RunningServer) -> Iterator[RawBulk]:
    raw = RawBulk(server)
    yield raw
    raw.close()


def serves_others(server: RunningServer) -> bool:
    """Whether a client that comes now is served."""
    where = ServerAddress(server.server.config.host, server.server.bulk_port)
    link = RemoteLink.register_at(where, None, Engine(FACTS, GEOMETRY, Role.WORKER), PATIENCE_S)
    with contextlib.closing(link):
        return len(link.reserve("", b"", b"".join(prompt(99, 1)), 0, 0).placed) == 1


def checksum(contents: bytes) -> int:
    return xxhash.xxh3_64_intdigest(contents)


def reserve(number: int, chunk: int, group: int = 0) -> Reserve:
    return Reserve(number, "", b"", b"".join(prompt(chunk, 1)), group, 0)


def is_ended(peer: RawBulk) -> bool:
    """Whether the server ends the conversation; what it says before that does not matter."""
    return any(peer.receive()[0] is None for _ in range(4))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (reserve(5, 1), reserve(5, 2, group=99)),
        (reserve(5, 1), Take(5, prompt(1, 1)[0], 99, 0)),
        (reserve(5, 1), Commit(5, 1)),
        (Open(5, 1, "epoch"), Open(5, 2, "epoch")),
    ],
)
def test_a_number_is_not_used_for_two_requests_at_once(first: Message, second: Message) -> None:
    book = Rights()
    book.asked(first)
    with pytest.raises(ProtocolError, match="while another of that number is not answered"):
        book.asked(second)


def test_an_answer_is_never_taken_for_that_of_another_request() -> None:
    """A refused `Commit` is answered after a `Reserve` of the same number was sent: what is left has no group."""
    book = Rights()
    book.asked(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0))
    book.answered(Registered(1, "epoch", b"", CHUNK, CELL, 64 * CELL))
    book.asked(Drop(5, 1))
    book.asked(reserve(5, 1))
    book.answered(Error(5, "stale", "", ""))
    with pytest.raises(ProtocolError, match="whose number was used for another one"):
        book.answered(Reserved(5, 7, b"\0", pack_cells([3]), 64))


def test_a_commit_that_comes_before_its_cells_were_told_publishes_nothing(server: RunningServer, peer: RawBulk) -> None:
    """Numbers of reservations count up: the next one can be guessed."""
    peer.register()
    granted = peer.ask(reserve(2, 1))
    assert isinstance(granted, Reserved)
    peer.send(reserve(3, 2))
    for ahead in (1, 2, 3):
        peer.send(Commit(3 + ahead, granted.reservation + ahead))
    assert is_ended(peer)
    wait_until(lambda: server.gauge("reservations") == 0)
    assert server.counter("shards_committed") == 0


def test_a_second_registration_does_not_change_how_much_of_a_cell_has_to_be_written(
    server: RunningServer, peer: RawBulk
) -> None:
    tiny = Geometry((KVGroup(GroupKind.FULL, CHUNK, (1,)),))
    for number, geometry in ((1, GEOMETRY), (2, tiny)):
        peer.send(Register(number, PROTOCOL, FACTS, geometry, Role.WORKER, 0))
    assert is_ended(peer)
    peer.register()
    granted = peer.ask(reserve(3, 1))
    assert isinstance(granted, Reserved)
    (cell,) = unpack_cells(granted.cells)
    peer.ask(Write(4, granted.reservation, cell, 0, checksum(b"z")), b"z")
    assert isinstance(peer.ask(Commit(5, granted.reservation)), Error)
    assert server.counter("shards_committed") == 0


def test_whatever_fails_in_one_conversation_costs_no_other(
    server: RunningServer, peer: RawBulk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("as a fault of ours would")

    peer.register()
    with monkeypatch.context() as broken:
        broken.setattr("lmcache.core.rights.Rights.asked", fails)
        peer.send(reserve(2, 1))
        assert is_ended(peer)
    peer.register()
    with monkeypatch.context() as broken:
        broken.setattr("lmcache.core.rights.Rights.answered", fails)
        peer.send(reserve(2, 1))
        assert is_ended(peer)
    assert serves_others(server)
    assert server.counter("internal_errors") == 2
    assert server.counter("internal_errors") == 2


def test_without_descriptors_clients_are_sent_away_and_served_later(server: RunningServer, peer: RawBulk) -> None:
    peer.ask(Ping(1))  # it is connected, and not taken in
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    holes = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(holes) + 1, before[1]))
    try:
        peer.send(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0))
        assert peer.receive()[0] is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in holes:
            os.close(each)
    assert peer.register().cell_bytes == CELL
    assert serves_others(server)
