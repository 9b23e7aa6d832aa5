"""Blobs on a real redis server: what is stored, how, and what a user who writes a URL is told."""

import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_stand import Certificates, RedisServer, needs_redis

from lmcache.core.tier import TierLocation
from lmcache.errors import ConfigError, TierError
from lmcache.plugins.storage.redis import RedisOverTLS, RedisTier, ValkeyOverTLS, ValkeyTier

pytest.importorskip("redis", reason="redis-py is not installed (extra lmcache[redis])")
pytestmark = needs_redis

Open = Callable[..., RedisTier]


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    with shared_server.talking() as client:
        client.flushall()
    return shared_server


@pytest.fixture
def open_tier(server: RedisServer) -> Iterator[Open]:
    tiers: list[RedisTier] = []

    def opened(path: str = "", **options: str) -> RedisTier:
        tiers.append(RedisTier(server.location(path=path, **options)))
        return tiers[-1]

    yield opened
    for tier in tiers:
        tier.close()


def key_of(name: object) -> str:
    return hashlib.sha1(str(name).encode()).hexdigest()


def soon() -> float:
    return time.monotonic() + 5


def bytes_of(size: int, seed: int = 1) -> bytes:
    return hashlib.shake_128(str(seed).encode()).digest(size)


def loaded(tier: RedisTier, key: str, *sizes: int) -> tuple[int, bytes]:
    buffers = [bytearray(size) for size in sizes]
    length = tier.load(key, [memoryview(buffer) for buffer in buffers], soon())
    return length, b"".join(buffers)


def test_a_blob_is_one_string_under_prefix_and_key(server: RedisServer, open_tier: Open) -> None:
    open_tier(prefix="kv:").store(key_of(1), [b"head", bytearray(b"body"), memoryview(b"tail")], soon())

    with server.talking() as client:
        assert client.keys() == [b"kv:" + key_of(1).encode()]
        assert client.get(b"kv:" + key_of(1).encode()) == b"headbodytail"
        assert client.ttl(b"kv:" + key_of(1).encode()) == -1


@pytest.mark.parametrize("size", [1, 2, 4080, 4089, 4090, 4091, 4096, 65536, 3_000_001])
def test_a_blob_comes_back_into_any_buffers(open_tier: Open, size: int) -> None:
    tier = open_tier()
    blob = bytes_of(size)
    tier.store(key_of(size), [blob], soon())

    first = size // 3
    assert loaded(tier, key_of(size), size) == (size, blob)
    assert loaded(tier, key_of(size), first, size - first) == (size, blob)
    assert loaded(tier, key_of(size), size + 7)[1][:size] == blob


@pytest.mark.parametrize(("size", "room"), [(10, 3), (5000, 10), (5000, 4999), (3_000_000, 16)])
def test_a_blob_longer_than_the_buffers_is_cut_and_the_next_answer_is_not_taken_for_its_rest(
    open_tier: Open, size: int, room: int
) -> None:
    tier = open_tier()
    tier.store(key_of("long"), [bytes_of(size)], soon())
    tier.store(key_of("next"), [b"next"], soon())

    assert loaded(tier, key_of("long"), room) == (size, bytes_of(size)[:room])
    assert loaded(tier, key_of("next"), 4) == (4, b"next")


def test_what_is_not_there_is_absent_and_deleting_it_is_no_error(open_tier: Open) -> None:
    tier = open_tier()

    assert loaded(tier, key_of(1), 4) == (0, bytes(4))
    assert tier.contains([key_of(1)], soon()) == [False]
    tier.delete([key_of(1)], soon())


def test_a_second_store_replaces_the_first(open_tier: Open) -> None:
    tier = open_tier()
    tier.store(key_of(1), [b"longer than"], soon())
    tier.store(key_of(1), [b"this"], soon())

    assert loaded(tier, key_of(1), 16)[0] == 4
    assert list(tier.keys()) == [(key_of(1), 4)]


def test_all_keys_are_looked_up_in_one_round_trip(server: RedisServer, open_tier: Open) -> None:
    tier = open_tier()
    keys = [key_of(number) for number in range(512)]
    for key in keys[::2]:
        tier.store(key, [b"x"], soon())
    with server.talking() as client:
        before = client.info("clients")["connected_clients"], client.info("stats")["total_reads_processed"]

        assert tier.contains(keys, soon()) == [True, False] * 256

        after = client.info("clients")["connected_clients"], client.info("stats")["total_reads_processed"]
    assert after[0] == before[0]
    # the server reads 16 KiB at a time; one command a read would be more than 512
    assert after[1] - before[1] < 20


def test_a_time_to_live_is_set_with_every_store(server: RedisServer, open_tier: Open) -> None:
    tier = open_tier(ttl_s="100")
    tier.store(key_of(1), [b"blob"], soon())
    with server.talking() as client:
        client.expire(b"lmcache:" + key_of(1).encode(), 5)
        tier.store(key_of(1), [b"blob"], soon())

        assert 90 < client.ttl(b"lmcache:" + key_of(1).encode()) <= 100


def test_a_blob_whose_time_is_over_is_absent(open_tier: Open) -> None:
    tier = open_tier(ttl_s="0.05")
    tier.store(key_of(1), [b"blob"], soon())
    while tier.contains([key_of(1)], soon()) == [True]:
        time.sleep(0.01)

    assert loaded(tier, key_of(1), 4)[0] == 0


def test_deleting_takes_these_blobs_and_no_others(server: RedisServer, open_tier: Open) -> None:
    tier = open_tier()
    for number in range(4):
        tier.store(key_of(number), [b"blob"], soon())
    tier.delete([key_of(0), key_of(2), key_of("none")], soon())

    assert sorted(tier.keys()) == sorted([(key_of(1), 4), (key_of(3), 4)])


def test_keys_lists_only_blobs_under_the_prefix(server: RedisServer, open_tier: Open) -> None:
    tier = open_tier(prefix="a*[b]?:")
    stored = {key_of(number): number + 1 for number in range(2500)}
    for key, size in stored.items():
        tier.store(key, [bytes(size)], soon())
    with server.talking() as client:
        client.set(b"aXb?:" + key_of("of others").encode(), b"x")
        client.set(b"a*[b]?:no blob", b"x")
        client.lpush(b"a*[b]?:" + key_of("a list").encode(), b"x")

    told = list(tier.keys())

    assert dict(told) == stored
    assert len(told) == len(stored)


def test_databases_are_kept_apart(open_tier: Open) -> None:
    open_tier("/1").store(key_of(1), [b"blob"], soon())

    assert open_tier("/1").contains([key_of(1)], soon()) == [True]
    assert open_tier("/2").contains([key_of(1)], soon()) == [False]
    assert open_tier().contains([key_of(1)], soon()) == [False]


def test_a_blob_beyond_the_limit_is_refused_before_it_is_sent(server: RedisServer, open_tier: Open) -> None:
    tier = open_tier(max_value_mb="1")
    tier.store(key_of(1), [bytes(2**19), bytes(2**19)], soon())
    with pytest.raises(TierError) as refused:
        tier.store(key_of(2), [bytes(2**19), bytes(2**19), b"x"], soon())

    assert "a blob of 1048577 bytes is more than redis://127.0.0.1" in str(refused.value)
    with server.talking() as client:
        assert client.dbsize() == 1


def test_many_threads_share_few_connections(server: RedisServer, open_tier: Open) -> None:
    tier = open_tier(connections="2")
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            blob = bytes_of(20_000 + number, seed=turn)
            tier.store(key_of(number), [blob[:100], blob[100:]], soon())
            if loaded(tier, key_of(number), len(blob)) != (len(blob), blob):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    with server.talking() as client:
        assert client.info("clients")["connected_clients"] == 3  # the test's own is one


def test_calls_one_after_the_other_use_one_connection(server: RedisServer, open_tier: Open) -> None:
    tier = open_tier()
    with server.talking() as client:
        before = client.info("stats")["total_connections_received"]
        for size in (1, 4085, 4096, 1_000_000):
            tier.store(key_of(size), [bytes(size)], soon())
            assert loaded(tier, key_of(size), size)[0] == size
            assert loaded(tier, key_of("none"), size)[0] == 0
            assert tier.contains([key_of(size)], soon()) == [True]
        list(tier.keys())

        assert client.info("stats")["total_connections_received"] == before + 1


def test_closing_ends_the_connections(server: RedisServer, open_tier: Open) -> None:
    tier = open_tier()
    tier.store(key_of(1), [b"blob"], soon())
    tier.close()

    with server.talking() as client:
        while client.info("clients")["connected_clients"] > 1:
            time.sleep(0.01)


def test_a_user_logs_in_with_secrets_that_no_message_shows(tmp_path: Path) -> None:
    rules = ("--user", "default", "off", "--user", "kv", "on", ">tops3cret", "~lmcache:*", "+@all")
    server = RedisServer(tmp_path, *rules)
    try:
        right = TierLocation("redis", "127.0.0.1", server.port, secrets={"username": "kv", "password": "tops3cret"})
        wrong = TierLocation("redis", "127.0.0.1", server.port, secrets={"username": "kv", "password": "gu3ss"})
        tier, stranger, nobody = RedisTier(right), RedisTier(wrong), RedisTier(server.location())
        foreign = RedisTier(
            TierLocation("redis", "127.0.0.1", server.port, options={"prefix": "other:"}, secrets=right.secrets)
        )
        try:
            tier.store(key_of(1), [b"blob"], soon())
            assert loaded(tier, key_of(1), 4) == (4, b"blob")
            with pytest.raises(TierError) as refused:
                stranger.store(key_of(2), [b"blob"], soon())
            with pytest.raises(TierError) as unknown:
                nobody.contains([key_of(2)], soon())
            with pytest.raises(TierError) as forbidden:
                foreign.load(key_of(1), [memoryview(bytearray(4))], soon())
            assert "does not let us in" in str(refused.value)
            assert "does not let us in: Authentication required" in str(unknown.value)
            assert "password_env" in str(unknown.value)
            assert "does not permit the user to do that" in str(forbidden.value)
            assert "gu3ss" not in str(refused.value) + repr(wrong)
        finally:
            for each in (tier, stranger, nobody, foreign):
                each.close()
    finally:
        server.close()


def test_the_rights_that_the_documentation_names_are_enough(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tiers" / "redis.md").read_text()
    rule = re.search(r"ACL SETUSER lmcache (.*)", page)
    assert rule
    server = RedisServer(tmp_path, "--user", "lmcache", *rule[1].replace("PASSWORD", "tops3cret").split())
    secrets = {"username": "lmcache", "password": "tops3cret"}
    tier = RedisTier(TierLocation("redis", "127.0.0.1", server.port, "/1", {"ttl_s": "60"}, secrets))
    try:
        tier.store(key_of(1), [b"blob"], soon())
        assert loaded(tier, key_of(1), 4) == (4, b"blob")
        assert tier.contains([key_of(1)], soon()) == [True]
        assert list(tier.keys()) == [(key_of(1), 4)]
        tier.delete([key_of(1)], soon())
        assert list(tier.keys()) == []
    finally:
        tier.close()
        server.close()


@pytest.mark.parametrize("kind", [RedisOverTLS, ValkeyOverTLS])
def test_tls_carries_large_blobs_and_refuses_servers_that_nobody_vouches_for(
    tmp_path: Path, kind: type[RedisOverTLS]
) -> None:
    certificates = Certificates(tmp_path / "tls")
    server = RedisServer(tmp_path / "redis", tls=certificates)
    tier = kind(server.location(kind.scheme, ca_file=str(certificates.authority)))
    distrustful = kind(server.location(kind.scheme))
    plain = RedisTier(server.location())
    try:
        blob = bytes_of(3_000_001)
        tier.store(key_of(1), [blob[:4096], blob[4096:]], soon())
        assert loaded(tier, key_of(1), 4096, len(blob) - 4096) == (len(blob), blob)
        assert tier.contains([key_of(1), key_of(2)], soon()) == [True, False]
        assert list(tier.keys()) == [(key_of(1), len(blob))]
        with pytest.raises(TierError, match="CERTIFICATE_VERIFY_FAILED"):
            distrustful.load(key_of(1), [memoryview(bytearray(8))], soon())
        with pytest.raises(TierError, match="cannot be reached"):
            plain.contains([key_of(1)], soon())
    finally:
        for each in (tier, distrustful, plain):
            each.close()
        server.close()


def test_valkey_urls_reach_the_same_blobs(server: RedisServer, open_tier: Open) -> None:
    open_tier().store(key_of(1), [b"blob"], soon())
    tier = ValkeyTier(server.location("valkey"))

    assert tier.contains([key_of(1)], soon()) == [True]
    tier.close()


@pytest.mark.parametrize(
    ("location", "message"),
    [
        (TierLocation("redis"), "redis:// names no server; write redis://HOST:PORT"),
        (TierLocation("redis", "h", path="/cache"), "redis://h/cache has no database 'cache'; write a number"),
        (TierLocation("redis", "h", path="/1", options={"cluster": "on"}), "but a cluster has only 0"),
        (TierLocation("redis", "h:1,i:2"), "redis://h:1,i:2 names several servers; name one, or add cluster=on"),
        (TierLocation("redis", "h:1,i:x", options={"cluster": "on"}), "'i:x' is no server; write HOST:PORT,HOST:PORT"),
        (TierLocation("redis", "h", options={"cluster": "yes"}), "cluster=yes; use on or off"),
        (TierLocation("redis", "h", options={"ttl_s": "-1"}), "ttl_s=-1; use a positive number"),
        (TierLocation("redis", "h", options={"prefix": "{x}"}), "all blobs on one server of a cluster; leave it out"),
        (TierLocation("rediss", "h", options={"ca_file": "/nowhere"}), "ca_file=/nowhere, where no file is"),
        (TierLocation("rediss", "h", options={"key_file": __file__}), "has a key_file; name its cert_file, too"),
    ],
)
def test_a_url_that_cannot_work_is_refused_at_start(location: TierLocation, message: str) -> None:
    kind = RedisTier if location.scheme == "redis" else RedisOverTLS
    with pytest.raises(ConfigError) as refused:
        kind(location)

    assert message in str(refused.value)


def test_without_redis_py_the_tier_is_known_and_names_its_extra() -> None:
    script = """
import sys
sys.modules["redis"] = None
from lmcache.core.tier import TierLocation
from lmcache.plugins.storage import redis
try:
    redis.RedisTier(TierLocation("redis", "localhost"))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == (
        "ConfigError --l2 redis://localhost needs redis-py, which is not installed; install this "
        "lmcache with its extra `redis`: in its checkout, pip install '.[redis]'\n"
    )


def test_a_connection_keeps_the_deadline_of_each_call_and_not_that_of_the_first(
    server: RedisServer, open_tier: Open
) -> None:
    tier = open_tier()
    key = key_of("patient")
    tier.store(key, [b"blob"], time.monotonic() + 0.4)  # opens the connection
    with server.talking() as client:
        client.execute_command("CLIENT", "PAUSE", "900", "ALL")
    assert loaded(tier, key, 4) == (4, b"blob")
