"""A peer that lies, refuses, is slow, hangs, is another version or this very server: misses, and nothing else."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_stand import CELL, GEOMETRY, PATIENCE_S, RunningServer, ServerProcess, prompt, wait_until
from false_peer import CELLS, FULL, FalsePeer, contents, identity, store_at
from tier_stand import TinyEngine

from lmcache.core.blob import Loaded
from lmcache.core.cells import pack_cells
from lmcache.core.control import Control
from lmcache.core.curve import new_keys
from lmcache.core.protocol import (
    PROTOCOL,
    Commit,
    Confirm,
    Confirmed,
    Contents,
    Done,
    Error,
    ErrorCode,
    Hello,
    Peek,
    Peeked,
    Placed,
    Read,
    Register,
    Registered,
    Reserve,
    Reserved,
    Take,
    Taken,
    Welcome,
    Written,
)
from lmcache.errors import ConfigError, DeadlineExceeded, LinkLost, LMCacheError, TierError, VersionMismatch
from lmcache.plugins.manager import PluginManager

BLOB = identity(b"c" * 16)
Peer = Callable[..., FalsePeer]


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def peer() -> Iterator[Peer]:
    with contextlib.ExitStack() as opened:

        def start(lies: Any = None) -> FalsePeer:
            made = FalsePeer(lies)
            opened.callback(made.close)
            return made

        yield start


@pytest.fixture
def store_of() -> Iterator[Callable[[FalsePeer], Any]]:
    with contextlib.ExitStack() as opened:
        yield lambda peer: opened.enter_context(store_at(f"127.0.0.1:{peer.port}"))


StoreOf = Callable[[FalsePeer], Any]


def load(store: Any, seconds: float = 5.0) -> tuple[Loaded, bytes]:
    into = memoryview(bytearray(CELL))
    return store.load(BLOB, [into], soon(seconds)), bytes(into)


def test_an_honest_peer_is_believed(peer: Peer, store_of: StoreOf) -> None:
    store = store_of(peer())
    assert store.contains([BLOB], soon()) == [True]
    assert load(store) == (Loaded.LOADED, FULL)
    assert store.store(BLOB, [memoryview(FULL)], soon()) == CELL


@pytest.mark.parametrize(
    "lies",
    [
        {Read: lambda q: (Contents(q.id, 1), FULL)},  # other bytes than were checksummed
        {Read: lambda q: contents(q, FULL[:-1])},
        {Read: lambda q: contents(q, FULL + b"x")},
        {Read: lambda q: contents(q, b"")},
        {Read: lambda q: Contents(q.id, 0)},  # no bytes at all
        {Read: lambda q: contents(Read(q.id - 5, 77, 3, 0, CELL), FULL)},  # of what nobody asked for
        {Read: lambda q: Written(q.id)},
        {Read: lambda q: Error(q.id, ErrorCode.STALE, "not any more", "open it again")},
        {Take: lambda q: Taken(q.id, 77, b"")},  # no cell for an object of one
        {Take: lambda q: Taken(q.id, 77, pack_cells([3, 4]))},
        {Take: lambda q: Taken(q.id, 77, pack_cells([3, 3]))},
        {Take: lambda q: Taken(q.id, 77, pack_cells(range(2 * CELLS)))},
        {Take: lambda q: Taken(q.id, 77, b"\1\2\3")},  # no cell numbers
        {Take: lambda q: Peeked(q.id, b"\1")},
        {Take: lambda q: Error(q.id, ErrorCode.INTERNAL, "a fault", "see the log")},
        {Confirm: lambda q: Done(q.id)},
        {Register: lambda q: Registered(q.id, "epoch", BLOB.namespace, 16, 0, 0)},
        {Register: lambda q: Registered(q.id, "epoch", BLOB.namespace, 16, CELL, 1 << 62)},
        {Register: lambda q: Done(q.id)},
    ],
)
def test_what_a_peer_says_that_is_not_so_is_no_hit(peer: Peer, store_of: StoreOf, lies: Any) -> None:
    store = store_of(peer(lies))
    with contextlib.suppress(LMCacheError, OSError):
        assert load(store)[0] is Loaded.ABSENT
    # and it is not held against the peer for ever: the next conversation is judged by itself
    store._foreign_until.clear()
    store._peer.address = type(store._peer.address)("127.0.0.1", peer().port)
    for link in store._links.values():
        link.close()
    assert load(store) == (Loaded.LOADED, FULL)


@pytest.mark.parametrize("lie", [b"", b"\1\1", bytes(100)])
def test_answers_to_questions_that_were_not_asked_are_refused(peer: Peer, store_of: StoreOf, lie: bytes) -> None:
    store = store_of(peer({Peek: lambda q: Peeked(q.id, lie)}))
    with pytest.raises(TierError, match="answers to 1 questions"):
        store.contains([BLOB], soon())


def test_a_peer_that_cannot_say_that_its_ticket_held_has_served_nothing(peer: Peer, store_of: StoreOf) -> None:
    store = store_of(peer({Confirm: lambda q: Confirmed(q.id, held=False)}))
    assert load(store)[0] is Loaded.ABSENT


def test_another_namespace_than_ours_is_foreign_whatever_it_holds(
    peer: Peer, store_of: StoreOf, caplog: pytest.LogCaptureFixture
) -> None:
    asked = peer({Register: lambda q: Registered(q.id, "epoch", b"f" * 16, 16, CELL, CELLS * CELL)})
    store = store_of(asked)
    assert store.contains([BLOB], soon()) == [False]
    assert load(store)[0] is Loaded.ABSENT
    assert "has nothing of m" in caplog.text
    assert not {"Peek", "Take"} & set(asked.asked)


def test_a_slow_peer_is_waited_for_as_long_as_bytes_come(peer: Peer, store_of: StoreOf) -> None:
    def slowly(request: Read) -> Any:
        time.sleep(0.3)
        return contents(request, FULL)

    assert load(store_of(peer({Read: slowly}))) == (Loaded.LOADED, FULL)


def test_a_call_in_a_hurry_begins_no_conversation_that_is_in_a_hurry_for_ever(peer: Peer, store_of: StoreOf) -> None:
    def slowly(request: Read) -> Any:
        time.sleep(1.0)
        return contents(request, FULL)

    store = store_of(peer({Read: slowly}))
    assert store.contains([BLOB], soon()) == [True]
    for link in store._links.values():
        link.close()
    assert store.contains([BLOB], soon(0.3)) == [True]
    assert load(store) == (Loaded.LOADED, FULL)


@pytest.mark.parametrize("silent", [Hello, Register, Peek, Take, Read, Confirm])
def test_a_peer_that_hangs_costs_no_more_than_its_time(peer: Peer, store_of: StoreOf, silent: Any) -> None:
    store = store_of(peer({silent: lambda _: None}))
    call = (lambda: store.contains([BLOB], soon(0.3))) if silent is Peek else (lambda: load(store, 0.3))
    with pytest.raises((DeadlineExceeded, LinkLost)):
        call()


@pytest.mark.parametrize("silent", [Reserve, Commit])
def test_a_store_that_hangs_is_no_store(peer: Peer, store_of: StoreOf, silent: Any) -> None:
    store = store_of(peer({silent: lambda _: None}))
    with pytest.raises((DeadlineExceeded, LinkLost)):
        store.store(BLOB, [memoryview(FULL)], soon(0.3))


@pytest.mark.parametrize("answer", ["error", "welcome"])
def test_a_peer_of_another_version_is_named_as_one(
    peer: Peer, store_of: StoreOf, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    lies = {
        "error": lambda q: Error(q.id, ErrorCode.VERSION, f"protocol {PROTOCOL} is not 9", "install the same version"),
        "welcome": lambda q: Welcome(q.id, PROTOCOL + 7, "9.9", "epoch", "@nowhere", 1),
    }
    store = store_of(peer({Hello: lies[answer]}))
    with pytest.raises(VersionMismatch):
        load(store)
    store.begin("ours")
    wait_until(lambda: "misses until it works" in caplog.text)
    assert f"this one {PROTOCOL}" in caplog.text or f"protocol {PROTOCOL} is not 9" in caplog.text


# ------------------------------------------------------------------------------------------------------ what it refuses


@pytest.mark.parametrize(
    ("placed", "kept"),
    [
        (bytes([Placed.PRESENT]), 0),
        (bytes([Placed.BUSY]), None),
        (bytes([Placed.REFUSED]), None),
        (b"", None),  # no room, or the chunk before is not there
    ],
)
def test_a_shard_that_the_peer_did_not_take_is_not_said_to_be_there(
    peer: Peer, store_of: StoreOf, placed: bytes, kept: int | None
) -> None:
    store = store_of(peer({Reserve: lambda q: Reserved(q.id, 0, placed, b"", CELLS)}))
    assert store.store(BLOB, [memoryview(FULL)], soon()) == kept


def test_a_server_does_not_take_what_its_peer_refused_for_stored(peer: Peer) -> None:
    refusing = peer({Peek: lambda q: Peeked(q.id, bytes(1)), Reserve: lambda q: Reserved(q.id, 0, b"", b"", CELLS)})
    ours = ServerProcess(0, "--l2", f"peer://127.0.0.1:{refusing.port}")
    engine = TinyEngine(ours.address, GEOMETRY)
    try:
        engine.store(prompt(1, 3))
        with Control(ours.address, PATIENCE_S) as control:
            control.wait_idle()
        (report,) = ours.status()["tiers"]
        assert (report["counters"]["lost"], report["counters"]["stored"], report["counters"]["errors"]) == (3, 0, 0)
        assert report["usable"]  # it is no failure
    finally:
        engine.close()
        ours.close()


def test_a_peer_is_not_written_on_eviction_for_chains_leave_from_their_end() -> None:
    with pytest.raises(ConfigError, match="what leaves L1 first is the end of a chain; use store=write-through"):
        PluginManager().open_tier("peer://h?store=on-evict")


# ---------------------------------------------------------------------------------------------------------- at start-up


@pytest.fixture
def server() -> Iterator[Callable[..., RunningServer]]:
    with contextlib.ExitStack() as opened:

        def start(**settings: Any) -> RunningServer:
            made = RunningServer(backed=False, **settings)
            opened.callback(made.stop)
            return made

        yield start


def begun(url: str, epoch: str, caplog: pytest.LogCaptureFixture) -> str:
    """What a server of that epoch says of the tier when it starts."""
    caplog.set_level(logging.INFO, "lmcache.server")
    store = PluginManager().open_tier(url).blobs
    store.begin(epoch)
    store.tier.close()
    return "\n".join(each.getMessage() for each in caplog.records if "the tier peer://" in each.getMessage())


def test_a_peer_that_is_there_is_greeted(
    server: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    there = server(insecure=True)
    assert f"is there, epoch {there.server.epoch}" in begun(f"peer://{there.address}", "ours", caplog)


def test_a_peer_that_is_not_there_is_missed_at_start_up(caplog: pytest.LogCaptureFixture) -> None:
    assert "no lmcache server at 127.0.0.1:1:" in begun("peer://127.0.0.1:1", "ours", caplog)


def test_wrong_keys_and_none_are_told_at_start_up(
    server: Callable[..., RunningServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("keys", "others"):
        new_keys(tmp_path / name)
    there = server(keys=str(tmp_path / "keys"))
    assert "is no lmcache server with the keys that" in begun(
        f"peer://{there.address}?keys={tmp_path}/others", "ours", caplog
    )
    caplog.clear()
    assert "if it wants keys, give its client.key" in begun(f"peer://{there.address}", "ours", caplog)


def test_a_server_without_a_bulk_channel_is_no_peer(
    server: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    assert "has no bulk channel; start it with --keys" in begun(f"peer://{server().address}", "ours", caplog)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "127.0.0.2", "0.0.0.0"])
def test_a_server_that_names_itself_by_whatever_name_is_told_so_and_asks_itself_nothing(
    server: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    ours = server(insecure=True, host="0.0.0.0")
    told = begun(f"peer://{name}:{ours.server.port}", ours.server.epoch, caplog)
    assert f"{name}:{ours.server.port} is this server itself; name another one" in told
    with store_at(f"{name}:{ours.server.port}") as store:
        store.begin(ours.server.epoch)
        for _ in range(2):
            with pytest.raises(ConfigError, match="is this server itself"):
                store.contains([BLOB], soon(PATIENCE_S))
    assert ours.status()["gauges"]["clients"] == 0


def test_another_server_is_shown_as_a_peer_and_not_as_an_engine(server: Callable[..., RunningServer]) -> None:
    there = server(insecure=True)
    with store_at(str(there.address)) as store:
        assert store.contains([BLOB], soon(PATIENCE_S)) == [False]
        (client,) = there.status()["clients"]
        assert client["role"] == "peer"
        assert client["host"].startswith("127.0.0.1")
