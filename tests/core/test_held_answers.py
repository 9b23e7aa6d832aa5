"""An answer that is not final is kept back until it is, or the client's patience is over: nobody asks in a loop."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import gated_tier
import pytest
from core_stand import CHUNK, GEOMETRY, PATIENCE_S, RawConnection, ServerProcess, prompt, wait_until
from tier_stand import TinyEngine, joined

from lmcache.core.control import Control
from lmcache.core.held_answers import LONGEST_HOLD, HeldAnswers
from lmcache.core.link import HELD_SHARE, Link
from lmcache.core.pending_hit import SHORTEST_PAUSE
from lmcache.core.protocol import AskAgain, Drop, Found, Lookup, Role

HASHES = prompt(1, 6)
TOKENS = len(HASHES) * CHUNK


# ------------------------------------------------------------------------------------------------- what is kept back


def ask(ticket: int = 7, patience: float = 0.5) -> AskAgain:
    return AskAgain(1, ticket, patience)


def due(held: HeldAnswers, *decided: int, everything: bool = False) -> list[int]:
    answered = held.due(lambda _, ticket: ticket not in decided, everything=everything)
    return [request.ticket for _, request in answered]


def test_an_answer_is_due_when_it_is_decided_and_once_only() -> None:
    held, connection = HeldAnswers(), SimpleNamespace(owner=3)
    assert held.hold(connection, ask(7))
    assert held.hold(connection, ask(8))
    assert due(held) == []
    assert due(held, 8) == [8]
    assert due(held, 8) == []
    assert due(held, everything=True) == [7]
    assert held.next_due == math.inf


def test_an_answer_is_due_when_patience_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    held, connection = HeldAnswers(), SimpleNamespace(owner=3)
    assert held.hold(connection, ask(7, 0.5))
    assert held.hold(connection, ask(8, math.inf))
    assert held.next_due == 100.5
    now = 100.5
    assert due(held) == [7]
    assert held.next_due == 100.0 + LONGEST_HOLD
    now = 100.0 + LONGEST_HOLD
    assert due(held) == [8]


@pytest.mark.parametrize("patience", [0.0, -1.0, math.nan])
def test_who_has_no_patience_is_answered_at_once(patience: float) -> None:
    assert not HeldAnswers().hold(SimpleNamespace(owner=3), ask(7, patience))


def test_a_second_question_about_a_ticket_is_answered_at_once_but_not_another_client_s() -> None:
    held = HeldAnswers()
    assert held.hold(SimpleNamespace(owner=3), ask())
    assert not held.hold(SimpleNamespace(owner=3), ask())
    assert held.hold(SimpleNamespace(owner=4), ask())


# ------------------------------------------------------------------------------------------------------ a real server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[ServerProcess]:
    """One whose tier has the prompt, gives nothing back until the gate is open, and whose L1 is empty."""
    options = ("--plugin", gated_tier.__file__, "--l2", f"gated://{folder}?timeout_s=60", "--l2-deadline-s", "60")
    first = ServerProcess(0, *options)
    try:
        engine = TinyEngine(first.address, GEOMETRY)
        assert engine.store(HASHES) == 6
        with Control(first.address, PATIENCE_S) as control:
            control.wait_idle()
        engine.close()
    finally:
        first.close()
    server = ServerProcess(0, *options)
    yield server
    server.close()


def open_gate(folder: Path) -> None:
    (folder / gated_tier.GATE).touch()


@pytest.fixture
def connection(server: ServerProcess) -> Iterator[RawConnection]:
    with Control(server.address, PATIENCE_S) as control:
        connection = RawConnection(control.hello().socket)
    connection.register(Role.SCHEDULER, model="m")
    yield connection
    connection.close()


def looked_up(connection: RawConnection) -> int:
    found = connection.ask(Lookup(2, "", joined(HASHES), TOKENS))
    assert isinstance(found, Found)
    assert found.again
    return found.ticket


def test_a_question_is_answered_when_the_answer_is_final_and_others_before_it(
    connection: RawConnection, folder: Path
) -> None:
    ticket = looked_up(connection)
    connection.send(AskAgain(3, ticket, 60.0), Lookup(4, "", b"", 0), AskAgain(5, ticket, 60.0), AskAgain(6, ticket))
    answers = [connection.receive() for _ in range(3)]
    assert [answer.id for answer in answers] == [4, 5, 6]
    assert [answer.again for answer in answers if isinstance(answer, Found)] == [False, True, True]
    # what is held is given when its time is over, and asked for again
    assert connection.receive() == Found(3, ticket, 0, again=True)
    connection.send(AskAgain(7, ticket, 60.0))
    open_gate(folder)
    assert connection.receive() == Found(7, ticket, TOKENS, again=False)


def test_who_gives_a_lookup_up_is_answered(connection: RawConnection) -> None:
    ticket = looked_up(connection)
    connection.send(AskAgain(3, ticket, 60.0), Drop(4, ticket))
    assert {connection.receive().id for _ in range(2)} == {3, 4}


def test_a_client_that_goes_while_its_answer_is_held_hurts_nobody(
    server: ServerProcess, connection: RawConnection, folder: Path
) -> None:
    connection.send(AskAgain(3, looked_up(connection), 60.0))
    connection.close()
    wait_until(lambda: server.status()["clients"] == [])
    open_gate(folder)
    engine = TinyEngine(server.address, GEOMETRY)
    assert engine.hit(HASHES) == 6
    engine.close()


def test_a_server_that_stops_does_not_keep_answers_back(
    server: ServerProcess, connection: RawConnection, folder: Path
) -> None:
    connection.send(AskAgain(3, looked_up(connection), 60.0))
    server.process.terminate()
    assert connection.ended()
    open_gate(folder)
    assert server.process.wait(PATIENCE_S) == 0


# --------------------------------------------------------------------------------------------------------- the client


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AskAgain]:
    """Every question that this process's clients ask again."""
    asked: list[AskAgain] = []
    send = Link._send

    def noting(self: Link, request: object, kind: type) -> object:
        if isinstance(request, AskAgain):
            asked.append(request)
        return send(self, request, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(Link, "_send", noting)
    return asked


Waited = Callable[[Link], Found]


def _waits(link: Link) -> Found:
    return link.lookup("", joined(HASHES), TOKENS).wait()


def _polls(link: Link) -> Found:
    pending = link.lookup("", joined(HASHES), TOKENS)
    return wait_until(pending.poll)


def _waits_long_enough(link: Link) -> Found:
    found = link.lookup("", joined(HASHES), TOKENS).wait_at_most(PATIENCE_S)
    assert found is not None
    return found


@pytest.mark.parametrize("ways", [_waits, _polls, _waits_long_enough])
def test_a_client_asks_once_for_each_hold_and_not_in_a_loop(
    server: ServerProcess, folder: Path, asked: list[AskAgain], ways: Waited
) -> None:
    engine = TinyEngine(server.address, GEOMETRY)
    link = engine.link()
    seconds = 0.8
    opening = Timer(seconds, open_gate, (folder,))
    opening.start()
    began = time.monotonic()
    found = ways(link)
    took = time.monotonic() - began
    opening.join()
    assert (found.tokens, found.again) == (TOKENS, False)
    hold = min(LONGEST_HOLD, asked[0].patience)
    assert asked[0].patience == 5.0 * HELD_SHARE
    assert 1 <= len(asked) <= 1 + took / hold
    engine.close()


def test_waiting_is_given_up_after_a_while_and_what_comes_later_is_found_by_polling(
    server: ServerProcess, folder: Path, asked: list[AskAgain]
) -> None:
    engine = TinyEngine(server.address, GEOMETRY)
    pending = engine.link().lookup("", joined(HASHES), TOKENS)
    assert pending.wait_at_most(0.05) is None
    assert pending.promised
    assert len(asked) == 1
    open_gate(folder)
    found = wait_until(pending.poll)
    assert (found.ticket, found.tokens) == (pending.promised, TOKENS)
    engine.close()


def test_where_no_answer_is_kept_back_there_is_a_pause_between_questions(
    server: ServerProcess, asked: list[AskAgain], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TinyEngine(server.address, GEOMETRY)
    link = engine.link()
    monkeypatch.setattr(link, "_hold", 0.0)
    began = time.monotonic()
    assert link.lookup("", joined(HASHES), TOKENS).wait_at_most(0.2) is None
    assert 1 < len(asked) <= 2 + (time.monotonic() - began) / SHORTEST_PAUSE
    engine.close()
