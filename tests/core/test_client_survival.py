"""The client's thread outlives whatever it meets, ends when it is told to, and leaves nothing behind."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq
from core_stand import CELL, FACTS, GEOMETRY, PATIENCE_S, SETTINGS, RunningServer, ServerProcess, prompt, wait_until

from lmcache import __version__
from lmcache.core import client as client_module
from lmcache.core import control
from lmcache.core.cells import unpack_cells
from lmcache.core.client import Client, ClientSettings, Engine, ServerAddress
from lmcache.core.link import Link
from lmcache.core.protocol import PROTOCOL, Hello, Role, Welcome, decode_request, encode
from lmcache.errors import ProtocolError, ServerUnavailable, VersionMismatch
from lmcache.plugins.testing.ports import free_port

Serve = Callable[..., RunningServer]
Start = Callable[..., ServerProcess]
Connect = Callable[..., Client]

QUICK = ClientSettings(deadline=0.2, retry_min=0.01, retry_max=0.05)


def linked(client: Client) -> Link | None:
    with contextlib.suppress(ServerUnavailable):
        return client.link()
    return None


@pytest.fixture
def strangers() -> Iterator[Callable[[bytes | None], ServerAddress]]:
    """Listeners on TCP that are no lmcache server: they say `speech` to whoever connects, or nothing."""
    with contextlib.ExitStack() as opened:

        def listen(speech: bytes | None) -> ServerAddress:
            listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=100))

            def talk() -> None:
                with contextlib.suppress(OSError), contextlib.ExitStack() as peers:
                    while True:
                        peer, _ = listener.accept()
                        peers.enter_context(peer)
                        if speech is not None:
                            peer.sendall(speech)

            talking = threading.Thread(target=talk)
            talking.start()
            opened.callback(talking.join)
            opened.callback(listener.shutdown, socket.SHUT_RDWR)
            return ServerAddress("127.0.0.1", listener.getsockname()[1])

        yield listen


# ------------------------------------------------------------------------------------------------- whatever it meets


SPEECHES = {"silent": None, "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n", "nonsense": b"\xff" * 100}


@pytest.mark.parametrize("speech", SPEECHES.values(), ids=SPEECHES.keys())
def test_another_program_on_the_port_is_said_and_costs_the_engine_nothing(
    strangers: Callable[[bytes | None], ServerAddress], connect: Connect, speech: bytes | None
) -> None:
    address = strangers(speech)
    client = connect(address, settings=QUICK)

    wait_until(lambda: "did not answer as an lmcache server" in str(client._why))
    with pytest.raises(ServerUnavailable, match="it is another program"):
        client.link()
    assert client.refusal is None


def test_a_name_that_is_no_host_is_said_and_tried_again(connect: Connect) -> None:
    client = connect(ServerAddress("no host at all", 5555), settings=QUICK)

    with pytest.raises(ServerUnavailable, match="no host at all"):
        client.link()
    assert client._thread.is_alive()


class Greeter:
    """Answers `Hello` on TCP and names a Unix socket of its choice."""

    def __init__(self, socket_address: str) -> None:
        self._context = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        self.address = ServerAddress("127.0.0.1", router.bind_to_random_port("tcp://127.0.0.1"))

        def greet() -> None:
            with contextlib.suppress(zmq.ContextTerminated), router:
                while True:
                    peer, data = router.recv_multipart()
                    request = decode_request(data)
                    assert isinstance(request, Hello)
                    router.send_multipart(
                        [peer, encode(Welcome(request.id, PROTOCOL, __version__, "e", socket_address))]
                    )

        self._thread = threading.Thread(target=greet)
        self._thread.start()

    def close(self) -> None:
        closing = threading.Thread(target=self._context.term)  # blocks until the greeter has let go of its socket
        closing.start()
        self._thread.join(PATIENCE_S)
        closing.join(PATIENCE_S)


def test_an_engine_that_cannot_reach_the_unix_socket_is_told_what_to_do(connect: Connect) -> None:
    """As in a container with a network namespace of its own."""
    greeter = Greeter("@lmcache-of-another-network")
    try:
        client = connect(greeter.address)
        with pytest.raises(ServerUnavailable) as error:
            client.link()
    finally:
        client.close()
        greeter.close()
    assert "the server's Unix socket @lmcache-of-another-network cannot be reached" in str(error.value)
    assert "run the engine on the server's host and in its network namespace" in str(error.value)


def test_any_error_while_connecting_is_logged_and_survived(
    server: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [RuntimeError("can't start new thread"), MemoryError("no"), OSError(24, "Too many open files")]
    real = Link.register

    def register(*arguments: object) -> Link:
        if failures:
            raise failures.pop()
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Link, "register", register)
    client = connect(server.address)

    wait_until(lambda: linked(client))
    assert failures == []


def test_any_error_while_watching_costs_the_link_and_not_the_thread(server: RunningServer, connect: Connect) -> None:
    client = connect(server.address)
    first = client.link()

    def broken() -> None:
        raise RuntimeError("a bug")

    first.tend = broken  # type: ignore[method-assign]
    second = wait_until(lambda: (link := linked(client)) is not first and link)

    assert not first.alive
    assert not second.confirm(1)


def test_a_callback_that_raises_does_not_end_the_thread(serve: Serve, connect: Connect) -> None:
    refusing = serve(chunk_size=24)
    heard: list[ProtocolError] = []

    def on_refused(error: ProtocolError) -> None:
        heard.append(error)
        raise ValueError("the engine's own bug")

    client = connect(refusing.address, on_refused=on_refused)
    wait_until(lambda: heard)
    attempts = refusing.counter("requests_refused")
    wait_until(lambda: refusing.counter("requests_refused") > attempts + 2)
    assert len(heard) == 1
    refusing.stop()
    serve(port=refusing.server.port)

    wait_until(lambda: linked(client))
    assert client.refusal is None


def test_another_protocol_version_is_a_refusal_that_names_both(
    server: RunningServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PROTOCOL", PROTOCOL + 1)
    heard: list[ProtocolError] = []
    client = connect(server.address, on_refused=heard.append)

    wait_until(lambda: heard)
    assert isinstance(client.refusal, VersionMismatch)
    both = f"speaks protocol {PROTOCOL + 1}, this server (lmcache {__version__}) speaks {PROTOCOL}"
    assert both in str(client.refusal)
    assert heard == [client.refusal]


def test_a_server_that_is_stopping_has_not_refused_the_engine(
    server: RunningServer, connect: Connect, raw: Callable[..., object]
) -> None:
    worker = connect(server.address).link()
    worker.reserve("", b"", b"h" * 16, 0, 0)
    server.server.stop()  # and drains, for there is a store in flight
    client = connect(server.address, settings=QUICK)
    wait_until(lambda: "stopping" in str(client._why) or not server.running)

    assert client.refusal is None


# --------------------------------------------------------------------------------------------------- restarts and ends


def test_a_server_that_is_killed_and_started_again_gets_all_its_engines_back(
    start_process: Start, connect: Connect
) -> None:
    first = start_process()
    roles = [Role.WORKER, Role.SCHEDULER] * 5
    clients = [connect(first.address, role, settings=SETTINGS) for role in roles]
    links = [client.link() for client in clients]
    assert {link.epoch for link in links} == {first.epoch}
    first.kill()
    second = start_process(first.port)
    again = [wait_until(lambda c=client: linked(c)) for client in clients]

    assert {link.epoch for link in again} == {second.epoch}
    assert {link.namespace for link in again} == {links[0].namespace}
    assert not any(link.alive for link in links)


def test_a_copy_that_outlives_its_server_ends_in_its_own_memory_while_the_next_link_is_there(
    start_process: Start, connect: Connect
) -> None:
    first = start_process()
    client = connect(first.address)
    old = client.link()
    reserved = wait_until(lambda: (r := old.reserve("", b"", prompt(1, 1)[0], 0, 0)).reservation and r)
    (cell,) = unpack_cells(reserved.cells)
    with old.copying() as memory:
        first.kill()
        second = start_process(first.port)
        new = wait_until(lambda: (link := linked(client)) is not old and link)
        assert new.epoch == second.epoch
        memory[cell * CELL : (cell + 1) * CELL] = b"o" * CELL
        with new.copying() as other:
            assert other[cell * CELL] == 0  # not the same arena

    assert old.fileno() == -1
    assert new.alive


def test_an_engine_that_is_stopped_for_a_while_finds_its_link_as_it_was(server: RunningServer) -> None:
    """`SIGSTOP` does not end the connection: what the engine holds stays its own until it goes on."""
    engine = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(server.address.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"reserved\n"
        engine.send_signal(signal.SIGSTOP)
        assert server.gauge("cells_reserved") == 1
        engine.send_signal(signal.SIGCONT)
        engine.stdin.write(b"\n")
        engine.stdin.close()
        assert engine.stdout.readline() == b"committed\n"
    assert server.gauge("cells_used") == 1


STOPPED = """
import sys
from lmcache.core.client import Client, Engine, ServerAddress
from lmcache.core.protocol import Role
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

geometry = Geometry((KVGroup(GroupKind.FULL, 16, (4096,)),))
client = Client(ServerAddress("127.0.0.1", int(sys.argv[1])), Engine({"model": "m"}, geometry, Role.WORKER))
client.start(30)
link = client.link()
reserved = link.reserve("", b"", b"h" * 16, 0, 0)
print("reserved", flush=True)
sys.stdin.readline()
link.commit(reserved.reservation)
print("committed", flush=True)
client.close()
"""


def test_closing_ends_the_thread_at_any_moment(
    server: RunningServer, strangers: Callable[[bytes | None], ServerAddress], connect: Connect
) -> None:
    absent = ServerAddress("127.0.0.1", free_port())
    for address in (server.address, absent, strangers(None)):
        for wait in (0.0, 0.05, PATIENCE_S):
            client = connect(address, settings=QUICK, wait=wait)
            client.close()
            client.close()
            with pytest.raises(ServerUnavailable):
                client.link()
    assert not [thread for thread in threading.enumerate() if thread.name in ("lmcache-client", "lmcache-prefault")]


def test_a_client_that_was_never_started_has_no_link_and_closes() -> None:
    client = Client(ServerAddress("127.0.0.1", 1), Engine(FACTS, GEOMETRY, Role.WORKER))
    with pytest.raises(ServerUnavailable, match=r"not connected to 127\.0\.0\.1:1 yet"):
        client.link()
    client.close()


def test_a_client_may_be_closed_by_what_hears_of_its_refusal(serve: Serve) -> None:
    refusing = serve(chunk_size=24)
    closed = threading.Event()

    def on_refused(_: ProtocolError) -> None:
        client.close()
        closed.set()

    client = Client(refusing.address, Engine(FACTS, GEOMETRY, Role.WORKER), SETTINGS, on_refused)
    client.start()
    assert closed.wait(PATIENCE_S)
    client._thread.join(PATIENCE_S)
    assert not client._thread.is_alive()
    client.close()


def test_a_forked_child_that_closes_its_client_does_not_disturb_its_parents(
    server: RunningServer, connect: Connect
) -> None:
    client = connect(server.address)
    link = client.link()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            client.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    poll = select.poll()
    poll.register(client._woken, select.POLLIN)
    wait_until(lambda: not poll.poll(0), "the keeper has read what the child wrote")

    assert client.link() is link
    assert not link.confirm(1)


def test_one_line_is_logged_for_a_cause_and_not_one_for_each_attempt(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []
    real = client_module.Client._register

    def counted(client: Client) -> Link:
        attempts.append(client)
        return real(client)

    monkeypatch.setattr(client_module.Client, "_register", counted)
    connect(ServerAddress("127.0.0.1", free_port()), settings=QUICK)
    wait_until(lambda: len(attempts) > 4)

    assert len([record for record in caplog.records if record.name == "lmcache.client"]) == 1
