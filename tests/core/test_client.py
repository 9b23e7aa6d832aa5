"""The client of an engine process against a real server: absent, killed, stopped, restarted or asked too much."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from core_stand import wait_until

from lmcache.core.client import Client, ClientSettings, Engine, Link, ServerAddress
from lmcache.core.control import Control
from lmcache.core.keys import HASH_BYTES, ChainHasher, chain_root
from lmcache.core.protocol import Placed, Role
from lmcache.errors import DeadlineExceeded, LinkLost, LMCacheError, ProtocolError, Refused, ServerUnavailable
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.testing.ports import free_port

CHUNK = 64
PAGE = 4096
GEOMETRY = Geometry((KVGroup(GroupKind.FULL, 16, (PAGE,)),))
"""Four blocks of one page each: an object is four cells' worth of one 16 KiB cell."""
SETTINGS = ClientSettings(deadline=5.0, retry_min=0.02, retry_max=0.1)
PATIENCE = 20.0


class ServerProcess:
    """`lmcache server` on one port, started again as often as wanted."""

    def __init__(self) -> None:
        self.address = ServerAddress(port=free_port())
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> "ServerProcess":
        command = [
            sys.executable,
            "-m",
            "lmcache",
            "server",
            "--port",
            str(self.address.port),
            "--l1-size-gb",
            "0.0625",
        ]
        command += ["--l1-cell-kb", "16", "--log-level", "warning", *(options or ("--chunk-size", str(CHUNK)))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert b"ready" in self.process.stdout.readline()
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def gauges(self) -> dict[str, int]:
        with Control(self.address, 5.0) as control:
            gauges: dict[str, int] = control.status()["gauges"]
        return gauges


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    process = ServerProcess()
    yield process
    process.kill()


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def connecting(role: Role = Role.WORKER, geometry: Geometry = GEOMETRY, **options: object) -> Client:
        client = Client(server.address, Engine({"model": "m"}, geometry, role), SETTINGS, **options)  # type: ignore[arg-type]
        clients.append(client)
        client.start(PATIENCE)
        return client

    yield connecting
    for client in clients:
        client.close()


def linked(client: Client) -> bool:
    try:
        client.link()
    except ServerUnavailable:
        return False
    return True


def hashes_of(seed: int, chunks: int) -> bytes:
    return ChainHasher(chain_root({}), CHUNK).extend_to([seed] * (chunks * CHUNK))


def store(link: Link, hashes: bytes, fill: int) -> int:
    """Store every chunk, each cell full of `fill`. Returns how many were granted."""
    reserved = link.reserve("", b"", hashes, 0, 0)
    with link.copying() as memory:
        for start in range(0, len(reserved.cells), 4):
            cell = int.from_bytes(reserved.cells[start : start + 4], "little")
            memory[cell * link.cell_bytes : (cell + 1) * link.cell_bytes] = bytes([fill]) * link.cell_bytes
    if reserved.reservation:
        link.commit(reserved.reservation)
    return reserved.placed.count(Placed.GRANTED)


def read(link: Link, ticket: int) -> list[set[int]]:
    """The distinct bytes of each cell of the hit."""
    opened = link.open(ticket)
    cells = [int.from_bytes(opened.cells[0][i : i + 4], "little") for i in range(0, len(opened.cells[0]), 4)]
    with link.copying() as memory:
        return [set(memory[cell * link.cell_bytes : (cell + 1) * link.cell_bytes]) for cell in cells]


# -------------------------------------------------------------------------------------------------- whether it is there


def test_without_a_server_the_engine_is_told_at_once_and_joins_when_one_comes(server, connect):
    client = connect()
    with pytest.raises(ServerUnavailable, match=r"there is no link to a server: no lmcache server at 127\.0\.0\.1"):
        client.link()
    server.start()
    wait_until(lambda: linked(client))
    assert client.link().chunk_size == CHUNK


def test_a_killed_server_is_noticed_without_asking_and_its_successor_has_another_epoch(server, connect):
    server.start()
    client = connect()
    first = client.link()
    server.kill()
    wait_until(lambda: not first.alive)
    with pytest.raises(ServerUnavailable):
        client.link()
    server.start()
    wait_until(lambda: linked(client))
    assert client.link() is not first
    assert client.link().epoch != first.epoch
    with pytest.raises(LinkLost):
        first.lookup("", hashes_of(1, 2), 127)


def test_a_server_restarted_at_once_is_registered_with_again_and_old_tickets_are_worth_nothing(server, connect):
    server.start()
    worker, scheduler = connect(), connect(Role.SCHEDULER)
    assert store(worker.link(), hashes_of(1, 3), 7) == 3
    found = scheduler.link().lookup("", hashes_of(1, 3), 3 * CHUNK - 1).wait()
    assert found.tokens == 3 * CHUNK - 16
    old = worker.link().epoch
    server.kill()
    server.start()
    wait_until(lambda: linked(worker) and linked(scheduler) and worker.link().epoch != old)
    assert scheduler.link().lookup("", hashes_of(1, 3), 3 * CHUNK - 1).wait().tokens == 0
    with pytest.raises(Refused) as refused:
        worker.link().open(found.ticket)
    assert refused.value.code == "stale"
    assert worker.link().confirm(found.ticket) is False


def test_a_stopped_server_costs_one_deadline_and_then_nothing(server, connect):
    server.start()
    client = connect()
    link = client.link()
    server.signal(signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match=r"did not answer within 5 s"):
        link.reserve("", b"", hashes_of(1, 1), 0, 0)
    assert not link.alive
    with pytest.raises(ServerUnavailable):  # the circuit is open: nobody waits again
        client.link()
    server.signal(signal.SIGCONT)
    wait_until(lambda: linked(client))
    # what the late request reserved ended with its link
    wait_until(lambda: server.gauges()["cells_used"] == 0)
    assert server.gauges()["reservations"] == 0
    assert server.gauges()["clients"] == 1


def test_a_lookup_that_is_never_answered_ends_by_itself_and_leaves_no_ticket(server, connect):
    server.start()
    worker, scheduler = connect(), connect(Role.SCHEDULER)
    store(worker.link(), hashes_of(1, 4), 1)
    server.signal(signal.SIGSTOP)
    pending = scheduler.link().lookup("", hashes_of(1, 4), 4 * CHUNK - 1)
    assert pending.poll() is None

    def given_up() -> bool:
        try:
            return pending.poll() is not None
        except ServerUnavailable:
            return True

    wait_until(given_up)
    server.signal(signal.SIGCONT)
    wait_until(lambda: linked(scheduler))
    wait_until(lambda: server.gauges()["tickets"] == 0 and server.gauges()["pinned_nodes"] == 0)


# ----------------------------------------------------------------------------------------------------------- the arena


def test_what_is_stored_by_one_process_is_read_by_another_byte_by_byte(server, connect):
    server.start()
    writer, reader, scheduler = connect(), connect(), connect(Role.SCHEDULER)
    assert store(writer.link(), hashes_of(5, 3), 0xA5) == 3
    found = scheduler.link().lookup("", hashes_of(5, 3) + bytes(HASH_BYTES), 4 * CHUNK).wait()
    assert found.tokens == 3 * CHUNK
    assert read(reader.link(), found.ticket) == [{0xA5}] * 3
    assert reader.link().confirm(found.ticket) is True
    assert reader.link().confirm(found.ticket) is True  # idempotent
    assert server.gauges()["tickets"] == 0


def test_a_copy_in_flight_keeps_arena_and_cells_until_it_has_ended(server, connect):
    server.start()
    client = connect()
    link = client.link()
    reserved = link.reserve("", b"", hashes_of(2, 1), 0, 0)
    cell = int.from_bytes(reserved.cells, "little")
    with link.copying() as memory:
        link.close()
        assert not link.alive
        # the mapping is there, and the server has not given the cell to anybody: it sees no end of the connection
        memory[cell * link.cell_bytes : (cell + 1) * link.cell_bytes] = b"\x11" * link.cell_bytes
        assert server.gauges()["cells_reserved"] == 1
    wait_until(lambda: server.gauges()["cells_used"] == 0)
    with pytest.raises(LinkLost), link.copying():
        pass


def test_a_view_kept_too_long_does_not_keep_the_connection(server, connect):
    server.start()
    client = connect()
    with client.link().copying() as memory:
        kept = memoryview(memory)[:10]
    client.close()
    wait_until(lambda: server.gauges()["clients"] == 0)
    assert bytes(kept) == bytes(10)  # the pages stay until the last view has gone
    kept.release()


def test_a_scheduler_has_no_arena(server, connect):
    server.start()
    with pytest.raises(LinkLost, match="only workers map it"), connect(Role.SCHEDULER).link().copying():
        pass


# --------------------------------------------------------------------------------------------------------- many at once


def test_answers_find_their_askers_when_many_threads_share_a_link(server, connect):
    server.start()
    worker, scheduler = connect(), connect(Role.SCHEDULER)
    for seed in range(8):
        store(worker.link(), hashes_of(seed, seed + 1), seed)
    wrong: list[tuple[int, int]] = []

    def ask(seed: int) -> None:
        for _ in range(100):
            found = scheduler.link().lookup("", hashes_of(seed, 8), 8 * CHUNK).wait()
            if found.tokens != (seed + 1) * CHUNK:
                wrong.append((seed, found.tokens))
            scheduler.link().drop(found.ticket)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    wait_until(lambda: server.gauges()["tickets"] == 0)


def test_the_link_breaks_for_all_threads_when_the_server_dies(server, connect):
    server.start()
    client = connect(Role.SCHEDULER)
    link = client.link()
    ended: list[str] = []

    def ask() -> None:
        try:
            while True:
                link.lookup("", hashes_of(1, 1), CHUNK).wait()
        except LMCacheError as error:
            ended.append(type(error).__name__)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    server.kill()
    for thread in threads:
        thread.join(PATIENCE)
    assert ended == ["LinkLost"] * 6


def test_killed_clients_leave_nothing_with_the_server(server, connect):
    server.start()
    connect()
    store(connect().link(), hashes_of(9, 2), 3)
    wait_until(lambda: server.gauges()["clients"] == 2)
    before = server.gauges()
    for _ in range(10):
        child = subprocess.Popen(
            [sys.executable, "-c", DOOMED, str(server.address.port)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "holding 5 cells and a ticket\n"
        assert server.gauges()["cells_reserved"] == 5
        assert server.gauges()["tickets"] == 1
        child.kill()
        child.communicate()
        wait_until(lambda: server.gauges() == before)


DOOMED = """
import sys, time
from lmcache.core.client import Client, Engine, ServerAddress
from lmcache.core.keys import ChainHasher, chain_root
from lmcache.core.protocol import Role
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

geometry = Geometry((KVGroup(GroupKind.FULL, 16, (4096,)),))
client = Client(ServerAddress(port=int(sys.argv[1])), Engine({"model": "m"}, geometry, Role.WORKER))
client.start(10)
link = client.link()
hashes = ChainHasher(chain_root({"salt": "doomed"}), 64).extend_to([1] * 320)
reserved = link.reserve("", b"", hashes, 0, 0)
stored = ChainHasher(chain_root({}), 64).extend_to([9] * 128)
assert link.lookup("", stored, 127).wait().ticket
print("holding", len(reserved.cells) // 4, "cells and a ticket", flush=True)
time.sleep(600)
"""


# ------------------------------------------------------------------------------------------------------------- refusals


def test_an_engine_that_is_refused_hears_why_once_and_may_go_on(server, connect):
    server.start("--chunk-size", "100")
    heard: list[ProtocolError] = []
    client = connect(on_refused=heard.append)
    wait_until(lambda: client.refusal is not None)
    time.sleep(0.5)  # several attempts later
    assert [str(error) for error in heard] == [str(client.refusal)]
    assert str(client.refusal).startswith(
        "chunk size 100 is not a multiple of 16, the tokens per block of KV group 0 of m; use "
    )
    with pytest.raises(ServerUnavailable):
        client.link()
    server.kill()
    server.start()
    wait_until(lambda: linked(client))
    assert client.refusal is None


def test_an_engine_whose_chunks_could_never_be_loaded_is_refused(server, connect):
    server.start()
    huge = Geometry((KVGroup(GroupKind.FULL, 16, (16 << 20,)),))
    client = connect(geometry=huge)
    wait_until(lambda: client.refusal is not None)
    assert str(client.refusal) == (
        "a chunk of 64 tokens of m takes 4096 cells of 16 KiB over all ranks, and L1 has 4096; give L1 at least "
        "0.125 GB with --l1-size-gb, or smaller cells with --l1-cell-kb"
    )


def test_closing_while_the_server_does_not_answer_ends_the_thread(server, connect):
    server.start()
    server.signal(signal.SIGSTOP)
    client = connect()
    client.close()
    client.close()
    assert not any(thread.name == "lmcache-client" for thread in threading.enumerate())
    with contextlib.suppress(ProcessLookupError):
        server.signal(signal.SIGCONT)
