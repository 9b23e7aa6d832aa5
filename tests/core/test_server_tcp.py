"""The TCP port: who is there, what goes on, and that strangers who knock are no trouble."""

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from core_stand import CELL, CHUNK, FACTS, GEOMETRY, PATIENCE_S, RunningServer, wait_until

from lmcache import __version__
from lmcache.core.client import ServerAddress
from lmcache.core.control import Control
from lmcache.core.metrics import GAUGES, Counters
from lmcache.core.protocol import (
    PROTOCOL,
    Abort,
    Commit,
    Confirm,
    Drop,
    Error,
    ErrorCode,
    Hello,
    Lookup,
    Message,
    Open,
    Ping,
    Pong,
    Register,
    Reserve,
    Role,
    Status,
    Welcome,
    decode_reply,
    encode,
)

Serve = Callable[..., RunningServer]
ZmqSocket = Callable[[int], "zmq.Socket[bytes]"]


def ask(dealer: "zmq.Socket[bytes]", message: Message) -> Message:
    dealer.send(encode(message))
    return decode_reply(dealer.recv())


@pytest.fixture
def dealer(server: RunningServer, zmq_socket: ZmqSocket) -> "zmq.Socket[bytes]":
    made = zmq_socket(zmq.DEALER)
    made.connect(server.address.endpoint)
    return made


def assert_lives(server: RunningServer) -> None:
    assert server.running
    with Control(server.address, PATIENCE_S) as control:
        assert control.ping() > 0
        assert control.status()["counters"]["internal_errors"] == 0


def test_hello_tells_version_epoch_and_where_the_unix_socket_is(
    server: RunningServer, dealer: "zmq.Socket[bytes]"
) -> None:
    assert ask(dealer, Hello(1, PROTOCOL, "0.0")) == Welcome(
        1, PROTOCOL, __version__, server.server.epoch, server.server.socket_address
    )
    assert ask(dealer, Ping(2)) == Pong(2, server.server.epoch)


def test_another_protocol_version_is_refused_naming_both(dealer: "zmq.Socket[bytes]") -> None:
    reply = ask(dealer, Hello(1, PROTOCOL + 5, "9.9"))

    assert isinstance(reply, Error)
    assert reply == Error(
        1,
        ErrorCode.VERSION,
        f"the client (lmcache 9.9) speaks protocol {PROTOCOL + 5}, "
        f"this server (lmcache {__version__}) speaks {PROTOCOL}",
        "install the same lmcache version on both sides",
    )


@pytest.mark.parametrize(
    "request_",
    [
        Register(3, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0),
        Reserve(3, "", b"", b"h" * 16, 0, 0),
        Commit(3, 1),
        Abort(3, 1),
        Lookup(3, "", b"h" * 16, 1),
        Open(3, 1, "e"),
        Confirm(3, 1, "e"),
        Drop(3, 1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_needs_the_unix_socket_is_refused_by_name(dealer: "zmq.Socket[bytes]", request_: Message) -> None:
    reply = ask(dealer, request_)

    assert isinstance(reply, Error)
    assert (reply.id, reply.code) == (3, ErrorCode.UNREGISTERED)
    assert reply.message == f"{type(request_).__name__} is for the Unix socket"
    assert reply.remedy == "on another host engines use the bulk channel"


def test_the_report_has_every_documented_number(server: RunningServer) -> None:
    report = server.status()

    assert report["gauges"].keys() == GAUGES.keys()
    assert report["counters"].keys() == {name for name in Counters.__slots__ if name != "__weakref__"}
    assert report["gauges"]["cells_total"] == report["gauges"]["cells_backed"] == 64
    assert (report["l1_bytes"], report["cell_bytes"], report["chunk_size"]) == (64 * CELL, CELL, CHUNK)
    assert (report["pid"], report["address"]) == (os.getpid(), str(server.address))
    assert (report["epoch"], report["protocol"], report["version"]) == (server.server.epoch, PROTOCOL, __version__)


def test_bytes_that_are_no_message_are_answered_with_an_error_of_no_request(
    server: RunningServer, dealer: "zmq.Socket[bytes]"
) -> None:
    chance = random.Random(1)
    for size in (0, 1, 5, 100, 3000):
        dealer.send(chance.randbytes(size))
        reply = decode_reply(dealer.recv())
        assert isinstance(reply, Error)
        assert (reply.id, reply.code) == (0, ErrorCode.MALFORMED)
    assert isinstance(ask(dealer, Ping(1)), Pong)

    assert server.counter("messages_malformed") == 5


def test_messages_of_too_many_frames_are_counted_and_dropped(
    server: RunningServer, dealer: "zmq.Socket[bytes]"
) -> None:
    for frames in ([b"", encode(Ping(1))], [b"a", b"b", b"c"], [b""] * 50):
        dealer.send_multipart(frames)

    assert isinstance(ask(dealer, Ping(2)), Pong)
    assert server.counter("messages_malformed") == 3


def test_a_message_that_is_too_large_costs_its_sender_the_connection(
    server: RunningServer, zmq_socket: ZmqSocket
) -> None:
    large = zmq_socket(zmq.DEALER)
    large.connect(server.address.endpoint)
    for _ in range(5):
        large.send(bytes(2 << 20))

    assert_lives(server)


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.PUB, zmq.SUB, zmq.PUSH, zmq.PULL, zmq.PAIR, zmq.ROUTER, zmq.REP])
def test_a_zeromq_socket_of_another_type_is_no_trouble(server: RunningServer, zmq_socket: ZmqSocket, kind: int) -> None:
    stranger = zmq_socket(kind)
    stranger.setsockopt(zmq.SNDTIMEO, 100)
    stranger.connect(server.address.endpoint)
    with contextlib.suppress(zmq.ZMQError):
        stranger.send(encode(Ping(1)))

    assert_lives(server)


STRANGERS = {
    "HTTP": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(100),
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "zeros": bytes(1000),
    "random bytes": random.Random(2).randbytes(4000),
    "half a ZeroMQ greeting": b"\xff\0\0\0\0\0\0\0\x01\x7f\x03",
    "a ZeroMQ greeting and then nonsense": b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + bytes(48) + b"\x07" * 500,
    "our Unix framing": b"\x05\0\0\0\x92\xa4Ping\x01",
    "nothing": b"",
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_on_the_port_is_no_trouble(server: RunningServer, data: bytes) -> None:
    with contextlib.ExitStack() as open_sockets:
        for _ in range(20):
            stranger = open_sockets.enter_context(
                socket.create_connection((server.address.host, server.address.port), timeout=PATIENCE_S)
            )
            with contextlib.suppress(ConnectionError):
                stranger.sendall(data)
        assert_lives(server)
    assert_lives(server)


def test_hundreds_of_connections_that_come_and_go_are_no_trouble(server: RunningServer) -> None:
    for _ in range(300):
        socket.create_connection((server.address.host, server.address.port), timeout=PATIENCE_S).close()

    assert_lives(server)


def test_a_peer_that_asks_and_never_reads_is_no_trouble(server: RunningServer, zmq_socket: ZmqSocket) -> None:
    deaf = zmq_socket(zmq.DEALER)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.SNDTIMEO, 200)
    deaf.connect(server.address.endpoint)
    with contextlib.suppress(zmq.Again):
        for number in range(5000):
            deaf.send(encode(Status(number)))

    assert_lives(server)


def test_a_flood_on_tcp_does_not_keep_engines_from_their_turn(
    server: RunningServer, connect: Callable[..., Any]
) -> None:
    link = connect(server.address).link()
    done = threading.Event()

    def flood() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(server.address.endpoint)
            number = 0
            while not done.is_set():
                number += 1
                with contextlib.suppress(zmq.Again):
                    dealer.send(encode(Ping(number)), zmq.NOBLOCK)
                with contextlib.suppress(zmq.Again):
                    dealer.recv(zmq.NOBLOCK)

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for number in range(100):
            assert not link.confirm(number)
    finally:
        done.set()
        flooding.join()

    assert_lives(server)


def test_two_peers_that_claim_one_identity_do_not_get_each_others_answers(
    server: RunningServer, zmq_socket: ZmqSocket
) -> None:
    first, second = zmq_socket(zmq.DEALER), zmq_socket(zmq.DEALER)
    for each in (first, second):
        each.setsockopt(zmq.IDENTITY, b"the same")
    first.connect(server.address.endpoint)
    assert ask(first, Ping(1)) == Pong(1, server.server.epoch)
    second.connect(server.address.endpoint)
    second.send(encode(Ping(2)))
    second.setsockopt(zmq.RCVTIMEO, 300)
    with pytest.raises(zmq.Again):
        second.recv()

    assert ask(first, Ping(3)) == Pong(3, server.server.epoch)


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.2"])
def test_every_loopback_address_can_be_listened_on(serve: Serve, host: str) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this host has no IPv6")
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if host == "::1" else socket.AF_INET):
            pass
    except OSError as error:
        pytest.skip(f"this host has no {host}: {error}")
    running = serve(host=host)

    with Control(ServerAddress(host, running.server.port), PATIENCE_S) as control:
        assert control.hello().epoch == running.server.epoch
    assert running.server.address == (
        f"[::1]:{running.server.port}" if host == "::1" else f"{host}:{running.server.port}"
    )


def test_an_answer_that_came_in_time_counts_though_it_is_looked_at_late(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that was held up for longer than its deadline finds its answer."""
    look = Control._readable

    def look_late(control: Control, until: float) -> bool:
        assert control._socket.poll(PATIENCE_S * 1000)
        return look(control, until=time.monotonic() - 1)

    monkeypatch.setattr(Control, "_readable", look_late)
    with Control(server.address, PATIENCE_S) as control:
        assert control.hello().epoch == server.server.epoch
        assert control.status()["epoch"] == server.server.epoch


def test_a_server_is_seen_to_be_gone(serve: Serve) -> None:
    running = serve()
    with Control(running.address, PATIENCE_S) as control:
        control.ping()
        running.stop()
        wait_until(lambda: not running.running)
