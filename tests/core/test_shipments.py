"""What goes from and to a mirror, told by messages alone: no place is used again while bytes may still come or go."""

import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from lmcache.core.cells import pack_cells, unpack_cells
from lmcache.core.mirror import Mirror
from lmcache.core.protocol import (
    PROTOCOL,
    Commit,
    Confirm,
    Contents,
    Done,
    Error,
    ErrorCode,
    Open,
    Opened,
    Read,
    Register,
    Registered,
    Reserve,
    Reserved,
    Role,
    Write,
    Written,
)
from lmcache.core.shipments import WINDOW, Fetch, Shipments
from lmcache.errors import LinkLost, ProtocolError, Refused
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

CELL = 1 << 12
GEOMETRY = Geometry((KVGroup(GroupKind.FULL, 16, (CELL,)),))
CELLS = 32


def registered(arena_bytes: int = CELLS * CELL, cell_bytes: int = CELL) -> Registered:
    return Registered(1, "epoch", b"space", 16, cell_bytes, arena_bytes)


def shipments() -> Shipments:
    made = Shipments()
    made.asked(Register(1, PROTOCOL, {}, GEOMETRY, Role.WORKER, 0))
    made.answered(registered())
    return made


def reserve(ours: Shipments, number: int, *cells: int) -> tuple[int, ...]:
    """The places for a reservation of these cells."""
    ours.asked(Reserve(number, "", b"", bytes(16 * len(cells)), 0, 0))
    told = ours.answered(Reserved(number, number, bytes(len(cells)), pack_cells(cells), CELLS))
    assert isinstance(told, Reserved)
    return unpack_cells(told.cells)


def open_ticket(ours: Shipments, ticket: int, *cells: int) -> tuple[int, ...]:
    return reopen(ours, ticket, ticket, *cells)


def reopen(ours: Shipments, number: int, ticket: int, *cells: int) -> tuple[int, ...]:
    ours.asked(Open(number, ticket, "epoch"))
    told = ours.answered(Opened(number, 16 * len(cells), [0], [pack_cells(cells)], CELLS))
    assert isinstance(told, Opened)
    return unpack_cells(told.cells[0])


def held(ours: Shipments) -> int:
    assert ours.mirror is not None
    return ours.mirror.held


def contents(read: Read, text: bytes) -> tuple[Contents, memoryview]:
    sent = text * read.length
    return Contents(read.id, xxhash.xxh3_64_intdigest(sent)), memoryview(sent)


def test_cells_travel_from_places_of_our_own_and_a_commit_follows_the_last() -> None:
    ours = shipments()
    places = reserve(ours, 2, 30, 7)
    assert ours.mirror is not None
    for place, byte in zip(places, b"xy", strict=True):
        ours.mirror.memory[place * CELL : (place + 1) * CELL] = bytes([byte]) * CELL
    assert not ours.asked(Commit(3, 2))
    sent = list(ours.writes())
    writes = [(request.cell, bytes(part[:1])) for request, part in sent if isinstance(request, Write) and part]
    assert writes == [(30, b"x"), (7, b"y")]
    assert isinstance(sent[-1][0], Commit)


def test_a_place_goes_to_others_only_when_the_server_has_its_bytes() -> None:
    ours = shipments()
    reserve(ours, 2, 1, 2)
    ours.asked(Commit(3, 2))
    first, second, _ = [request for request, _ in ours.writes()]
    ours.answered(Done(3))  # a server that answers before it has read
    assert held(ours) == 2
    ours.note(Written(first.id), memoryview(b""))
    ours.note(Written(second.id), memoryview(b""))
    assert held(ours) == 0


def test_what_is_unsent_is_counted_until_the_server_has_published_it() -> None:
    ours = shipments()
    reserve(ours, 2, 1, 2)
    ours.asked(Commit(3, 2))
    for request, _ in list(ours.writes()):
        if isinstance(request, Write):
            ours.note(Written(request.id), memoryview(b""))
    assert ours.unsent_bytes == 2 * CELL
    ours.answered(Done(3))
    assert (ours.unsent_bytes, held(ours), ours.idle) == (0, 0, True)


def test_no_more_is_under_way_than_the_window() -> None:
    ours = shipments()
    reserve(ours, 2, *range(WINDOW + 5))
    ours.asked(Commit(3, 2))
    sent = [request for request, _ in ours.writes()]
    assert len(sent) == WINDOW
    ours.note(Written(sent[0].id), memoryview(b""))
    assert len(list(ours.writes())) == 1


def test_bytes_that_come_after_a_ticket_has_ended_hit_nobody() -> None:
    ours = shipments()
    (place,) = open_ticket(ours, 5, 9)
    fetch = Fetch(5, 5)
    ours.begin(fetch)
    (read,) = ours.reads()
    ours.asked(Confirm(6, 5, "epoch"))  # the engine gave up waiting
    assert place not in reserve(ours, 7, 9)
    ours.note(*contents(read, b"z"))
    assert fetch.done.is_set()
    assert place in reserve(ours, 8, 10)


def test_a_ticket_that_is_opened_again_does_not_take_the_memory_of_who_still_copies() -> None:
    ours = shipments()
    first = open_ticket(ours, 5, 9)
    assert set(reopen(ours, 6, 5, 9)).isdisjoint(first)
    ours.asked(Confirm(7, 5, "epoch"))
    assert held(ours) == 0


def test_each_opening_of_a_ticket_is_filled_in_its_own_places() -> None:
    ours = shipments()
    assert ours.mirror is not None
    places = [*open_ticket(ours, 5, 9), *reopen(ours, 6, 5, 9)]  # both before either is fetched
    for number, byte in ((6, b"y"), (5, b"x")):
        ours.begin(fetch := Fetch(5, number))
        (read,) = ours.reads()
        ours.note(*contents(read, byte))
        assert fetch.done.is_set()
    assert [bytes(ours.mirror.memory[place * CELL : place * CELL + 1]) for place in places] == [b"x", b"y"]


def test_an_opening_that_has_no_room_is_not_served_from_another_one_of_its_ticket() -> None:
    ours = shipments()
    open_ticket(ours, 5, *range(CELLS))
    reopen(ours, 6, 5, *range(CELLS))
    ours.begin(fetch := Fetch(5, 6))
    assert isinstance(fetch.failure, Refused)


def test_no_more_is_under_way_than_the_window_however_many_loads_there_are() -> None:
    """A server drops a client that it has too many answers for."""
    ours = shipments()
    fetches = []
    for number in range(5, 5 + WINDOW):
        open_ticket(ours, number, 3 * number, 3 * number + 1)
        fetches.append(Fetch(number, number))
        ours.begin(fetches[-1])
    under_way = list(ours.reads())
    assert len(under_way) == WINDOW
    while under_way:
        ours.note(*contents(under_way.pop(0), b"z"))
        under_way += ours.reads()
        assert len(under_way) <= WINDOW
    assert all(fetch.done.is_set() and not fetch.failure for fetch in fetches)


def test_a_load_that_waits_its_turn_while_its_ticket_ends_fails_and_gives_its_places_once() -> None:
    ours = shipments()
    open_ticket(ours, 5, *range(WINDOW))
    open_ticket(ours, 6, WINDOW)
    ours.begin(Fetch(5, 5))
    ours.begin(late := Fetch(6, 6))
    under_way = list(ours.reads())
    ours.asked(Confirm(7, 6, "epoch"))
    assert held(ours) == WINDOW
    ours.note(*contents(under_way[0], b"z"))
    assert list(ours.reads()) == []
    assert isinstance(late.failure, Refused)
    assert late.done.is_set()
    assert held(ours) == WINDOW


def test_a_load_that_failed_holds_no_memory() -> None:
    ours = shipments()
    open_ticket(ours, 5, 9, 10)
    fetch = Fetch(5, 5)
    ours.begin(fetch)
    first, second = ours.reads()
    ours.note(Error(first.id, ErrorCode.STALE, "gone", "open it again"), memoryview(b""))
    assert not fetch.done.is_set()
    ours.note(*contents(second, b"z"))
    assert fetch.done.is_set()
    assert isinstance(fetch.failure, Refused)
    assert held(ours) == 0


@pytest.mark.parametrize(
    "lie",
    [
        lambda read: (Contents(read.id, 1), memoryview(bytes(read.length))),  # not what was sent
        lambda read: contents(Read(read.id, 5, 9, 0, read.length - 1), b"z"),  # too short
        lambda read: contents(Read(read.id, 5, 9, 0, read.length + 1), b"z"),  # too long
        lambda read: (Contents(read.id, xxhash.xxh3_64_intdigest(b"")), memoryview(b"")),
        lambda read: (Written(read.id), memoryview(b"")),
        lambda read: (Contents(read.id - 1, 0), memoryview(b"")),  # of what nobody asked for
    ],
)
def test_wrong_bytes_and_wrong_lengths_end_the_conversation_and_are_not_kept(lie: Any) -> None:
    ours = shipments()
    (place,) = open_ticket(ours, 5, 9)
    assert ours.mirror is not None
    ours.mirror.memory[place * CELL : (place + 1) * CELL] = b"o" * CELL
    fetch = Fetch(5, 5)
    ours.begin(fetch)
    (read,) = ours.reads()
    with pytest.raises(ProtocolError):
        ours.note(*lie(read))
    ours.fail(LinkLost("over"))
    assert fetch.done.is_set()
    assert fetch.failure is not None
    assert set(bytes(ours.mirror.memory[place * CELL : (place + 1) * CELL])) == {ord("o")}


def test_a_server_that_names_a_cell_twice_or_more_than_it_has_is_not_believed() -> None:
    with pytest.raises(ProtocolError, match="named a cell twice"):
        reserve(shipments(), 2, 4, 4)
    assert reserve(shipments(), 2, 1 << 30) == (0,)  # a number there is none here
    ours = shipments()
    with pytest.raises(LinkLost, match="grants more than its arena holds"):
        reserve(ours, 2, *range(2 * CELLS + 1))


def test_a_server_that_registers_us_again_is_not_believed() -> None:
    with pytest.raises(ProtocolError, match="twice"):
        shipments().answered(registered())


@pytest.mark.parametrize("sizes", [(0, 0), (CELL, 0), (CELL - 1, CELL), (-CELL, CELL), (CELL, -CELL)])
def test_an_arena_of_impossible_sizes_is_refused(sizes: tuple[int, int]) -> None:
    ours = Shipments()
    with pytest.raises(ProtocolError, match="an arena of"):
        ours.answered(registered(*sizes))


def test_more_than_the_mirror_has_room_for_is_not_loaded_and_a_store_still_fits() -> None:
    ours = shipments()
    open_ticket(ours, 5, *range(CELLS))
    open_ticket(ours, 6, *range(CELLS))
    fetch = Fetch(6, 6)
    ours.begin(fetch)
    assert isinstance(fetch.failure, Refused)
    assert fetch.done.is_set()
    assert len(reserve(ours, 7, *range(CELLS))) == CELLS


# -------------------------------------------------------------------------------------------------------------- mirror


def resident(mirror: Mirror) -> int:
    """Bytes of it that have memory."""
    start = mirror._address
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"{start:x}-"))
    (rss,) = [line for line in lines[at : at + 10] if line.startswith("Rss:")]
    return int(rss.split()[1]) << 10


def test_places_that_were_used_are_used_again_first_and_lose_their_memory_when_it_cools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 64 << 10
    monkeypatch.setattr("lmcache.core.mirror.WARM_BYTES", 3 * size)
    mirror = Mirror(16, size)
    places = mirror.take(5)
    assert places == [0, 1, 2, 3, 4]
    for place in places:
        mirror.memory[place * size : (place + 1) * size] = os.urandom(size)
    mirror.give(places)
    assert (mirror.held, mirror.warm) == (0, 3)
    assert resident(mirror) == 3 * size  # no more is kept than is allowed
    assert mirror.take(3) == [0, 1, 2]
    assert resident(mirror) == 3 * size
    mirror.give([0, 1, 2])
    mirror.cool()
    assert resident(mirror) == 0
    assert mirror.take(17) is None
    assert mirror.take(16) == list(range(16))
    mirror.close()
