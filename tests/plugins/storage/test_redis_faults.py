"""Redis servers that die, hang, come back, are full, or hold what somebody else wrote: misses, at once, and no more."""

import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_stand import RedisServer, needs_redis

from lmcache.core.tier import TierLocation
from lmcache.errors import TierError
from lmcache.plugins.storage import redis_servers
from lmcache.plugins.storage.redis import RedisTier
from lmcache.plugins.testing.ports import free_port

pytest.importorskip("redis", reason="redis-py is not installed (extra lmcache[redis])")
pytestmark = needs_redis

KEY = hashlib.sha1(b"a").hexdigest()
OTHER = hashlib.sha1(b"b").hexdigest()
NAME = b"lmcache:" + KEY.encode()
LARGE = bytes(range(256)) * 40_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    tier = RedisTier(server.location())
    yield tier
    tier.close()


def within(seconds: float) -> float:
    return time.monotonic() + seconds


def load(tier: RedisTier, size: int = 16, seconds: float = 5) -> tuple[int, bytes]:
    buffer = bytearray(size)
    return tier.load(KEY, [memoryview(buffer)], within(seconds)), bytes(buffer)


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(TierError) as raised:
        call()
    return str(raised.value)


def once_it_answers(tier: RedisTier, key: str = KEY) -> bool:
    """What `contains` says as soon as the server is no longer left alone."""
    end = within(20)
    while True:
        try:
            return tier.contains([key], within(5))[0]
        except TierError:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_server_that_is_down_fails_every_call_and_serves_once_it_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_servers, "LEFT_ALONE_S", (5.0, 5.0))
    port = free_port()
    tier = RedisTier(TierLocation("redis", "127.0.0.1", port))
    try:
        assert "cannot be reached" in error_of(lambda: tier.store(KEY, [b"blob"], within(5)))
        told = error_of(lambda: load(tier))
        assert "is left alone for another" in told
        assert "Connection refused" in told
        server = RedisServer(tmp_path, port=port)
        try:
            assert once_it_answers(tier) is False
            tier.store(KEY, [b"blob"], within(5))
            assert load(tier) == (4, b"blob" + bytes(12))
        finally:
            server.close()
    finally:
        tier.close()


def test_a_server_that_failed_is_asked_again_later_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_servers, "LEFT_ALONE_S", (0.02, 0.2))
    tier = RedisTier(TierLocation("redis", "127.0.0.1", free_port()))
    calls = tried = 0
    end = within(1)
    while time.monotonic() < end:
        calls += 1
        tried += "is left alone" not in error_of(lambda: load(tier))
    tier.close()

    # pauses are at least three quarters of 20, 40, 80, 160, 200, 200 ms and so on
    assert 2 <= tried <= 10
    assert calls > 10 * tried


def test_a_killed_and_restarted_server_is_empty_and_serves_again(server: RedisServer, tier: RedisTier) -> None:
    tier.store(KEY, [b"blob"], within(5))
    server.kill()
    error_of(lambda: tier.contains([KEY], within(5)))
    server.start()

    assert once_it_answers(tier) is False
    tier.store(KEY, [b"new"], within(5))
    assert load(tier) == (3, b"new" + bytes(13))


def test_a_restart_between_two_calls_is_not_even_noticed(server: RedisServer, tier: RedisTier) -> None:
    tier.store(KEY, [b"blob"], within(5))
    server.kill()
    server.start()

    assert load(tier)[0] == 0


def test_a_paused_server_costs_one_deadline_and_then_nothing(
    server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_servers, "LEFT_ALONE_S", (5.0, 5.0))
    tier.store(KEY, [b"blob"], within(5))
    server.pause()
    begin = time.monotonic()

    assert "did not answer in time" in error_of(lambda: load(tier, seconds=0.3))
    first = time.monotonic()
    assert "is left alone for another" in error_of(lambda: load(tier, seconds=30))
    assert "is left alone for another" in error_of(lambda: tier.contains([KEY], within(30)))

    assert first - begin >= 0.3
    server.resume()
    assert once_it_answers(tier) is True


def test_a_store_to_a_paused_server_ends_at_its_deadline(server: RedisServer, tier: RedisTier) -> None:
    tier.store(OTHER, [b"blob"], within(5))
    server.pause()
    parts = [LARGE[:100], LARGE[100:]]

    assert "did not answer in time" in error_of(lambda: tier.store(KEY, parts, within(0.3)))

    server.resume()
    assert once_it_answers(tier, OTHER) is True
    assert load(tier) in ((0, bytes(16)), (len(LARGE), LARGE[:16]))


def test_a_late_answer_is_never_taken_for_another_one(
    server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_servers, "LEFT_ALONE_S", (0.0, 0.0))
    tier.store(KEY, [b"first"], within(5))
    tier.store(OTHER, [b"second"], within(5))
    server.pause()
    error_of(lambda: load(tier, seconds=0.1))
    waker = threading.Timer(0.2, server.resume)  # asked for KEY first, it answers that before anything else
    waker.start()
    for _ in range(100):
        buffer = bytearray(6)
        assert tier.load(OTHER, [memoryview(buffer)], within(5)) == 6
        assert buffer == b"second"
    waker.join()


def test_the_shorter_of_two_deadlines_ends_first(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_servers, "LEFT_ALONE_S", (0.0, 0.0))
    tier = RedisTier(server.location())
    tier.store(KEY, [b"blob"], within(5))
    server.pause()
    patient = threading.Thread(target=lambda: error_of(lambda: load(tier, seconds=3)))
    patient.start()

    error_of(lambda: load(tier, seconds=0.2))

    assert patient.is_alive()
    patient.join()
    tier.close()


def test_an_answer_that_drips_does_not_outlast_the_deadline() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)
    ended = threading.Event()

    def drip() -> None:
        with listener.accept()[0] as line:
            line.settimeout(5)
            while (request := line.recv(4096)) and b"GET" not in request:
                line.sendall(b"+OK\r\n" * request.count(b"CLIENT"))
            line.sendall(b"$1000\r\n")
            while not ended.wait(0.02):
                try:
                    line.sendall(b"x")
                except OSError:
                    return

    clerk = threading.Thread(target=drip)
    clerk.start()
    tier = RedisTier(TierLocation("redis", "127.0.0.1", listener.getsockname()[1]))
    try:
        assert "did not answer in time" in error_of(lambda: load(tier, 1000, seconds=0.5))
    finally:
        ended.set()
        clerk.join()
        listener.close()
        tier.close()


def test_a_server_killed_while_it_sends_fails_the_load(server: RedisServer, tier: RedisTier) -> None:
    tier.store(KEY, [LARGE * 5], within(5))
    buffers = [memoryview(bytearray(len(LARGE))) for _ in range(5)]
    killer = threading.Timer(0.005, server.kill)
    killer.start()
    ends = set()
    while killer.is_alive() or not ends.intersection({"error"}):
        try:
            ends.add(tier.load(KEY, buffers, within(5)))
        except TierError:
            ends.add("error")
    killer.join()

    assert ends <= {len(LARGE) * 5, "error"}


def test_a_flushed_server_holds_nothing(server: RedisServer, tier: RedisTier) -> None:
    tier.store(KEY, [b"blob"], within(5))
    with server.talking() as client:
        client.flushall()

    assert tier.contains([KEY], within(5)) == [False]
    assert load(tier)[0] == 0


def test_a_blob_deleted_by_somebody_else_is_absent(server: RedisServer, tier: RedisTier) -> None:
    tier.store(KEY, [b"blob"], within(5))
    assert tier.contains([KEY], within(5)) == [True]
    with server.talking() as client:
        client.delete(NAME)

    assert load(tier)[0] == 0
    assert tier.contains([KEY], within(5)) == [False]


def test_a_value_that_is_no_string_is_absent_cannot_be_loaded_and_is_replaced(
    server: RedisServer, tier: RedisTier
) -> None:
    with server.talking() as client:
        client.lpush(NAME, b"x")

    assert tier.contains([KEY], within(5)) == [False]
    assert "WRONGTYPE" in error_of(lambda: load(tier))
    tier.store(KEY, [b"blob"], within(5))
    assert load(tier) == (4, b"blob" + bytes(12))


@pytest.mark.parametrize("value", [b"", b"\r\n", b"$5\r\nhello\r\n", b"-ERR no\r\n", bytes(100_000)])
def test_values_that_somebody_else_wrote_come_back_as_they_are(
    server: RedisServer, tier: RedisTier, value: bytes
) -> None:
    with server.talking() as client:
        client.set(NAME, value)

    length, start = load(tier)

    assert (length, start[: len(value)]) == (len(value), value[:16])
    assert tier.contains([KEY], within(5)) == [bool(value)]


def test_a_client_killed_by_the_server_costs_at_most_one_call(server: RedisServer, tier: RedisTier) -> None:
    tier.store(KEY, [b"blob"], within(5))
    with server.talking() as client:
        client.execute_command("CLIENT KILL TYPE normal SKIPME yes")

    assert load(tier)[0] == 4


def test_a_full_server_refuses_new_blobs_and_keeps_old_ones(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    tier = RedisTier(server.location())
    try:
        tier.store(KEY, [b"blob"], within(5))
        told = ""
        for number in range(20):
            try:
                tier.store(hashlib.sha1(b"%d" % number).hexdigest(), [bytes(1_000_000)], within(5))
            except TierError as error:
                told = str(error)
        assert "is at its maxmemory" in told
        assert "maxmemory-policy allkeys-lru" in told
        assert load(tier)[0] == 4
    finally:
        tier.close()
        server.close()


def test_a_read_only_replica_loads_but_does_not_store(server: RedisServer, tmp_path: Path) -> None:
    replica = RedisServer(tmp_path / "replica", "--replicaof", "127.0.0.1", str(server.port))
    tier = RedisTier(replica.location())
    try:
        with server.talking() as client:
            client.set(NAME, b"blob")
            client.config_set("repl-diskless-sync-delay", 0)
        while not once_it_answers(tier):
            time.sleep(0.02)
        assert load(tier)[0] == 4
        assert "is a read-only replica" in error_of(lambda: tier.store(KEY, [b"blob"], within(5)))
    finally:
        tier.close()
        replica.close()


def test_a_server_that_still_loads_its_data_says_so_and_serves_once_it_has(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    with server.talking() as client:
        for number in range(100):
            client.set(b"filler %d" % number, random.randbytes(1000))
        client.set(NAME, b"blob")
        client.save()
    server.close()
    slowly = ("--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024")
    server = RedisServer(tmp_path, *slowly)
    tier = RedisTier(server.location())
    try:
        assert "is still loading its data" in error_of(lambda: load(tier))
        assert once_it_answers(tier) is True
        assert load(tier) == (4, b"blob" + bytes(12))
    finally:
        tier.close()
        server.close()


def test_a_server_with_too_many_clients_says_so(server: RedisServer, tier: RedisTier) -> None:
    with server.talking() as client:
        client.config_set("maxclients", 1)
        assert "max number of clients reached" in error_of(lambda: load(tier))
        client.config_set("maxclients", 100)
        assert once_it_answers(tier) is False


def test_a_server_that_wants_a_password_says_so(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--requirepass", "tops3cret")
    tier = RedisTier(server.location())
    try:
        assert "password_env" in error_of(lambda: load(tier))
    finally:
        tier.close()
        server.close()


def test_a_server_that_is_busy_refuses(server: RedisServer, tier: RedisTier) -> None:
    with server.talking() as client:
        client.config_set("busy-reply-threshold", 1)
        with server.talking() as busy:
            script = threading.Thread(target=lambda: _spin(busy))
            script.start()
            try:
                told = ""
                end = within(20)
                while "BUSY" not in told and time.monotonic() < end:
                    try:
                        load(tier)
                    except TierError as error:
                        told = str(error)
                assert "BUSY" in told
            finally:
                client.script_kill()
                script.join()


def _spin(client: object) -> None:
    import redis

    with pytest.raises(redis.exceptions.ResponseError):
        client.eval("while true do end", 0)  # type: ignore[attr-defined]


def test_what_is_no_redis_server_is_a_tier_error() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for _ in range(2):
            with listener.accept()[0] as line:
                line.recv(4096)
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    clerk = threading.Thread(target=answer)
    clerk.start()
    first, second = (RedisTier(TierLocation("redis", "127.0.0.1", listener.getsockname()[1])) for _ in range(2))
    try:
        assert "cannot be reached" in error_of(lambda: load(first))
        assert "cannot be reached" in error_of(lambda: second.contains([KEY], within(5)))
    finally:
        clerk.join()
        listener.close()
        first.close()
        second.close()
