"""The Unix socket: what is refused and how, and that no client, however it behaves, hurts another."""

import contextlib
import gc
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from core_stand import CELL, CHUNK, FACTS, GEOMETRY, PATIENCE_S, RawConnection, RunningServer, prompt, wait_until

from lmcache import __version__
from lmcache.core import arena, connection, server
from lmcache.core.client import Client
from lmcache.core.memory import MemoryFigure
from lmcache.core.protocol import (
    MAX_FRAME,
    PROTOCOL,
    Abort,
    Commit,
    Confirm,
    Confirmed,
    Done,
    Drop,
    Error,
    ErrorCode,
    Found,
    Hello,
    Lookup,
    Message,
    Open,
    Opened,
    Ping,
    Placed,
    Pong,
    Register,
    Registered,
    Reserve,
    Reserved,
    Role,
    Status,
    StatusReport,
    Welcome,
    encode,
)
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

Raw = Callable[[str], RawConnection]
Serve = Callable[..., RunningServer]

SCRATCH_BESIDE = Geometry(
    (KVGroup(GroupKind.FULL, CHUNK, (CELL,), shards=2), KVGroup(GroupKind.SCRATCH, 0, ())), ranks=2
)


@pytest.fixture
def dial(server: RunningServer, raw: Raw) -> Callable[[], RawConnection]:
    """Open a connection to the server's Unix socket."""
    return lambda: raw(server.server.socket_address)


Dial = Callable[[], RawConnection]


def worker(dial: Dial, **how: Any) -> RawConnection:
    one = dial()
    one.register(**how)
    return one


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def assert_error(reply: Message, code: ErrorCode, words: str) -> None:
    assert isinstance(reply, Error), reply
    assert reply.code == code
    assert words in f"{reply.message}; {reply.remedy}"


def assert_lives(server: RunningServer, dial: Dial) -> None:
    """The server answers others: on TCP, and on a new Unix connection, with a store and a hit."""
    assert server.running
    assert server.counter("internal_errors") == 0
    one = worker(dial)
    p = prompt(random.randrange(1 << 60), 2)
    reserved = one.ask(Reserve(2, "", b"", b"".join(p), 0, 0))
    assert isinstance(reserved, Reserved)
    assert reserved.placed == bytes([Placed.GRANTED] * 2)
    assert one.ask(Commit(3, reserved.reservation)) == Done(3)
    found = one.ask(Lookup(4, "", b"".join(p), 2 * CHUNK))
    assert isinstance(found, Found)
    assert found.tokens == 2 * CHUNK
    assert one.ask(Drop(5, found.ticket)) == Done(5)
    one.close()


# ---------------------------------------------------------------------------------------------------------- registering


def test_a_worker_is_told_its_namespace_and_gets_the_arena(server: RunningServer, dial: Dial) -> None:
    one = dial()
    reply = one.register()

    assert (reply.epoch, reply.chunk_size, reply.cell_bytes) == (server.server.epoch, CHUNK, CELL)
    assert reply.arena_bytes == 64 * CELL
    (descriptor,) = one.descriptors
    assert os.fstat(descriptor).st_size == 64 * CELL
    assert "lmcache-l1" in str(Path(f"/proc/self/fd/{descriptor}").readlink())


def test_a_scheduler_gets_no_arena(dial: Dial) -> None:
    one = worker(dial, role=Role.SCHEDULER)

    assert isinstance(one.ask(Ping(2)), Pong)
    assert one.descriptors == []


def test_another_protocol_version_is_refused_naming_both(dial: Dial) -> None:
    one = dial()
    assert_error(
        one.ask(Hello(1, PROTOCOL + 1, "9.9")),
        ErrorCode.VERSION,
        f"the client (lmcache 9.9) speaks protocol {PROTOCOL + 1}, this server (lmcache {__version__}) speaks "
        f"{PROTOCOL}; install the same lmcache version on both sides",
    )
    assert_error(
        one.ask(Register(2, PROTOCOL + 1, FACTS, GEOMETRY, Role.WORKER, 0)),
        ErrorCode.VERSION,
        f"the client speaks protocol {PROTOCOL + 1}, this server (lmcache {__version__}) speaks {PROTOCOL}",
    )
    assert one.descriptors == []


def test_a_chunk_size_that_does_not_fit_is_refused_in_the_geometrys_words(dial: Dial) -> None:
    odd = Geometry((KVGroup(GroupKind.FULL, 24, (64,)),))

    assert_error(
        dial().ask(Register(1, PROTOCOL, {"model": "zai-org/GLM"}, odd, Role.WORKER, 0)),
        ErrorCode.GEOMETRY,
        "chunk size 16 is not a multiple of 24, the tokens per block of KV group 0 of zai-org/GLM; use 24, 264, 288…",
    )


def test_an_engine_whose_chunks_could_never_be_loaded_is_told_what_l1_it_needs(dial: Dial) -> None:
    large = Geometry((KVGroup(GroupKind.FULL, CHUNK, (CELL * 33,)),))

    assert_error(
        dial().ask(Register(1, PROTOCOL, {}, large, Role.WORKER, 0)),
        ErrorCode.GEOMETRY,
        "a chunk of 16 tokens of this engine takes 33 cells of 4 KiB over all ranks, and L1 has 64; give L1 at least",
    )


def test_a_rank_that_the_geometry_does_not_have_is_refused(dial: Dial) -> None:
    for rank in (-1, 2):
        assert_error(
            dial().ask(Register(1, PROTOCOL, {}, SCRATCH_BESIDE, Role.WORKER, rank)),
            ErrorCode.MALFORMED,
            f"rank {rank} of 2",
        )


def test_a_connection_registers_once(dial: Dial) -> None:
    one = worker(dial)

    assert_error(
        one.ask(Register(2, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0)), ErrorCode.MALFORMED, "registered already"
    )
    assert len(one.descriptors) == 1


def test_engines_with_equal_facts_share_a_namespace_and_others_do_not(dial: Dial) -> None:
    names = [
        dial().register().namespace,
        dial().register(role=Role.SCHEDULER).namespace,
        dial().register(model="other").namespace,
        dial().register(geometry=SCRATCH_BESIDE).namespace,
    ]

    assert names[0] == names[1]
    assert len(set(names)) == 3


def group(kind: str = "full", tokens: int = 16, pages: tuple[int, ...] = (64,), shards: int = 1) -> dict[str, Any]:
    return {"kind": kind, "tokens_per_block": tokens, "page_bytes": pages, "shards": shards}


@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param(
            {"groups": [group("recurrent", (1 << 62) + 1), group("recurrent", (1 << 61) + 1)]},
            id="a chunk size beyond 64 bits",
        ),
        pytest.param({"groups": [group(pages=(1 << 62,))]}, id="a page of four exbibytes"),
        pytest.param({"groups": [group(tokens=1 << 62)]}, id="a block of 2^62 tokens"),
        pytest.param(
            {"groups": [group("recurrent", (1 << 60) + number, (1 << 50,)) for number in range(1, 40, 2)]},
            id="a size that no float holds",
        ),
        pytest.param({"groups": [group(shards=4096)], "ranks": 4096}, id="thousands of shards"),
        pytest.param({"groups": [group()], "ranks": 1 << 40}, id="a million million ranks"),
        pytest.param({"groups": [group()] * 5000}, id="thousands of groups"),
        pytest.param({"groups": [group(pages=(1 << 30,) * 3000)]}, id="thousands of layers"),
        pytest.param({"groups": []}, id="no groups"),
    ],
)
def test_a_geometry_that_no_engine_has_is_refused_at_no_cost(serve: Serve, raw: Raw, geometry: dict[str, Any]) -> None:
    running = serve(chunk_size=None)
    one, other = raw(running.server.socket_address), raw(running.server.socket_address)
    body = msgspec.msgpack.encode(["Register", 1, PROTOCOL, {}, geometry, "worker", 0])
    one.socket.sendall(framed(body))

    assert isinstance(one.receive(), Error)
    assert isinstance(other.ask(Ping(2)), Pong)
    assert running.counter("internal_errors") == 0
    assert running.status()["namespaces"] == []


def test_a_geometry_that_cannot_be_is_refused_in_its_own_words(server: RunningServer, dial: Dial) -> None:
    frame = RawConnection.frame(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0))
    one = dial()
    one.socket.sendall(frame.replace(b"\xb0tokens_per_block\x10", b"\xb0tokens_per_block\x00"))

    assert_error(one.receive(), ErrorCode.MALFORMED, "has 0 tokens per block; give at least 1")
    assert one.ended()
    assert_lives(server, dial)


def test_facts_without_end_are_refused(server: RunningServer, dial: Dial) -> None:
    one = dial()
    one.send(Register(1, PROTOCOL, {"model": "m" * 400_000}, GEOMETRY, Role.WORKER, 0))

    assert_error(one.receive(), ErrorCode.MALFORMED, "")
    assert server.status()["namespaces"] == []
    assert_lives(server, dial)


def test_a_namespace_that_nobody_uses_and_that_holds_nothing_is_forgotten(server: RunningServer, dial: Dial) -> None:
    for number in range(50):
        worker(dial, model=f"m{number}").close()
    keeping = worker(dial, model="kept")
    reserved = keeping.ask(Reserve(2, "", b"", b"h" * 16, 0, 0))
    assert isinstance(reserved, Reserved)
    keeping.ask(Commit(3, reserved.reservation))
    keeping.close()
    wait_until(lambda: server.gauge("clients") == 0)

    assert [each["facts"]["model"] for each in server.status()["namespaces"]] == ["kept"]


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "request_",
    [
        Reserve(7, "", b"", b"h" * 16, 0, 0),
        Lookup(7, "", b"h" * 16, 16),
        Open(7, 1, "e"),
        Confirm(7, 1, "e"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_needs_a_registration_is_refused_without_one(dial: Dial, request_: Message) -> None:
    reply = dial().ask(request_)

    assert_error(reply, ErrorCode.UNREGISTERED, "this connection is not registered; send Register first")
    assert reply.id == 7


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Reserve(1, "", b"", b"h" * 16, 1, 0), "group 1 is not a cached one of 2"),
        (Reserve(1, "", b"", b"h" * 16, 2, 0), "group 2 is not a cached one of 2"),
        (Reserve(1, "", b"", b"h" * 16, -1, 0), "group -1 is not a cached one of 2"),
        (Reserve(1, "", b"", b"h" * 16, 0, 2), "shard 2 of 2"),
        (Reserve(1, "", b"", b"h" * 16, 0, -1), "shard -1 of 2"),
        (Reserve(1, "", b"p" * 15, b"h" * 16, 0, 0), "a parent hash of 15 bytes"),
        (Reserve(1, "", b"", b"h" * 17, 0, 0), "17 bytes of hashes, 16 each"),
        (Lookup(1, "", b"h" * 31, 16), "31 bytes of hashes, 16 each"),
    ],
)
def test_values_that_cannot_be_are_refused_and_the_connection_lives_on(
    server: RunningServer, dial: Dial, request_: Message, words: str
) -> None:
    one = worker(dial, geometry=SCRATCH_BESIDE)

    assert_error(one.ask(request_), ErrorCode.MALFORMED, words)
    assert isinstance(one.ask(Ping(2)), Pong)
    assert server.counter("requests_refused") == 1
    assert server.gauge("cells_used") == 0


def test_a_limit_below_nothing_is_a_miss(dial: Dial) -> None:
    assert worker(dial).ask(Lookup(1, "", b"h" * 16, -5)) == Found(1, 0, 0)


def test_rights_of_another_client_another_boot_or_the_past_are_stale(server: RunningServer, dial: Dial) -> None:
    one, two, scheduler = worker(dial), worker(dial), worker(dial, role=Role.SCHEDULER)
    reserved = one.ask(Reserve(2, "", b"", b"h" * 16, 0, 0))
    assert isinstance(reserved, Reserved)
    for request_ in (Commit(3, reserved.reservation), Abort(3, reserved.reservation)):
        assert_error(two.ask(request_), ErrorCode.STALE, "is not this client's, or has ended; reserve again")
    assert one.ask(Commit(4, reserved.reservation)) == Done(4)
    assert_error(one.ask(Commit(5, reserved.reservation)), ErrorCode.STALE, "reserve again")
    found = scheduler.ask(Lookup(2, "", b"h" * 16, 16))
    assert isinstance(found, Found)
    assert_error(
        one.ask(Open(6, found.ticket, "another boot")),
        ErrorCode.STALE,
        f"ticket {found.ticket} is of server boot another boot, this is {server.server.epoch}; look up again",
    )
    assert one.ask(Confirm(7, found.ticket, "another boot")) == Confirmed(7, False)
    assert isinstance(one.ask(Open(8, found.ticket, server.server.epoch)), Opened)
    assert one.ask(Drop(9, found.ticket)) == Done(9)  # not its owner
    assert one.ask(Confirm(10, found.ticket, server.server.epoch)) == Confirmed(10, True)
    assert_error(one.ask(Open(11, found.ticket, server.server.epoch)), ErrorCode.STALE, "look up again")
    assert one.ask(Confirm(12, found.ticket, server.server.epoch)) == Confirmed(12, True)


def test_what_tcp_answers_is_answered_here_too(server: RunningServer, dial: Dial) -> None:
    one = dial()

    assert one.ask(Ping(1)) == Pong(1, server.server.epoch)
    assert isinstance(one.ask(Hello(2, PROTOCOL, "1")), Welcome)
    assert isinstance(one.ask(Status(3)), StatusReport)


def test_a_fault_of_the_servers_own_is_answered_counted_and_hurts_nobody(
    server: RunningServer, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = worker(dial)

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(server.cache, "lookup", broken)
        assert_error(
            one.ask(Lookup(2, "", b"h" * 16, 16)), ErrorCode.INTERNAL, "KeyError: 'a bug'; see the server's log"
        )
    assert one.ask(Lookup(3, "", b"h" * 16, 16)) == Found(3, 0, 0)
    assert server.counter("internal_errors") == 1


# ----------------------------------------------------------------------------------------------- clients that misbehave


CHANCE = random.Random(3)

HOSTILE = {
    "an empty message": framed(b""),
    "random bytes, framed": framed(CHANCE.randbytes(500)),
    "random bytes": b"\x10\0\0\0" + CHANCE.randbytes(500),
    "an endless frame": b"\xff\xff\xff\xff" + b"x" * 100,
    "a frame one byte too long": struct.pack("<I", MAX_FRAME + 1),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a reply": framed(encode(Done(1))),
    "a pickle": framed(b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x02os\x94."),
    "an array of four billion": framed(b"\xdd\xff\xff\xff\xff"),
    "arrays in arrays": framed(b"\x91" * 100_000),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_bytes_that_are_no_request_end_their_connection_with_an_error_and_no_other(
    server: RunningServer, dial: Dial, data: bytes
) -> None:
    other, hostile = worker(dial), worker(dial)
    reserved = hostile.ask(Reserve(2, "", b"", b"h" * 16, 0, 0))
    assert isinstance(reserved, Reserved)
    with contextlib.suppress(ConnectionError):
        hostile.socket.sendall(data)

    reply = hostile.receive()
    assert_error(reply, ErrorCode.MALFORMED, "speak the lmcache protocol")
    assert reply.id == 0
    assert hostile.ended()
    wait_until(lambda: server.gauge("cells_reserved") == 0)
    assert server.counter("messages_malformed") == 1
    assert isinstance(other.ask(Ping(3)), Pong)
    assert_lives(server, dial)


def test_requests_before_the_bytes_that_are_none_are_answered(dial: Dial) -> None:
    one = worker(dial)
    one.socket.sendall(RawConnection.frame(Ping(5)) + framed(b"nonsense"))

    assert isinstance(one.receive(), Pong)
    assert_error(one.receive(), ErrorCode.MALFORMED, "8 bytes that are no message of protocol")


@pytest.mark.parametrize("length", range(0, 40, 3))
def test_a_message_that_is_cut_off_by_the_end_is_no_message(server: RunningServer, dial: Dial, length: int) -> None:
    one = dial()
    frame = RawConnection.frame(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0))
    one.socket.sendall(frame[:length])
    one.socket.shutdown(socket.SHUT_WR)

    assert one.ended()
    assert one.descriptors == []
    assert server.running


def test_a_message_that_comes_byte_by_byte_is_answered_and_holds_nobody_up(dial: Dial) -> None:
    slow, other = dial(), worker(dial)
    for number, byte in enumerate(RawConnection.frame(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0))):
        slow.socket.sendall(bytes([byte]))
        if number % 16 == 0:
            assert isinstance(other.ask(Ping(number)), Pong)

    assert isinstance(slow.receive(), Registered)


def test_a_hundred_half_messages_hold_nobody_up(server: RunningServer, dial: Dial) -> None:
    frame = RawConnection.frame(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0))
    waiting = [dial() for _ in range(100)]
    for one in waiting:
        one.socket.sendall(frame[: len(frame) // 2])
    assert_lives(server, dial)
    for one in waiting:
        one.socket.sendall(frame[len(frame) // 2 :])

    assert {type(one.receive()) for one in waiting} == {Registered}
    assert server.gauge("clients") == 100


def test_replayed_requests_are_answered_each_and_change_nothing_twice(server: RunningServer, dial: Dial) -> None:
    one = worker(dial)
    reserve = Reserve(2, "", b"", b"h" * 16, 0, 0)
    first, second = one.ask(reserve), one.ask(reserve)
    assert isinstance(first, Reserved)
    assert isinstance(second, Reserved)
    assert (first.placed, second.placed) == (bytes([Placed.GRANTED]), bytes([Placed.BUSY]))
    assert second.reservation == 0
    one.send(*[Commit(3, first.reservation)] * 3)
    replies = [one.receive() for _ in range(3)]
    assert replies[0] == Done(3)
    for reply in replies[1:]:
        assert_error(reply, ErrorCode.STALE, "reserve again")
    lookups = [one.ask(Lookup(4, "", b"h" * 16, 16)) for _ in range(3)]
    tickets = {found.ticket for found in lookups if isinstance(found, Found)}
    assert len(tickets) == 3
    for ticket in tickets:
        assert [one.ask(Drop(5, ticket)) for _ in range(2)] == [Done(5)] * 2

    assert (server.gauge("cells_used"), server.gauge("tickets"), server.gauge("reservations")) == (1, 0, 0)


def test_a_client_that_never_reads_is_dropped_and_holds_nobody_up(
    server: RunningServer, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_UNSENT", 1 << 20)
    deaf, other = worker(dial), worker(dial)
    reserved = deaf.ask(Reserve(2, "", b"", b"h" * 16, 0, 0))
    assert isinstance(reserved, Reserved)
    questions = RawConnection.frame(Status(1)) * 100

    def ask_on() -> None:
        while True:
            deaf.socket.sendall(questions)

    with pytest.raises(ConnectionError):
        ask_on()
    assert isinstance(other.ask(Ping(3)), Pong)

    wait_until(lambda: server.gauge("clients") == 1)
    assert server.gauge("cells_reserved") == 0
    assert_lives(server, dial)


def test_answers_that_wait_for_a_slow_reader_all_arrive_in_order(dial: Dial) -> None:
    one = worker(dial)
    count = 3000
    sender = threading.Thread(target=one.send, args=[Status(number) for number in range(count)])
    sender.start()
    replies = [one.receive() for _ in range(count)]
    sender.join()

    assert [reply.id for reply in replies] == list(range(count))


def test_a_client_that_sends_without_pause_does_not_keep_others_from_their_turn(
    server: RunningServer, dial: Dial
) -> None:
    busy, other = worker(dial), worker(dial)
    done = threading.Event()
    frames = RawConnection.frame(Ping(1)) * 2000

    def flood() -> None:
        with contextlib.suppress(OSError):
            while not done.is_set():
                busy.socket.sendall(frames)

    def drain() -> None:
        with contextlib.suppress(OSError):
            while busy.socket.recv(1 << 16):
                pass

    threads = [threading.Thread(target=flood), threading.Thread(target=drain)]
    for thread in threads:
        thread.start()
    for number in range(50):
        assert isinstance(other.ask(Ping(number)), Pong)
    done.set()
    threads[0].join()
    busy.socket.shutdown(socket.SHUT_RDWR)
    threads[1].join()

    assert_lives(server, dial)


def test_hundreds_of_clients_come_and_go_and_nothing_of_them_stays(server: RunningServer, dial: Dial) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(300):
        one = dial()
        match number % 4:
            case 0:
                one.socket.sendall(b"\x05\0")
            case 1:
                one.send(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0))
            case 2:
                one.register()
                one.send(Reserve(2, "", b"", number.to_bytes(16, "little"), 0, 0))
        one.close()
    wait_until(lambda: not server.server._connections)

    assert_lives(server, dial)
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
    gauges = server.status()["gauges"]
    assert (gauges["clients"], gauges["reservations"], gauges["cells_reserved"]) == (0, 0, 0)


def test_a_client_that_hangs_up_with_answers_unread_is_gone_like_any_other(server: RunningServer, dial: Dial) -> None:
    one = worker(dial)
    one.send(Reserve(2, "", b"", b"h" * 16, 0, 0), Ping(3), Status(4))
    one.close()

    wait_until(lambda: server.gauge("clients") == 0)
    assert server.gauge("cells_used") == 0


def test_no_request_leaves_cyclic_garbage(server: RunningServer, dial: Dial) -> None:
    """The server runs without the cyclic collector: whatever it would have to find is a leak."""
    one = worker(dial)
    gc.collect()
    for number in range(100):  # more chunks than cells, so that eviction is among them
        for stranger in (dial(), dial()):
            stranger.socket.sendall(framed(b"hello") if number % 2 else b"\5")
            stranger.close()
        worker(dial, model=f"m{number}").close()
        reserved = one.ask(Reserve(1, "", b"", number.to_bytes(16, "little"), 0, 0))
        assert isinstance(reserved, Reserved)
        assert one.ask(Commit(2, reserved.reservation)) == Done(2)
        assert isinstance(one.ask(Commit(3, reserved.reservation)), Error)
        found = one.ask(Lookup(4, "", number.to_bytes(16, "little"), 16))
        assert isinstance(found, Found)
        assert one.ask(Drop(5, found.ticket)) == Done(5)
    wait_until(lambda: len(server.server._connections) == 1)

    assert server.counter("chunks_evicted") == 36
    assert gc.collect() < 50  # of the test's own, at most: a leak would be hundreds


FOREIGNER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.connect("\\0" + sys.argv[1][1:])
try:
    peer.sendall(bytes.fromhex(sys.argv[2]))
    data, descriptors, _, _ = socket.recv_fds(peer, 1 << 16, 4)
    print(len(data), len(descriptors))
except ConnectionError:
    print("reset")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_turned_away_before_it_gets_anything(server: RunningServer, dial: Dial) -> None:
    register = RawConnection.frame(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0)).hex()
    answer = subprocess.run(
        [sys.executable, "-c", FOREIGNER, server.server.socket_address, register],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )

    assert answer.stdout in ("0 0\n", "reset\n"), answer.stderr
    assert server.counter("clients_refused") == 1
    assert_lives(server, dial)


# ------------------------------------------------------------------------------------------------- memory is on its way


class SlowMemory:
    """The kernel takes its time to back the arena: each slab waits until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Semaphore(0)
        self.there = 1 << 40
        """Bytes that the host has for the arena, those taken included."""
        self.taken = 0
        real = arena.Mapping.populate

        def populate(mapping: arena.Mapping, start: int, stop: int) -> None:
            assert self.gate.acquire(timeout=PATIENCE_S)
            real(mapping, start, stop)
            self.taken += stop - start

        monkeypatch.setattr(arena, "SLAB_BYTES", 4 * CELL)
        monkeypatch.setattr(arena, "available_memory", lambda: MemoryFigure(self.there - self.taken, "a test"))
        monkeypatch.setattr(arena.Mapping, "populate", populate)

    def let_through(self, slabs: int = 1) -> None:
        for _ in range(slabs):
            self.gate.release()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowMemory]:
    slow = SlowMemory(monkeypatch)
    yield slow
    slow.let_through(1000)


@pytest.fixture
def slow(memory: SlowMemory, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(server, "PARK_SECONDS", PATIENCE_S)
    yield serve(backed=False, max_workers=1)
    memory.let_through(1000)


@pytest.fixture
def dial_slow(slow: RunningServer, raw: Raw) -> Dial:
    return lambda: raw(slow.server.socket_address)


def test_a_store_waits_for_memory_that_is_on_its_way_and_nobody_else_does(
    slow: RunningServer, dial_slow: Dial, memory: SlowMemory
) -> None:
    one, other = worker(dial_slow), worker(dial_slow)
    one.send(Reserve(2, "", b"", b"".join(prompt(1, 6)), 0, 0))
    for number in range(20):
        assert isinstance(other.ask(Ping(number)), Pong)
    assert slow.gauge("cells_used") == 0
    memory.let_through(1)
    wait_until(lambda: slow.gauge("cells_backed") == 4)
    assert slow.gauge("cells_used") == 0  # six are wanted
    memory.let_through(1)

    reply = one.receive()
    assert isinstance(reply, Reserved)
    assert reply.placed == bytes([Placed.GRANTED] * 6)
    assert reply.backed >= 6


def test_chunks_that_are_there_wait_for_no_memory(slow: RunningServer, dial_slow: Dial, memory: SlowMemory) -> None:
    memory.let_through(1)
    wait_until(lambda: slow.gauge("cells_backed") == 4)
    one = worker(dial_slow)
    stored = one.ask(Reserve(2, "", b"", b"".join(prompt(1, 4)), 0, 0))
    assert isinstance(stored, Reserved)
    assert stored.placed == bytes([Placed.GRANTED] * 4)
    one.ask(Commit(3, stored.reservation))

    again = one.ask(Reserve(4, "", b"", b"".join(prompt(1, 4)), 0, 0))
    assert isinstance(again, Reserved)
    assert again.placed == bytes([Placed.PRESENT] * 4)
    memory.let_through(1000)


def test_memory_counts_from_the_moment_it_is_there(serve: Serve, raw: Raw) -> None:
    """A store that arrives between the last slab and its report must not be told that there is no room."""
    running = serve()
    running.server.service.cache.allocator.backed = 0  # as it is before the report
    one = worker(lambda: raw(running.server.socket_address))

    reply = one.ask(Reserve(2, "", b"", b"".join(prompt(1, 2)), 0, 0))
    assert isinstance(reply, Reserved)
    assert reply.placed == bytes([Placed.GRANTED] * 2)


def test_a_client_that_leaves_while_it_waits_for_memory_gets_none(
    slow: RunningServer, dial_slow: Dial, memory: SlowMemory
) -> None:
    one, other = worker(dial_slow), worker(dial_slow)
    one.send(Reserve(2, "", b"", b"".join(prompt(1, 3)), 0, 0))
    assert isinstance(other.ask(Ping(1)), Pong)
    one.close()
    wait_until(lambda: slow.gauge("clients") == 1)
    memory.let_through(1000)
    wait_until(lambda: slow.gauge("cells_backed") == 64)

    assert slow.gauge("cells_used") == 0


def test_memory_that_does_not_come_in_time_makes_the_store_shorter_and_not_late(
    serve: Serve, raw: Raw, memory: SlowMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PARK_SECONDS", 0.05)
    running = serve(backed=False, max_workers=1)
    memory.let_through(1)
    wait_until(lambda: running.gauge("cells_backed") == 4)
    one = raw(running.server.socket_address)
    one.register()

    reply = one.ask(Reserve(2, "", b"", b"".join(prompt(1, 6)), 0, 0))
    assert isinstance(reply, Reserved)
    assert reply.placed == bytes([Placed.GRANTED] * 4)
    memory.let_through(1000)


def test_a_host_that_has_no_more_memory_makes_the_store_shorter_at_once_and_later_stores_grow(
    serve: Serve, raw: Raw, memory: SlowMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PARK_SECONDS", PATIENCE_S)
    memory.there = 4 * CELL
    memory.let_through(1000)
    running = serve(backed=False, max_workers=1)
    wait_until(lambda: running.gauge("cells_backed") == 4)
    one = raw(running.server.socket_address)
    one.register()
    first = one.ask(Reserve(2, "", b"", b"".join(prompt(1, 6)), 0, 0))
    assert isinstance(first, Reserved)
    assert first.placed == bytes([Placed.GRANTED] * 4)
    memory.there = 1 << 40
    second = one.ask(Reserve(3, "", b"", b"".join(prompt(2, 6)), 0, 0))

    assert isinstance(second, Reserved)
    assert second.placed == bytes([Placed.GRANTED] * 6)


def test_a_server_that_stops_answers_or_ends_those_who_wait_for_memory(
    slow: RunningServer, dial_slow: Dial, memory: SlowMemory
) -> None:
    one, other = worker(dial_slow), worker(dial_slow)
    one.send(Reserve(2, "", b"", b"".join(prompt(1, 3)), 0, 0))
    assert isinstance(other.ask(Ping(1)), Pong)
    slow.server.stop()
    memory.let_through(1000)

    assert one.ended()


def test_clients_come_and_go_by_the_client_library_too(server: RunningServer, connect: Callable[..., Client]) -> None:
    for _ in range(20):
        connect(server.address).close()

    wait_until(lambda: not server.server._connections)
    assert server.gauge("clients") == 0
