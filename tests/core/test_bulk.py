"""The bulk channel against a real server: keys, rights, malformed messages, and who leaves."""

import contextlib
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zmq
from bulk_stand import RawBulk
from core_stand import (
    CELL,
    CHUNK,
    FACTS,
    GEOMETRY,
    PATIENCE_S,
    SETTINGS,
    RunningServer,
    ServerProcess,
    prompt,
    wait_until,
)

from lmcache.core.cells import unpack_cells
from lmcache.core.client import Client, ClientSettings, Engine, ServerAddress
from lmcache.core.control import Control
from lmcache.core.curve import new_keys, read_client_keys, read_server_keys
from lmcache.core.link import Link
from lmcache.core.protocol import (
    PROTOCOL,
    Abort,
    Commit,
    Contents,
    Done,
    Error,
    ErrorCode,
    Found,
    Lookup,
    Open,
    Opened,
    Ping,
    Read,
    Register,
    Reserve,
    Reserved,
    Role,
    Write,
    Written,
    encode,
)
from lmcache.core.remote_link import RemoteLink
from lmcache.errors import ConfigError, LinkLost, ServerUnavailable

Serve = Callable[..., RunningServer]
WORKER = Engine(FACTS, GEOMETRY, Role.WORKER)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    new_keys(tmp_path / "keys")
    return str(tmp_path / "keys")


@pytest.fixture
def other_keys(tmp_path: Path) -> str:
    new_keys(tmp_path / "others")
    return str(tmp_path / "others")


@pytest.fixture
def remote() -> Iterator[Callable[..., RemoteLink]]:
    """Register over the bulk channel of a server; links are closed at the end."""
    with contextlib.ExitStack() as made:

        def register(server: RunningServer, engine: Engine = WORKER, deadline: float = PATIENCE_S) -> RemoteLink:
            where = ServerAddress(server.server.config.host, server.server.bulk_port)
            link = RemoteLink.register_at(where, None, engine, deadline)
            made.callback(link.close)
            return link

        yield register


Remote = Callable[..., RemoteLink]


def store(link: Link, hashes: list[bytes], text: bytes) -> None:
    """Store chunks whose every byte is one of `text`."""
    reply = link.reserve("", b"", b"".join(hashes), 0, 0)
    cells = unpack_cells(reply.cells)
    assert len(cells) == len(text)
    with link.copying() as arena:
        for cell, byte in zip(cells, text, strict=True):
            arena[cell * CELL : (cell + 1) * CELL] = bytes([byte]) * CELL
    link.commit(reply.reservation)
    link.drain(PATIENCE_S)


def load(link: Link, hashes: list[bytes]) -> bytes:
    """One byte of each chunk, every byte of which has been looked at."""
    found = wait_until(lambda: link.lookup("", b"".join(hashes), len(hashes) * CHUNK).wait())
    opened = link.open(found.ticket)
    text = b""
    with link.copying() as arena:
        for cell in unpack_cells(opened.cells[0]):
            (byte,) = set(bytes(arena[cell * CELL : (cell + 1) * CELL]))
            text += bytes([byte])
    assert link.confirm(found.ticket)
    return text


def held(server: RunningServer) -> int:
    return server.gauge("reservations") + server.gauge("tickets") + server.gauge("clients")


# --------------------------------------------------------------------------------------------------------------- bytes


def test_what_one_host_stores_another_loads(serve: Serve, remote: Remote) -> None:
    server = serve(insecure=True)
    one, other = remote(server), remote(server)
    store(one, prompt(1, 3), b"abc")
    wait_until(lambda: server.counter("shards_committed") == 3)
    assert load(other, prompt(1, 3)) == b"abc"
    assert (server.counter("bulk_bytes_in"), server.counter("bulk_bytes_out")) == (3 * CELL, 3 * CELL)
    assert server.counter("bulk_messages_malformed") == 0


def test_engines_of_both_kinds_share_a_cache(serve: Serve, remote: Remote) -> None:
    server = serve(insecure=True)
    with Control(server.address, PATIENCE_S) as control:
        local = Link.register(control.hello().socket, WORKER, PATIENCE_S)
    store(local, prompt(1, 2), b"xy")
    away = remote(server)
    assert load(away, prompt(1, 2)) == b"xy"
    store(away, prompt(2, 2), b"uv")
    wait_until(lambda: server.counter("shards_committed") == 4)
    assert load(local, prompt(2, 2)) == b"uv"
    local.close()


def test_cells_larger_than_a_message_travel_in_pieces(serve: Serve, remote: Remote) -> None:
    large = 3 << 20
    server = serve(insecure=True, cell_bytes=large, l1_bytes=8 * large)
    link = remote(server)
    reply = link.reserve("", b"", b"".join(prompt(1, 1)), 0, 0)
    (cell,) = unpack_cells(reply.cells)
    with link.copying() as arena:
        arena[cell * large : cell * large + CELL] = os.urandom(CELL)
        sent = bytes(arena[cell * large : cell * large + CELL])
    link.commit(reply.reservation)
    wait_until(lambda: server.counter("shards_committed") == 1)
    found = link.lookup("", b"".join(prompt(1, 1)), CHUNK).wait()
    opened = link.open(found.ticket)
    with link.copying() as arena:
        (cell,) = unpack_cells(opened.cells[0])
        assert bytes(arena[cell * large : cell * large + CELL]) == sent
    assert server.counter("bulk_bytes_in") == CELL  # the rest of the cell is not used


def test_a_mirror_holds_only_what_is_under_way(serve: Serve, remote: Remote) -> None:
    server = serve(insecure=True)
    link = remote(server)
    mirror = link._carrier.mirror
    assert mirror is not None
    store(link, prompt(1, 3), b"abc")
    wait_until(lambda: mirror.held == 0)
    reply = link.reserve("", b"", b"".join(prompt(2, 2)), 0, 0)
    assert mirror.held == 2
    link.abort(reply.reservation)
    assert mirror.held == 0
    wait_until(lambda: server.counter("shards_committed") == 3)
    found = [link.lookup("", b"".join(prompt(1, 3)), 3 * CHUNK).wait() for _ in range(2)]
    for each in found:
        link.open(each.ticket)
    assert mirror.held == 6  # each has places of its own: neither hears of the other's end
    assert link.confirm(found[0].ticket)
    assert mirror.held == 3  # the other ticket's load may still be copying
    with link.copying() as arena:
        assert bytes(arena[:1]) != b"\0"
    assert link.confirm(found[1].ticket)
    assert mirror.held == 0


def test_nothing_is_reserved_while_too_much_waits_to_be_sent(
    serve: Serve, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache.core.remote_link.SENDING_BYTES", 2 * CELL)
    server = serve(insecure=True)
    link = remote(server)
    first = link.reserve("", b"", b"".join(prompt(1, 5)), 0, 0)
    assert len(first.placed) == 2  # the leading run that may wait
    second = link.reserve("", b"", b"".join(prompt(2, 1)), 0, 0)
    assert (second.reservation, second.placed) == (0, b"")
    link.commit(first.reservation)
    link.drain(PATIENCE_S)
    assert len(link.reserve("", b"", b"".join(prompt(2, 1)), 0, 0).placed) == 1


# ---------------------------------------------------------------------------------------------------------------- keys


def test_keys_are_files_for_their_owner_alone_and_are_never_overwritten(tmp_path: Path) -> None:
    files = new_keys(tmp_path / "new")
    assert [file.name for file in files] == ["server.key", "client.key"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    before = [file.read_text() for file in files]
    with pytest.raises(ConfigError, match="is there already"):
        new_keys(tmp_path / "new")
    assert [file.read_text() for file in files] == before


def test_secrets_are_not_shown(keys: str) -> None:
    server, client = read_server_keys(keys), read_client_keys(keys)
    assert client is not None
    assert server.secret.decode() not in repr(server)
    assert client.secret.decode() not in repr(client)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory; make keys with `lmcache keys new FOLDER`"),
        ("", "holds the keys of nothing known, and those of a client are needed; give client.key of the same folder"),
        ("role = client\nsecret = short\n", "has a line that is no key; make new ones"),
        ("role = client\n", "has 0 lines `server = …`, and needs one"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "client.key"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_client_keys(str(file))
    assert message in str(error.value)
    assert "short" not in str(error.value)


def test_the_wrong_file_of_a_folder_is_refused_by_what_it_is(keys: str) -> None:
    with pytest.raises(ConfigError, match="holds the keys of a server, and those of a client are needed"):
        read_client_keys(f"{keys}/server.key")
    with pytest.raises(ConfigError, match="holds the keys of a client, and those of a server are needed"):
        read_server_keys(f"{keys}/client.key")


@pytest.mark.parametrize(
    ("servers", "clients", "says"),
    [
        ("keys", "", "if it wants keys, give its client.key"),
        ("keys", "other_keys", "is no lmcache server with the keys that"),
        ("", "keys", "is no lmcache server with the keys that"),
        ("keys", "stranger", "knows no client with the keys in"),
    ],
)
def test_who_lacks_the_right_keys_is_refused_on_both_ports_and_told_so(
    serve: Serve, keys: str, other_keys: str, tmp_path: Path, servers: str, clients: str, says: str
) -> None:
    """A stranger knows the server's public key and has a pair of its own."""
    folders = {"": "", "keys": keys, "other_keys": other_keys, "stranger": str(tmp_path / "stranger.key")}
    text = Path(keys, "client.key").read_text().splitlines()
    pair = Path(other_keys, "client.key").read_text().splitlines()
    Path(folders["stranger"]).write_text("\n".join([text[1], text[2], pair[3], pair[4]]))
    server = serve(**({"keys": folders[servers]} if servers else {"insecure": True}), backed=False)
    mine = read_client_keys(folders[clients]) if clients else None
    with Control(server.address, PATIENCE_S, mine) as control, pytest.raises(ServerUnavailable) as error:
        control.ping()
    assert says in str(error.value)
    where = ServerAddress(server.server.config.host, server.server.bulk_port)
    with pytest.raises(ServerUnavailable) as error:
        RemoteLink.register_at(where, mine, WORKER, PATIENCE_S)
    assert says in str(error.value)
    with Control(server.address, PATIENCE_S, read_client_keys(folders[servers]) if servers else None) as control:
        if servers and clients:  # where one side has none, either may hang up first, as who only looks at the port does
            wait_until(lambda: control.status()["counters"]["peers_refused"] >= 2)
        assert control.status()["gauges"]["clients"] == 0


def test_who_only_looks_whether_the_port_is_open_is_not_counted(serve: Serve, keys: str) -> None:
    server = serve(keys=keys, backed=False)
    mine = read_client_keys(keys)
    for _ in range(3):
        with Control(server.address, PATIENCE_S, mine) as control:
            control.ping()  # which looks first
    with Control(server.address, PATIENCE_S, mine) as control:
        assert control.status()["counters"]["peers_refused"] == 0


def test_a_client_with_keys_goes_over_the_unix_socket_where_it_can(serve: Serve, keys: str) -> None:
    server = serve(keys=keys, backed=False)
    client = Client(server.address, WORKER, ClientSettings(deadline=5.0, keys=keys))
    client.start(PATIENCE_S)
    assert type(client.link()) is Link
    client.close()


# ------------------------------------------------------------------------------------------------- malformed, and fuzz


@pytest.fixture
def raw_bulk() -> Iterator[Callable[[RunningServer], RawBulk]]:
    with contextlib.ExitStack() as opened:

        def connect(server: RunningServer) -> RawBulk:
            made = RawBulk(server)
            opened.callback(made.close)
            return made

        yield connect


Raw = Callable[[RunningServer], RawBulk]


def checksum(contents: bytes) -> int:
    return xxhash.xxh3_64_intdigest(contents)


def reserve(peer: RawBulk, number: int, chunks: int = 2) -> tuple[int, tuple[int, ...]]:
    reply = peer.ask(Reserve(2, "", b"", b"".join(prompt(number, chunks)), 0, 0))
    assert isinstance(reply, Reserved)
    return reply.reservation, unpack_cells(reply.cells)


FULL = bytes(range(256)) * (CELL // 256)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda r, cell, _: (Write(3, r, cell, 0, checksum(FULL) ^ 1), FULL),  # other bytes than were meant
        lambda r, cell, _: (Write(3, r, cell, 0, checksum(FULL)),),  # none at all
        lambda r, cell, _: (Write(3, r, cell, 0, checksum(b"")), b""),
        lambda r, cell, _: (Write(3, r, cell, 1, checksum(FULL[1:])), FULL[1:]),  # a hole
        lambda r, cell, _: (Write(3, r, cell, 0, checksum(FULL + b"x")), FULL + b"x"),  # beyond the cell
        lambda r, cell, _: (Write(3, r, cell, -1, checksum(FULL)), FULL),
        lambda r, _, others: (Write(3, r, others, 0, checksum(FULL)), FULL),  # another client's cell
        lambda r, _, __: (Write(3, r, 1 << 40, 0, checksum(FULL)), FULL),
        lambda r, cell, _: (Write(3, r + 1, cell, 0, checksum(FULL)), FULL),  # no reservation of its
        lambda r, _, __: (Commit(3, r),),  # of what has not been written
        lambda r, cell, _: (Write(3, r, cell, 0, checksum(FULL)), FULL, FULL),
        lambda r, _, __: (Abort(3, r), b"bytes"),
        lambda _, __, ___: (b"\xc1 no message",),
    ],
)
def test_who_breaks_a_rule_of_writing_loses_the_link_and_nobody_else_anything(
    serve: Serve, remote: Remote, raw_bulk: Raw, wrong: Callable[..., tuple[Any, ...]]
) -> None:
    server = serve(insecure=True)
    honest = remote(server)
    begun = honest.reserve("", b"", b"".join(prompt(9, 1)), 0, 0)
    (cell,) = unpack_cells(begun.cells)
    peer = raw_bulk(server)
    peer.register()
    reservation, cells = reserve(peer, 1)
    peer.send(*wrong(reservation, cells[0], cell))
    reply, _ = peer.receive()
    assert isinstance(reply, Error)
    assert (reply.id, reply.code) == (0, ErrorCode.MALFORMED)
    assert peer.receive()[0] is None
    wait_until(lambda: server.gauge("reservations") == 1)
    assert server.counter("bulk_messages_malformed") == 1
    with honest.copying() as arena:
        arena[cell * CELL : (cell + 1) * CELL] = b"h" * CELL
    honest.commit(begun.reservation)
    wait_until(lambda: server.counter("shards_committed") == 1)
    assert load(honest, prompt(9, 1)) == b"h"


def test_a_whole_conversation_by_hand(serve: Serve, raw_bulk: Raw) -> None:
    server = serve(insecure=True)
    peer = raw_bulk(server)
    registered = peer.register()
    reservation, cells = reserve(peer, 1)
    for cell in cells:
        half = CELL // 2
        assert isinstance(peer.ask(Write(3, reservation, cell, 0, checksum(FULL[:half])), FULL[:half]), Written)
        assert isinstance(peer.ask(Write(4, reservation, cell, half, checksum(FULL[half:])), FULL[half:]), Written)
    assert isinstance(peer.ask(Commit(5, reservation)), Done)
    found = peer.ask(Lookup(6, "", b"".join(prompt(1, 2)), 2 * CHUNK))
    assert isinstance(found, Found)
    assert found.tokens == 2 * CHUNK
    opened = peer.ask(Open(7, found.ticket, registered.epoch))
    assert isinstance(opened, Opened)
    for wrong in (
        Read(8, found.ticket + 1, cells[0], 0, CELL),
        Read(8, found.ticket, 63, 0, CELL),
        Read(8, found.ticket, cells[0], 1, CELL),
        Read(8, found.ticket, cells[0], -1, 10),
        Read(8, found.ticket, cells[0], 0, 0),
    ):
        reply = peer.ask(wrong)
        assert isinstance(reply, Error)
        assert (reply.id, reply.code) == (8, ErrorCode.STALE)
    peer.send(Read(9, found.ticket, cells[1], 10, 100))
    reply, (contents,) = peer.receive()
    assert isinstance(reply, Contents)
    assert (contents, reply.checksum) == (FULL[10:110], checksum(FULL[10:110]))


def test_a_stranger_to_the_protocol_gets_an_error_and_no_connection(serve: Serve, raw_bulk: Raw) -> None:
    server = serve(insecure=True)
    peer = raw_bulk(server)
    for message in (Ping(1), Commit(2, 3), Read(4, 1, 1, 0, 1), b"nonsense"):
        peer.send(message)
        reply, _ = peer.receive()
        assert isinstance(reply, Error)
        assert reply.id == 0
    assert server.counter("bulk_messages_malformed") == 4
    assert peer.register().cell_bytes == CELL


def test_any_bytes_hurt_nobody(serve: Serve, remote: Remote, raw_bulk: Raw) -> None:
    server = serve(insecure=True)
    store(remote(server), prompt(1, 2), b"ab")
    wait_until(lambda: server.counter("shards_committed") == 2)
    chance = random.Random(7)
    samples = [
        encode(Write(1, 2, 3, 4, 5)),
        encode(Read(1, 2, 3, 4, 5)),
        encode(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0)),
        encode(Commit(1, 2)),
        encode(Reserve(1, "", b"", bytes(16), 0, 0)),
    ]
    for _ in range(30):
        peer = raw_bulk(server)
        for _ in range(10):
            body = bytearray(chance.choice(samples))
            for _ in range(chance.randrange(3)):
                body[chance.randrange(len(body))] = chance.randrange(256)
            peer.send(bytes(body), *[chance.randbytes(chance.randrange(CELL)) for _ in range(chance.randrange(3))])
        peer.close()
    wait_until(lambda: server.gauge("clients") <= 1)
    assert load(remote(server), prompt(1, 2)) == b"ab"
    assert server.counter("internal_errors") == 0


# -------------------------------------------------------------------------------------------------------- who leaves


def test_what_a_client_held_is_freed_when_it_leaves(serve: Serve, remote: Remote) -> None:
    server = serve(insecure=True)
    link = remote(server)
    store(link, prompt(1, 2), b"ab")
    wait_until(lambda: server.counter("shards_committed") == 2)
    link.reserve("", b"", b"".join(prompt(2, 2)), 0, 0)
    found = link.lookup("", b"".join(prompt(1, 2)), 2 * CHUNK).wait()
    link.open(found.ticket)
    assert held(server) == 3
    link.close()
    wait_until(lambda: held(server) == 0)
    assert server.counter("chunks_aborted") == 2


def test_who_leaves_before_he_is_heard_is_not_taken_for_a_client(serve: Serve) -> None:
    server = serve(insecure=True)
    for number in range(150):
        peer = RawBulk(server)
        peer.socket.setsockopt(zmq.LINGER, 1000)
        peer.send(Register(1, PROTOCOL, FACTS, GEOMETRY, Role.WORKER, 0))
        peer.send(Reserve(2, "", b"", b"".join(prompt(number, 1)), 0, 0))
        peer.close()
    wait_until(lambda: server.gauge("clients") == 0)
    assert held(server) == 0


def test_a_link_ends_with_its_server_and_a_new_one_is_made(start_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "register", _out_of_reach)
    process: ServerProcess = start_process(0, "--insecure", "--bulk-port", "0")
    client = Client(process.address, WORKER, SETTINGS)
    client.start(PATIENCE_S)
    link = client.link()
    assert isinstance(link, RemoteLink)
    with link.copying() as arena:
        process.kill()
        wait_until(lambda: not link.alive)
        arena[:4] = b"safe"  # the mirror outlives the link as long as somebody copies
    assert threading.active_count() < 20
    again: ServerProcess = start_process(process.port, "--insecure", "--bulk-port", "0")
    wait_until(lambda: client._link is not None and client._link.alive)
    assert client.link().epoch == again.epoch
    client.close()


def _out_of_reach(*_: object) -> Link:
    raise LinkLost("no Unix socket of that name is in reach")
