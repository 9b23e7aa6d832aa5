"""What observers are told: all that happened, in its order, and nothing that nobody wants. They do no harm."""

import threading
from collections.abc import Iterator, Sequence

import attrs
import pytest
from core_stand import CELL, CHUNK, FACTS, GEOMETRY, SETTINGS, RunningServer, prompt, wait_until

from lmcache.core import observing
from lmcache.core.client import Client, Engine
from lmcache.core.observing import HOOKS, Event, Evicted, LookedUp, Observer, Stored
from lmcache.core.protocol import Role


@attrs.define
class Listener:
    """Plugins that write down what they are told."""

    calls: list[tuple[str, list[Event]]] = attrs.field(factory=list)

    def tell(self, hook: str, events: Sequence[Event]) -> None:
        assert all(type(event) is HOOKS[hook] for event in events)
        self.calls.append((hook, list(events)))

    @property
    def events(self) -> list[Event]:
        return [event for _, events in self.calls for event in events]


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def observer(listener: Listener) -> Iterator[Observer]:
    observer = Observer(listener.tell, list(HOOKS))
    yield observer
    observer.close()


def stored(worker: Client, hashes: Sequence[bytes], parent: bytes = b"") -> int:
    """Store chunks; returns how many there was room for."""
    link = worker.link()
    reserved = link.reserve("team", parent, b"".join(hashes), 0, 0)
    link.commit(reserved.reservation)
    return len(reserved.placed)


def test_stores_lookups_and_evictions_of_a_server_are_told_in_their_order(
    listener: Listener, observer: Observer
) -> None:
    server = RunningServer(observer=observer, l1_bytes=4 * CELL)
    worker = Client(server.address, Engine(FACTS, GEOMETRY, Role.WORKER), SETTINGS)
    worker.start(SETTINGS.deadline)
    try:
        space = worker.link().namespace
        first, second = prompt(1, 3), prompt(2, 2)
        assert stored(worker, first) == 3
        found = worker.link().lookup("reader", b"".join([*first, *second]), 5 * CHUNK).wait()
        worker.link().drop(found.ticket)
        # a cell is free, and the other is the first prompt's last chunk's
        assert stored(worker, second) == 2
        wait_until(lambda: len(listener.events) == 7)
        assert listener.events == [
            *(Stored(space, "team", chunk, parent, 0) for chunk, parent in zip(first, [b"", *first], strict=False)),
            LookedUp(space, "reader", (*first, *second), 5 * CHUNK, 2 * CHUNK),  # a ticket holds half of L1
            Evicted(space, "team", first[2]),
            *(Stored(space, "team", chunk, parent, 0) for chunk, parent in zip(second, [b"", *second], strict=False)),
        ]
        assert server.counter("events_lost") == 0
    finally:
        worker.close()
        server.stop()


def test_nothing_is_noted_that_nobody_wants_to_hear_of(listener: Listener) -> None:
    observer = Observer(listener.tell, ["lmcache_after_evict"])
    server = RunningServer(observer=observer, l1_bytes=2 * CELL)
    worker = Client(server.address, Engine(FACTS, GEOMETRY, Role.WORKER), SETTINGS)
    worker.start(SETTINGS.deadline)
    try:
        assert stored(worker, prompt(1, 2)) == 2
        worker.link().lookup("", b"".join(prompt(1, 2)), CHUNK).wait()
        assert stored(worker, prompt(2, 1)) == 1
    finally:
        worker.close()
        server.stop()
        observer.close()
    assert [(type(event), event.chunk) for event in listener.events] == [(Evicted, prompt(1, 2)[1])]


def test_events_of_one_kind_are_told_together_and_a_change_of_kind_is_told_apart(
    listener: Listener, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hook in ("store", "store", "evict", "store"):
        values = (b"space", "", b"chunk") + ((b"", 0) if hook == "store" else ())
        observer._note(f"lmcache_after_{hook}", *values)
    observer.close()
    assert [(hook, len(events)) for hook, events in listener.calls] == [
        ("lmcache_after_store", 2),
        ("lmcache_after_evict", 1),
        ("lmcache_after_store", 1),
    ]


def test_plugins_that_hang_lose_events_which_are_counted_and_keep_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "WAITING_EVENTS", 10)
    monkeypatch.setattr(observing, "CLOSE_SECONDS", 0.05)
    hanging, go_on, told = threading.Event(), threading.Event(), []

    def tell(hook: str, events: Sequence[Event]) -> None:
        hanging.set()
        go_on.wait(30)
        told.extend(events)

    observer = Observer(tell, list(HOOKS))
    observer._note("lmcache_after_evict", b"space", "", b"chunk")
    hanging.wait(30)
    for _ in range(25):
        observer._note("lmcache_after_evict", b"space", "", b"chunk")
    assert observer.lost == 15
    observer.close()  # gives up
    assert observer._thread.is_alive()
    go_on.set()
    observer._thread.join(30)
    assert len(told) == 11
