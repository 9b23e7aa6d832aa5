"""A link against a real server, and against servers that misbehave as a real one would not."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from core_stand import CELL, CHUNK, FACTS, GEOMETRY, PATIENCE_S, RunningServer, prompt, wait_until

from lmcache.core import channel
from lmcache.core.arena import MappedArena, create_segment
from lmcache.core.cells import unpack_cells
from lmcache.core.control import Control
from lmcache.core.link import Engine, Link
from lmcache.core.pending_hit import PendingHit
from lmcache.core.protocol import (
    MAX_FRAME,
    Confirmed,
    Done,
    Error,
    ErrorCode,
    Found,
    Message,
    Placed,
    Pong,
    Registered,
    Role,
    decode_request,
    encode,
)
from lmcache.errors import DeadlineExceeded, LinkLost, ProtocolError, Refused, ServerUnavailable, VersionMismatch

WORKER = Engine(FACTS, GEOMETRY, Role.WORKER)
SCHEDULER = Engine(FACTS, GEOMETRY, Role.SCHEDULER)

Link_ = Callable[..., Link]


@pytest.fixture
def link(server: RunningServer) -> Iterator[Link_]:
    """Register links at the server; they are closed at the end."""
    with contextlib.ExitStack() as made:

        def register(engine: Engine = WORKER, deadline: float = PATIENCE_S) -> Link:
            with Control(server.address, PATIENCE_S) as control:
                address = control.hello().socket
            one = Link.register(address, engine, PATIENCE_S)
            made.callback(one.close)
            one._channel._deadline = deadline  # from now on: that it registers in time is not what is tested
            return one

        yield register


def store(worker: Link, hashes: list[bytes], text: bytes) -> None:
    """Store chunks whose every byte is one of `text`."""
    reserved = worker.reserve("", b"", b"".join(hashes), 0, 0)
    with worker.copying() as memory:
        for number, cell in enumerate(unpack_cells(reserved.cells)):
            memory[cell * CELL : (cell + 1) * CELL] = text[number : number + 1] * CELL
    worker.commit(reserved.reservation)


# ----------------------------------------------------------------------------------------------------- the real server


def test_bytes_stored_by_one_worker_are_read_by_another(server: RunningServer, link: Link_) -> None:
    p = prompt(1, 3)
    store(link(), p, b"abc")
    scheduler, worker = link(SCHEDULER), link()
    found = scheduler.lookup("", b"".join(p), 3 * CHUNK).wait()
    assert found.tokens == 3 * CHUNK
    opened = worker.open(found.ticket)
    with worker.copying() as memory:
        read = b"".join(bytes(memory[cell * CELL : (cell + 1) * CELL]) for cell in unpack_cells(opened.cells[0]))

    assert read == b"a" * CELL + b"b" * CELL + b"c" * CELL
    assert worker.confirm(found.ticket)
    assert server.gauge("tickets") == 0


def test_registering_tells_what_the_engine_has_to_know(server: RunningServer, link: Link_) -> None:
    worker, scheduler = link(), link(SCHEDULER)

    assert worker.epoch == server.server.epoch
    assert (worker.chunk_size, worker.cell_bytes) == (CHUNK, CELL)
    assert worker.namespace == scheduler.namespace
    assert len(worker.namespace) == 16


def test_a_lookup_is_polled_and_never_waited_for(link: Link_) -> None:
    p = prompt(1, 2)
    store(link(), p, b"ab")
    pending = link(SCHEDULER).lookup("", b"".join(p), 2 * CHUNK)
    found = wait_until(pending.poll)

    assert found.tokens == 2 * CHUNK
    assert pending.poll() == found == pending.wait()


def test_what_the_server_refuses_is_raised_and_the_link_lives_on(link: Link_) -> None:
    worker = link()
    with pytest.raises(Refused) as stale:
        worker.commit(12345)
    with pytest.raises(Refused) as malformed:
        worker.reserve("", b"", b"h" * 16, 7, 0)

    assert (stale.value.code, malformed.value.code) == (ErrorCode.STALE, ErrorCode.MALFORMED)
    assert worker.alive
    assert not worker.confirm(999)


def test_a_request_that_is_too_large_is_refused_here_and_the_link_lives_on(link: Link_) -> None:
    scheduler = link(SCHEDULER)
    with pytest.raises(Refused, match="are allowed; ask for fewer chunks at once"):
        scheduler.lookup("", bytes(MAX_FRAME), 1)

    assert scheduler.lookup("", b"h" * 16, 16).wait().tokens == 0


def test_a_lookup_of_more_chunks_than_are_allowed_is_refused_and_the_link_goes_on(link: Link_) -> None:
    scheduler = link(SCHEDULER)
    with pytest.raises(Refused, match="65537 chunks in one request; 65536 are allowed"):
        scheduler.lookup("", os.urandom(16 * 65537), 1 << 40).wait()
    assert scheduler.lookup("", os.urandom(16), 1 << 20).wait().tokens == 0


def test_the_largest_lookup_is_answered(link: Link_) -> None:
    """It does not fit the socket's buffer: sending goes on while the answer is polled for."""
    scheduler = link(SCHEDULER)
    pending = scheduler.lookup("", os.urandom(16 * 65536), 1 << 40)

    assert wait_until(pending.poll).tokens == 0


def test_a_burst_of_lookups_from_one_thread_loses_none(link: Link_) -> None:
    p = prompt(1, 2)
    store(link(), p, b"ab")
    scheduler = link(SCHEDULER)
    long_tail = os.urandom(16 * 4000)
    burst = [scheduler.lookup("", b"".join(p) + long_tail, 1 << 40) for _ in range(64)]

    assert [pending.wait().tokens for pending in burst] == [2 * CHUNK] * 64
    assert scheduler.alive


def test_many_threads_share_one_link_and_each_gets_its_own_answer(server: RunningServer, link: Link_) -> None:
    worker = link()
    wrong: list[str] = []

    def work(thread: int) -> None:
        for turn in range(40):
            p = prompt(1000 * (thread + 1) + turn, 1)
            reserved = worker.reserve("", b"", p[0], 0, 0)
            if reserved.placed != bytes([Placed.GRANTED]):
                wrong.append(f"thread {thread} turn {turn}: {reserved}")
            worker.abort(reserved.reservation)
            if worker.confirm(thread):
                wrong.append("a ticket that nobody has")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert server.gauge("cells_used") == 0


def test_answers_that_nobody_waits_for_do_not_pile_up(link: Link_) -> None:
    scheduler = link(SCHEDULER)
    for ticket in range(500):
        scheduler.drop(ticket)

    def settled() -> bool:
        scheduler.tend()
        return not scheduler._channel._pending

    wait_until(settled)


def test_a_scheduler_gets_no_memory(link: Link_) -> None:
    with pytest.raises(LinkLost, match="only workers map it"), link(SCHEDULER).copying():
        pass


def test_closing_frees_what_was_reserved_and_is_idempotent(server: RunningServer, link: Link_) -> None:
    worker = link()
    worker.reserve("", b"", b"h" * 16, 0, 0)
    assert server.gauge("cells_reserved") == 1
    worker.close()
    worker.close()

    wait_until(lambda: server.gauge("clients") == 0)
    assert server.gauge("cells_used") == 0
    assert not worker.alive
    assert worker.fileno() == -1
    for call in (lambda: worker.commit(1), lambda: worker.open(1), lambda: worker.lookup("", b"", 1)):
        with pytest.raises(LinkLost, match="the link to the server has ended: the link was closed"):
            call()
    with pytest.raises(LinkLost), worker.copying():
        pass


def test_a_copy_in_flight_keeps_its_bytes_mapped_and_its_cells_quarantined(server: RunningServer, link: Link_) -> None:
    worker = link()
    reserved = worker.reserve("", b"", b"h" * 16, 0, 0)
    (cell,) = unpack_cells(reserved.cells)
    with worker.copying() as memory:
        worker.close()
        assert not worker.alive
        memory[cell * CELL : (cell + 1) * CELL] = b"x" * CELL  # would be a segmentation fault if it were unmapped
        assert server.gauge("cells_reserved") == 1
        assert server.gauge("clients") == 1
        assert worker.fileno() != -1

    assert worker.fileno() == -1
    wait_until(lambda: server.gauge("cells_reserved") == 0)
    assert server.gauge("cells_used") == 0


def test_the_last_of_several_copies_unmaps_the_arena(link: Link_) -> None:
    worker = link()
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(worker.copying())
        memory = second.enter_context(worker.copying())
        worker.close()
        first.close()
        assert memory[0:1] == b"\0"
        second.close()

    assert worker.fileno() == -1


def test_the_server_hears_of_the_end_only_when_the_arena_is_unmapped() -> None:
    """The end of the connection frees the cells for others, so nothing here may touch them any more."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    segment = create_segment(16 * CELL)
    with theirs:
        link = Link(ours, PATIENCE_S)
        link._arena = arena = MappedArena(segment, 16 * CELL)
        os.close(segment)
        unmap = arena.close
        heard: list[bytes] = []

        def watched() -> None:
            theirs.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                heard.append(theirs.recv(1))
            unmap()
            with contextlib.suppress(BlockingIOError):
                heard.append(theirs.recv(1))

        arena.close = watched  # type: ignore[method-assign]
        link.close()

        assert heard == []
        assert theirs.recv(1) == b""


def test_a_view_kept_beyond_its_block_does_not_keep_the_link(server: RunningServer, link: Link_) -> None:
    worker = link()
    with worker.copying() as memory:
        kept = memory[0:CELL]
        worker.close()

    assert worker.fileno() == -1
    assert kept[0] == 0  # its pages live as long as it does
    kept.release()


def test_a_stopped_server_costs_the_deadline_once_and_then_nothing(link: Link_, server: RunningServer) -> None:
    """The server's thread is held up; the link gives up at its deadline, and every later call fails at once."""
    worker = link(deadline=0.2)
    held_up, go = threading.Event(), threading.Event()
    real = server.server._retry_parked

    def hold_up() -> None:
        held_up.set()
        go.wait(PATIENCE_S)
        real()

    server.server._retry_parked = hold_up  # type: ignore[method-assign]
    server.server.wake()
    assert held_up.wait(PATIENCE_S)
    try:
        with pytest.raises(DeadlineExceeded, match=r"the server did not answer within 0\.2 s"):
            worker.confirm(1)
        with pytest.raises(LinkLost, match="the link to the server has ended: the server did not answer within"):
            worker.confirm(1)
    finally:
        server.server._retry_parked = real  # type: ignore[method-assign]
        go.set()
    assert isinstance(DeadlineExceeded("x"), ServerUnavailable)
    assert isinstance(LinkLost("x"), ServerUnavailable)


# ----------------------------------------------------------------------------------------------- servers that misbehave


class Peer:
    """A server of the test's own: accepts one connection and does what it is told."""

    def __init__(self, play: "Callable[[Peer], None]", answer_register: bool = True) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("\0lmcache-test-" + os.urandom(6).hex())
        self.listener.listen(1)
        self.address = "@" + self.listener.getsockname()[1:].decode()
        self.segment = create_segment(16 * CELL)
        self._play = play
        self._answer_register = answer_register
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="peer")
        self.thread.start()

    def _run(self) -> None:
        try:
            self.socket, _ = self.listener.accept()
            self.socket.settimeout(PATIENCE_S)
            with self.socket:
                if self._answer_register:
                    request = self.read()
                    self.write(Registered(request.id, "e", b"n" * 16, CHUNK, CELL, 16 * CELL), self.segment)
                self._play(self)
        except BaseException as error:  # noqa: BLE001 - the test shall hear of it
            self.failure = error

    def read(self) -> Message:
        header = self.exactly(4)
        return decode_request(self.exactly(struct.unpack("<I", header)[0]))

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            assert part, "the link was closed"
            data += part
        return data

    def write(self, message: Message, *descriptors: int) -> None:
        body = encode(message)
        socket.send_fds(self.socket, [struct.pack("<I", len(body)) + body], descriptors)

    def until_closed(self) -> None:
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join(PATIENCE_S)
        self.listener.close()
        os.close(self.segment)
        if self.failure:
            raise self.failure


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    with contextlib.ExitStack() as made:

        def make(play: Callable[[Peer], None], **how: bool) -> Peer:
            one = Peer(play, **how)
            made.callback(one.close)
            return one

        yield make


@pytest.fixture
def linked(peer: Callable[..., Peer]) -> Iterator[Callable[..., Link]]:
    """A worker's link to a server that plays what it is told once the worker has registered."""
    with contextlib.ExitStack() as made:

        def make(play: Callable[[Peer], None], deadline: float = PATIENCE_S) -> Link:
            link = Link.register(peer(play).address, WORKER, PATIENCE_S)
            made.callback(link.close)
            link._channel._deadline = deadline  # as above
            return link

        yield make


Linked = Callable[..., Link]


def test_answers_may_come_in_any_order(linked: Linked) -> None:
    def play(peer: Peer) -> None:
        requests = [peer.read() for _ in range(3)]
        for request in reversed(requests):
            peer.write(Found(request.id, 0, request.limit))  # type: ignore[attr-defined]
        peer.until_closed()

    link = linked(play)
    pending = [link.lookup("", b"", limit) for limit in (16, 32, 48)]

    assert [each.wait().tokens for each in pending] == [16, 32, 48]


def test_an_answer_that_comes_byte_by_byte_is_put_together(linked: Linked) -> None:
    def play(peer: Peer) -> None:
        request = peer.read()
        body = encode(Confirmed(request.id, True))
        for byte in struct.pack("<I", len(body)) + body:
            peer.socket.sendall(bytes([byte]))
        peer.until_closed()

    assert linked(play).confirm(1)


def test_a_thread_whose_answer_has_come_goes_on_while_another_still_waits(linked: Linked) -> None:
    """One thread reads for both; the one that is answered first must not wait for the other's answer."""
    first_done = threading.Event()

    def play(peer: Peer) -> None:
        slow, quick = peer.read(), peer.read()
        peer.write(Confirmed(quick.id, True))
        assert first_done.wait(PATIENCE_S)
        peer.write(Confirmed(slow.id, True))
        peer.until_closed()

    link = linked(play)
    answers: list[str] = []
    slow = threading.Thread(target=lambda: answers.append(f"slow {link.confirm(1)}"))
    slow.start()
    wait_until(lambda: link._channel._reader is not None, "somebody reads")

    def quickly() -> None:
        answers.append(f"quick {link.confirm(2)}")
        first_done.set()

    quick = threading.Thread(target=quickly)
    quick.start()
    quick.join(PATIENCE_S)
    slow.join(PATIENCE_S)

    assert answers == ["quick True", "slow True"]


def test_the_end_of_the_server_fails_every_request_in_flight(linked: Linked) -> None:
    def play(peer: Peer) -> None:
        for _ in range(3):
            peer.read()

    link = linked(play)
    pending = [link.lookup("", b"", 16) for _ in range(3)]
    for each in pending:
        with pytest.raises(LinkLost, match="the server ended the link"):
            each.wait()
        with pytest.raises(LinkLost):
            each.poll()


def test_a_poll_with_patience_waits_for_its_own_answer_and_no_longer(linked: Linked) -> None:
    go = threading.Event()

    def play(peer: Peer) -> None:
        first, second = peer.read(), peer.read()
        peer.write(Found(first.id, 7, 16))
        assert go.wait(PATIENCE_S)
        peer.write(Found(second.id, 8, 16))
        peer.until_closed()

    link = linked(play)
    first, second = link.lookup("", b"", 16), link.lookup("", b"", 16)
    # the first one's answer comes meanwhile
    assert second.poll(0.3) is None
    threading.Timer(0.05, go.set).start()
    found = second.poll(PATIENCE_S)
    assert found is not None
    assert found.ticket == 8
    answered = first.poll()
    assert answered is not None
    assert answered.ticket == 7


def test_giving_up_in_one_thread_ends_the_wait_of_another_even_while_a_copy_is_in_flight(linked: Linked) -> None:
    link = linked(lambda peer: peer.until_closed())
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            link.confirm(1)
        except ServerUnavailable as error:
            failed.append(error)

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    with link.copying():
        for thread in waiting:
            thread.start()
        wait_until(lambda: len(link._channel._pending) == 3)
        link.close()
        for thread in waiting:
            thread.join(PATIENCE_S)

    assert [type(error) for error in failed] == [LinkLost] * 3


def test_a_late_answer_is_never_taken_for_anothers(linked: Linked) -> None:
    """The request that timed out broke the link; its answer goes nowhere."""
    go = threading.Event()

    def play(peer: Peer) -> None:
        request = peer.read()
        assert go.wait(PATIENCE_S)
        with contextlib.suppress(OSError):
            peer.write(Confirmed(request.id, True))
            peer.until_closed()

    link = linked(play, deadline=0.2)
    with pytest.raises(DeadlineExceeded):
        link.confirm(1)
    go.set()

    with pytest.raises(LinkLost):
        link.confirm(2)


def test_a_poll_past_the_deadline_raises_and_breaks_the_link(linked: Linked) -> None:
    link = linked(lambda peer: peer.until_closed(), deadline=0.1)
    pending = link.lookup("", b"", 16)

    def given_up() -> bool:
        try:
            return pending.poll() is not None
        except DeadlineExceeded:
            return True

    wait_until(given_up)
    assert not link.alive


def test_an_answer_that_came_in_time_counts_though_it_is_looked_at_late(linked: Linked) -> None:
    """An engine that was stopped for longer than the deadline finds its answers."""
    answered = threading.Event()

    def play(peer: Peer) -> None:
        for _ in range(2):
            request = peer.read()
            peer.write(Found(request.id, 7, 16))
        answered.set()
        peer.until_closed()

    link = linked(play)
    polled, waited = link.lookup("", b"", 16), link.lookup("", b"", 16)
    assert answered.wait(PATIENCE_S)
    polled._deadline = waited._deadline = 0.0

    assert waited.wait().ticket == 7
    found = polled.poll()
    assert found is not None
    assert found.ticket == 7
    assert link.alive


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(b"\xff\xff\xff\xff", "the server sent a frame of 4294967295 bytes", id="an endless frame"),
        pytest.param(b"\x05\0\0\0hello", "5 bytes that are no message of protocol", id="no message"),
        pytest.param(b"\0\0\0\0", "0 bytes that are no message of protocol", id="an empty message"),
        pytest.param(
            struct.pack("<I", len(encode(Done(4711)))) + encode(Done(4711)),
            "the server answered request 4711, which nobody sent",
            id="an answer to nobody",
        ),
        pytest.param(
            struct.pack("<I", len(encode(Error(0, "malformed", "cannot read that", "speak up"))))
            + encode(Error(0, "malformed", "cannot read that", "speak up")),
            "cannot read that; speak up",
            id="an error about bytes that it could not read",
        ),
    ],
)
def test_bytes_that_are_no_answer_break_the_link_and_say_why(linked: Linked, answer: bytes, why: str) -> None:
    def play(peer: Peer) -> None:
        peer.read()
        peer.socket.sendall(answer)
        peer.until_closed()

    link = linked(play)
    with pytest.raises(LinkLost) as error:
        link.confirm(1)
    assert why in str(error.value)
    assert not link.alive


def test_an_answer_of_the_wrong_kind_breaks_the_link(linked: Linked) -> None:
    def play(peer: Peer) -> None:
        peer.write(Pong(peer.read().id, "e"))
        peer.until_closed()

    link = linked(play)
    with pytest.raises(LinkLost, match="the server sent Pong in answer to a request for Confirmed"):
        link.confirm(1)
    assert not link.alive


def test_a_server_that_never_reads_costs_a_bounded_amount_of_memory(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_UNSENT", 1 << 20)
    done = threading.Event()
    link = linked(lambda peer: done.wait(PATIENCE_S) and None)

    def flood() -> None:
        for _ in range(100):
            link.lookup("", bytes(1 << 16), 1)

    with pytest.raises(LinkLost, match="bytes of requests unread"):
        flood()
    done.set()

    assert not link.alive


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (lambda i: Error(i, ErrorCode.GEOMETRY, "bad", "mend it"), Refused, "bad; mend it"),
        (lambda i: Error(i, ErrorCode.VERSION, "old", "update"), VersionMismatch, "old; update"),
        (
            lambda i: Registered(i, "e", b"n", 16, CELL, 1 << 40),
            ProtocolError,
            "an arena of 4096 bytes and said 1099",
        ),
        (lambda i: Registered(i, "e", b"n", 16, CELL, 0), ProtocolError, "an arena of 4096 bytes and said 0"),
    ],
)
def test_a_registration_that_fails_leaves_nothing_behind(
    peer: Callable[..., Peer], answer: Callable[[int], Message], error: type[Exception], words: str
) -> None:
    def play(peer: Peer) -> None:
        # a page of shared memory that is not an arena of the size told
        memory = os.memfd_create("small")
        os.ftruncate(memory, CELL)
        peer.write(answer(peer.read().id), memory)
        os.close(memory)
        peer.until_closed()

    with pytest.raises(error) as raised:
        Link.register(peer(play, answer_register=False).address, WORKER, PATIENCE_S)
    assert words in str(raised.value)


def test_a_worker_that_gets_no_arena_does_not_register(peer: Callable[..., Peer]) -> None:
    def play(peer: Peer) -> None:
        peer.write(Registered(peer.read().id, "e", b"n", 16, CELL, 16 * CELL))
        peer.until_closed()

    with pytest.raises(ProtocolError, match="sent no arena"):
        Link.register(peer(play, answer_register=False).address, WORKER, PATIENCE_S)


def test_an_arena_that_cannot_be_mapped_is_no_server_and_no_crash(
    peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(peer: Peer) -> None:
        peer.write(Registered(peer.read().id, "e", b"n", 16, CELL, 16 * CELL), peer.segment)
        peer.until_closed()

    def no_threads(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    address = peer(play, answer_register=False).address
    monkeypatch.setattr(threading.Thread, "start", no_threads)
    with pytest.raises(LinkLost, match="the arena of 65536 bytes cannot be mapped: can't start new thread"):
        Link.register(address, WORKER, PATIENCE_S)


def test_a_descriptor_that_nobody_asked_for_is_closed(peer: Callable[..., Peer]) -> None:
    def play(peer: Peer) -> None:
        peer.write(Registered(peer.read().id, "e", b"n", 16, CELL, 16 * CELL), peer.segment)
        peer.until_closed()

    Link.register(peer(play, answer_register=False).address, SCHEDULER, PATIENCE_S).close()


def test_nobody_at_the_address_is_said_with_the_cure() -> None:
    with pytest.raises(LinkLost) as error:
        Link.register("@lmcache-nobody-here", WORKER, 1.0)
    assert "the server's Unix socket @lmcache-nobody-here cannot be reached: [Errno 111] Connection refused" in str(
        error.value
    )
    assert "in its network namespace" in str(error.value)


# -------------------------------------------------------------------------------------------------------------- forking


FORKING = """
import os, sys, time
from lmcache.core.control import Control, ServerAddress
from lmcache.core.link import Engine, Link
from lmcache.core.protocol import Role
from lmcache.errors import LinkLost
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

geometry = Geometry((KVGroup(GroupKind.FULL, 16, (4096,)),))
with Control(ServerAddress("127.0.0.1", int(sys.argv[1])), 60.0) as control:
    address = control.hello().socket
link = Link.register(address, Engine({"model": "m"}, geometry, Role.WORKER), 10.0)
link.reserve("", b"", b"h" * 16, 0, 0)
pid = os.fork()
if pid == 0:
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    arenas = sum("lmcache-l1" in os.readlink(name) for name in names if os.path.lexists(name))
    mappings = open("/proc/self/maps").read().count("lmcache-l1")
    os.write(1, f"child {link.alive} {arenas} {mappings}\\n".encode())
    try:
        link.confirm(1)
    except LinkLost:
        os.write(1, b"lost\\n")
    sys.stdin.read()
    os._exit(0)
os.write(1, f"parent {link.confirm(1)}\\n".encode())
os.kill(os.getpid(), 9)
"""


def test_a_forked_child_neither_hides_its_parents_death_nor_keeps_the_arena(server: RunningServer) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(server.address.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        lines = sorted(parent.stdout.readline() for _ in range(3))
        assert lines == [b"child False 0 0\n", b"lost\n", b"parent False\n"]
        parent.wait()
        # the child lives, and holds neither connection nor cells
        wait_until(lambda: server.gauge("clients") == 0)
        assert server.gauge("cells_used") == 0


def test_a_pending_hit_is_what_lookup_gives(link: Link_) -> None:
    assert isinstance(link(SCHEDULER).lookup("", b"", 1), PendingHit)
