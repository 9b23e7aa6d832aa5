"""A server from its start to its end: what it refuses to start on, how it stops, and that nothing of it is left."""

import contextlib
import fcntl
import gc
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_stand import (
    FACTS,
    GEOMETRY,
    PATIENCE_S,
    RawConnection,
    RunningServer,
    ServerProcess,
    prompt,
    wait_until,
)

from lmcache.core import server as server_module
from lmcache.core.config import ServerConfig
from lmcache.core.control import Control
from lmcache.core.protocol import (
    PROTOCOL,
    Commit,
    Done,
    Error,
    ErrorCode,
    Lookup,
    Ping,
    Pong,
    Register,
    Reserve,
    Reserved,
    Role,
)
from lmcache.core.server import Server
from lmcache.errors import ConfigError, MemoryLimitError
from lmcache.plugins.eviction.lru import LRU

Serve = Callable[..., RunningServer]
Start = Callable[..., ServerProcess]
Raw = Callable[[str], RawConnection]


def abstract_sockets() -> set[str]:
    """Abstract Unix sockets of servers, from all processes of this network namespace."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.rsplit(maxsplit=1)[-1] for line in lines if line.rsplit(maxsplit=1)[-1].startswith("@lmcache-")}


def socket_of(process: ServerProcess) -> str:
    with Control(process.address, PATIENCE_S) as control:
        return control.hello().socket


def reserve(one: RawConnection, number: int = 1) -> int:
    reply = one.ask(Reserve(2, "", b"", b"".join(prompt(number, 1)), 0, 0))
    assert isinstance(reply, Reserved)
    assert reply.reservation
    return reply.reservation


# ------------------------------------------------------------------------------------------------------------ starting


def test_a_port_that_is_taken_is_said_and_nothing_stays_open(server: RunningServer) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    sockets = abstract_sockets()
    with pytest.raises(ConfigError) as error:
        Server(ServerConfig(port=server.server.port, l1_bytes=1 << 20), LRU())

    assert str(error.value) == (
        f"cannot listen on 127.0.0.1:{server.server.port}: Address already in use; stop what uses the port, or choose "
        "another with --port"
    )
    # there may have been more: of conversations whose end ZeroMQ's thread had not seen yet
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= descriptors)
    assert abstract_sockets() == sockets


def test_more_memory_than_the_host_has_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(MemoryLimitError, match="--l1-size-gb 1e"):
        Server(ServerConfig(port=0, l1_bytes=10**15 << 30), LRU())


def test_two_servers_on_one_host_know_nothing_of_each_other(serve: Serve, raw: Raw) -> None:
    first, second = serve(), serve()
    one, two = raw(first.server.socket_address), raw(second.server.socket_address)
    one.register()
    two.register()
    one.ask(Commit(3, reserve(one)))

    assert (first.gauge("cells_used"), second.gauge("cells_used")) == (1, 0)
    assert first.server.epoch != second.server.epoch


def test_a_server_leaves_the_garbage_collector_as_it_was(serve: Serve) -> None:
    assert gc.isenabled()
    running = serve()
    running.stop()

    assert gc.isenabled()


def test_a_server_that_never_ran_closes_everything() -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    made = Server(ServerConfig(port=0, l1_bytes=1 << 20), LRU())
    made.close()
    made.close()
    made.wake()

    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


# ------------------------------------------------------------------------------------------------------------ stopping


def test_a_stopping_server_lets_stores_in_flight_finish_and_starts_nothing_new(
    serve: Serve, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "DRAIN_SECONDS", PATIENCE_S)
    running = serve()
    one, two = raw(running.server.socket_address), raw(running.server.socket_address)
    one.register()
    reservation = reserve(one)
    running.server.stop()
    for request in (
        Reserve(4, "", b"", b"h" * 16, 0, 0),
        Lookup(5, "", b"h" * 16, 16),
    ):
        reply = one.ask(request)
        assert isinstance(reply, Error)
        assert (reply.id, reply.code) == (request.id, ErrorCode.STOPPING)
        assert reply.message == "the server is stopping"
    reply = two.ask(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0))
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.STOPPING
    assert one.ask(Commit(6, reservation)) == Done(6)

    assert one.ended()
    assert two.ended()
    running.stop()


def test_a_writer_that_has_stopped_does_not_keep_the_server_from_stopping(
    serve: Serve, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "DRAIN_SECONDS", 0.2)
    running = serve()
    one = raw(running.server.socket_address)
    one.register()
    reserve(one)
    running.stop()

    assert one.ended()


def test_sigterm_drains_and_ends_with_exit_code_zero(start_process: Start, raw: Raw) -> None:
    process = start_process()
    one = raw(socket_of(process))
    one.register()
    reservation = reserve(one)
    process.signal(signal.SIGTERM)
    wait_until(lambda: isinstance(one.ask(Lookup(4, "", b"h" * 16, 16)), Error))
    assert one.ask(Commit(5, reservation)) == Done(5)

    assert one.ended()
    assert process.process.wait(PATIENCE_S) == 0


# -------------------------------------------------------------------------------------------------------- what is left


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_server_however_it_ends(start_process: Start, raw: Raw, number: signal.Signals) -> None:
    process = start_process()
    address = socket_of(process)
    assert address in abstract_sockets()
    one = raw(address)
    one.register()
    process.signal(number)
    process.process.wait(PATIENCE_S)

    assert one.ended()
    one.close()
    assert address not in abstract_sockets()
    with socket.create_server(("127.0.0.1", process.port)):
        pass  # the port is free


def test_a_successor_on_the_same_port_at_once_is_another_boot(start_process: Start, raw: Raw) -> None:
    first = start_process()
    one = raw(socket_of(first))
    one.register()
    reserve(one)
    first.kill()
    second = start_process(first.port)

    assert one.ended()
    assert second.port == first.port
    assert second.epoch != first.epoch
    with Control(second.address, PATIENCE_S) as control:
        assert control.hello().epoch == second.epoch
        assert control.status()["gauges"]["cells_used"] == 0


# --------------------------------------------------------------------------------------------------------- --socket-dir


def files(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_socket_in_a_folder_works_like_any_other_and_is_gone_after_a_stop(
    serve: Serve, raw: Raw, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "folder"
    running = serve(socket_dir=str(folder))
    port = running.server.port
    assert running.server.socket_address == str(folder / f"lmcache-{port}.sock")
    assert files(folder) == [f"lmcache-{port}.lock", f"lmcache-{port}.sock"]
    assert folder.stat().st_mode & 0o777 == 0o700
    one = raw(running.server.socket_address)
    one.register()
    assert isinstance(one.ask(Ping(2)), Pong)
    running.stop()

    assert files(folder) == []


def test_what_a_killed_server_left_in_the_folder_is_removed_by_the_next_start(
    start_process: Start, raw: Raw, tmp_path: Path
) -> None:
    first = start_process(0, "--socket-dir", str(tmp_path))
    first.kill()
    assert files(tmp_path) == [f"lmcache-{first.port}.lock", f"lmcache-{first.port}.sock"]
    second = start_process(first.port, "--socket-dir", str(tmp_path))
    one = raw(socket_of(second))
    one.register()
    second.signal(signal.SIGTERM)
    assert second.process.wait(PATIENCE_S) == 0

    assert files(tmp_path) == []


def test_servers_share_a_folder_by_port_and_each_removes_its_own(serve: Serve, tmp_path: Path) -> None:
    first, second = serve(socket_dir=str(tmp_path)), serve(socket_dir=str(tmp_path))
    first.stop()

    assert files(tmp_path) == [f"lmcache-{second.server.port}.lock", f"lmcache-{second.server.port}.sock"]


def test_a_folder_that_a_server_of_the_same_port_uses_is_refused_and_untouched(
    server: RunningServer, tmp_path: Path
) -> None:
    """Two containers with networks of their own share a volume: both may have port 5555."""
    port = server.server.port
    server.stop()
    with (tmp_path / f"lmcache-{port}.lock").open("w") as lock, socket.socket(socket.AF_UNIX) as theirs:
        fcntl.flock(lock, fcntl.LOCK_EX)
        theirs.bind(str(tmp_path / f"lmcache-{port}.sock"))
        with pytest.raises(ConfigError, match="is in use by another server; give another folder"):
            Server(ServerConfig(port=port, l1_bytes=1 << 20, socket_dir=str(tmp_path)), LRU())

        assert files(tmp_path) == [f"lmcache-{port}.lock", f"lmcache-{port}.sock"]


def test_a_folder_that_cannot_be_one_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(ConfigError, match=f"--socket-dir {folder}: "):
            Server(ServerConfig(port=0, l1_bytes=1 << 20, socket_dir=str(folder)), LRU())
    long = tmp_path / ("long" * 30)
    with pytest.raises(ConfigError, match=f"--socket-dir {long}: "):
        Server(ServerConfig(port=0, l1_bytes=1 << 20, socket_dir=str(long)), LRU())

    assert files(long) == []


# ------------------------------------------------------------------------------------------------- descriptors run out


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
from lmcache.cli.main import main
main(["server", "--port", "0", "--l1-size-gb", "0.001", "--l1-cell-kb", "4", "--chunk-size", "16"])
"""


def test_a_server_without_descriptors_goes_on_serving_and_takes_new_clients_later(raw: Raw) -> None:
    process = subprocess.Popen([sys.executable, "-c", LIMITED], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process, contextlib.ExitStack() as opened:
        try:
            assert process.stdout is not None
            ready = ServerProcess.READY.match(process.stdout.readline())
            assert ready is not None
            address = f"@lmcache-{ready[2].decode()}"
            first = raw(address)
            first.register()
            crowd = [opened.enter_context(contextlib.closing(RawConnection(address))) for _ in range(60)]
            for number in range(30):
                assert isinstance(first.ask(Ping(number)), Pong)
            for one in crowd:
                one.close()
            late = raw(address)
            assert isinstance(late.ask(Ping(1)), Pong)
        finally:
            process.terminate()
            _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert log.count(b"could not be accepted") < 100


# ------------------------------------------------------------------------------------------------------ dying clients


DYING = """
import os, sys
from lmcache.core.control import Control, ServerAddress
from lmcache.core.link import Engine, Link
from lmcache.core.protocol import Role
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

geometry = Geometry((KVGroup(GroupKind.FULL, 16, (4096,)),))
with Control(ServerAddress("127.0.0.1", int(sys.argv[1])), 30.0) as control:
    address = control.hello().socket
for number in range(int(sys.argv[2])):
    if os.fork() == 0:
        engine = Engine({"model": "m"}, geometry, Role.WORKER)
        links = [Link.register(address, engine, 30.0) for _ in range(2)]
        links[0].reserve("", b"", number.to_bytes(16, "little"), 0, 0)
        links[0].lookup("", bytes(16), 16).wait()
        with links[1].copying() as memory:
            memory[0] = memory[0]
            os.kill(os.getpid(), 9)
    os.wait()
print("done")
"""


def test_fifty_killed_clients_leave_descriptors_memory_cells_and_tickets_as_they_were(start_process: Start) -> None:
    process = start_process()

    def die(clients: int) -> None:
        subprocess.run([sys.executable, "-c", DYING, str(process.port), str(clients)], check=True, timeout=PATIENCE_S)
        wait_until(lambda: process.status()["gauges"]["clients"] == 0)

    def descriptors_of_its() -> int:
        return len(list(Path(f"/proc/{process.process.pid}/fd").iterdir()))

    def holdings() -> tuple[int, dict[str, Any]]:
        status = process.status()
        resident = int(Path(f"/proc/{process.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()
        gauges = {name: value for name, value in status["gauges"].items() if name != "cells_backed"}
        return resident, gauges

    die(5)  # whatever is made once is there
    descriptors = descriptors_of_its()
    resident, gauges = holdings()
    die(50)
    after, gauges_after = holdings()

    wait_until(lambda: descriptors_of_its() <= descriptors)
    assert gauges_after == gauges
    assert gauges["cells_used"] == gauges["tickets"] == gauges["reservations"] == 0
    assert after - resident < 2 << 20
    with Control(process.address, PATIENCE_S) as control:
        assert control.ping() > 0
        assert control.status()["counters"]["internal_errors"] == 0


def test_a_server_is_gone_with_its_threads(serve: Serve) -> None:
    before = set(threading.enumerate())
    running = serve()
    running.stop()

    assert set(threading.enumerate()) <= before
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "lmcache-l1" in line]
