"""A real redis cluster of three servers as one tier."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_stand import RedisCluster, RedisServer, needs_redis

from lmcache.core.tier import TierLocation
from lmcache.errors import TierError
from lmcache.plugins.storage.redis import RedisTier

pytest.importorskip("redis", reason="redis-py is not installed (extra lmcache[redis])")
pytestmark = needs_redis

KEYS = [hashlib.sha1(b"%d" % number).hexdigest() for number in range(60)]


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(shared_cluster: RedisCluster) -> RedisCluster:
    for server in shared_cluster.servers:
        with server.talking() as client:
            client.flushall()
    return shared_cluster


@pytest.fixture
def tier(cluster: RedisCluster) -> Iterator[RedisTier]:
    tier = RedisTier(cluster.location())
    yield tier
    tier.close()


def soon() -> float:
    return time.monotonic() + 10


def store_all(tier: RedisTier) -> None:
    for key in KEYS:
        tier.store(key, [key.encode(), b"/tail"], soon())


def load(tier: RedisTier, key: str) -> bytes:
    buffer = bytearray(45)
    return bytes(buffer[: tier.load(key, [memoryview(buffer)], soon())])


def held(server: RedisServer) -> set[str]:
    with server.talking() as client:
        return {name.decode().removeprefix("lmcache:") for name in client.scan_iter()}


def test_blobs_spread_over_all_servers_and_come_back(cluster: RedisCluster, tier: RedisTier) -> None:
    store_all(tier)

    shares = [held(server) for server in cluster.servers]
    assert all(shares)
    assert sum(len(share) for share in shares) == len(KEYS)
    assert [load(tier, key) for key in KEYS] == [f"{key}/tail".encode() for key in KEYS]
    assert tier.contains([*KEYS, "f" * 40], soon()) == [True] * len(KEYS) + [False]
    assert sorted(tier.keys()) == sorted((key, 45) for key in KEYS)
    tier.delete(KEYS[::2], soon())
    assert tier.contains(KEYS, soon()) == [False, True] * (len(KEYS) // 2)


def test_any_of_several_addresses_will_do(cluster: RedisCluster) -> None:
    last = cluster.servers[2].port
    tier = RedisTier(TierLocation("redis", f"127.0.0.1:1,127.0.0.1:{last}", options={"cluster": "on"}))
    store_all(tier)

    assert all(held(server) for server in cluster.servers)
    tier.close()


def test_without_the_option_the_message_names_it(cluster: RedisCluster) -> None:
    tier = RedisTier(cluster.servers[0].location())
    with pytest.raises(TierError) as raised:
        store_all(tier)

    assert "is part of a cluster" in str(raised.value)
    assert "add cluster=on to the tier's URL" in str(raised.value)
    tier.close()


def test_with_the_option_a_server_of_no_cluster_says_so(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    tier = RedisTier(server.location(cluster="on"))
    with pytest.raises(TierError) as raised:
        tier.contains(KEYS, soon())

    assert "is part of no cluster" in str(raised.value)
    tier.close()
    server.close()


def test_slots_that_move_are_followed(cluster: RedisCluster, tier: RedisTier) -> None:
    store_all(tier)
    source, target = cluster.servers[0], cluster.servers[1]
    moved = min(held(source))
    with source.talking() as there, target.talking() as here:
        slot = there.execute_command("CLUSTER KEYSLOT", f"lmcache:{moved}")
        ids = {name: client.execute_command("CLUSTER MYID").decode() for name, client in (("s", there), ("t", here))}
        here.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids["s"])
        there.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids["t"])

        # half-way: what is still there is answered there, what is not is asked for at the target
        assert load(tier, moved) == f"{moved}/tail".encode()
        there.execute_command("MIGRATE", "127.0.0.1", target.port, f"lmcache:{moved}", 0, 5000)
        assert load(tier, moved) == f"{moved}/tail".encode()
        tier.store(moved, [b"new"], soon())
        assert load(tier, moved) == b"new"
        assert tier.contains([moved], soon()) == [True]

        for client in (here, there):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids["t"])
        assert load(tier, moved) == b"new"
        assert tier.contains([moved], soon()) == [True]
        sent_on = there.info("errorstats")["errorstat_MOVED"]["count"]
        for _ in range(5):
            assert load(tier, moved) == b"new"
        assert there.info("errorstats")["errorstat_MOVED"]["count"] == sent_on

        there.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids["t"])
        here.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids["s"])
        here.execute_command("MIGRATE", "127.0.0.1", source.port, f"lmcache:{moved}", 0, 5000)
        for client in (there, here):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids["s"])


def test_a_server_that_is_lost_costs_its_share_only(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path)
    tier = RedisTier(cluster.location())
    try:
        for server in cluster.servers:
            with server.talking() as client:
                client.config_set("cluster-require-full-coverage", "no")
        store_all(tier)
        lost = held(cluster.servers[0])  # the one that the URL names
        cluster.servers[0].kill()

        assert tier.contains(KEYS, soon()) == [key not in lost for key in KEYS]
        for key in KEYS:
            if key not in lost:
                assert load(tier, key) == f"{key}/tail".encode()
        with pytest.raises(TierError):
            load(tier, min(lost))
        for server in cluster.servers[1:]:
            server.kill()
        with pytest.raises(TierError):
            tier.contains(KEYS, soon())
    finally:
        tier.close()
        cluster.close()


def test_when_a_replica_takes_over_blobs_are_stored_and_loaded_again(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path, replicas=1)
    tier = RedisTier(cluster.location())
    try:
        store_all(tier)
        lost = max(cluster.primaries(), key=lambda server: server is not cluster.servers[0])
        keys = held(lost)
        with lost.talking() as client:
            assert client.wait(1, 20_000) == 1  # one replica has it all
        lost.kill()
        with pytest.raises(TierError):
            tier.store(min(keys), [b"new"], soon())

        end = soon() + 30
        stored = False
        while not stored:
            assert time.monotonic() < end
            try:
                tier.store(min(keys), [b"new"], soon())
                stored = True
            except TierError:
                time.sleep(0.1)

        assert load(tier, min(keys)) == b"new"
        assert [load(tier, key) for key in sorted(keys)[1:]] == [f"{key}/tail".encode() for key in sorted(keys)[1:]]
    finally:
        tier.close()
        cluster.close()
