"""The conformance suite of storage tiers, against real redis servers: one, one with TLS, a cluster."""

from collections.abc import Iterator

import pytest
from redis_stand import Certificates, RedisCluster, RedisServer, needs_redis

from lmcache.core.tier import TierLocation
from lmcache.plugins.storage.redis import RedisOverTLS, RedisTier, ValkeyOverTLS, ValkeyTier
from lmcache.plugins.testing import StorageTierSuite

pytest.importorskip("redis", reason="redis-py is not installed (extra lmcache[redis])")
pytestmark = needs_redis


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    server = RedisServer(folder, tls=Certificates(folder / "tls"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


def empty(*servers: RedisServer) -> None:
    for server in servers:
        with server.talking() as client:
            client.flushall()


class TestRedis(StorageTierSuite):
    location: TierLocation

    @pytest.fixture(autouse=True)
    def _at(self, plain_server: RedisServer) -> None:
        empty(plain_server)
        self.location = plain_server.location()

    def open_tier(self) -> RedisTier:
        return RedisTier(self.location)


class TestRedisCluster(StorageTierSuite):
    location: TierLocation

    @pytest.fixture(autouse=True)
    def _at(self, cluster: RedisCluster) -> None:
        empty(*cluster.servers)
        self.location = cluster.location()

    def open_tier(self) -> ValkeyTier:
        return ValkeyTier(self.location)


class TestRedisOverTLS(StorageTierSuite):
    location: TierLocation

    @pytest.fixture(autouse=True)
    def _at(self, tls_server: RedisServer) -> None:
        empty(tls_server)
        assert tls_server.tls
        self.location = tls_server.location("valkeys", ca_file=str(tls_server.tls.authority))

    def open_tier(self) -> RedisOverTLS:
        return ValkeyOverTLS(self.location)
