"""redis and valkey as a tier: blobs that several hosts share, in memory that somebody else looks after.

A blob is one string value, written by one SET: a reader finds the old value, the new one, or none, whenever either side
dies. What a server has acknowledged it may still lose: when it restarts without persistence, fails over to a replica
that lags, or makes room by its `maxmemory-policy`. All of these are misses.

Connections are opened when they are first needed, and again after they broke. A server that failed is left alone for a
moment, so that calls fail at once instead of one deadline each. Nothing is ever flushed, and no key without the prefix
is touched.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import KEY_DIGITS, Buffer, StorageTier, TierLocation
from lmcache.core.tier_url import choice, positive_number
from lmcache.errors import ConfigError, TierError, with_extra
from lmcache.plugins.storage.redis_servers import Server, Servers
from lmcache.plugins.storage.redis_wire import Address, Line, trouble

DEFAULT_PORT = 6379
MOST_VALUE_MB = 512
"""More than this no redis keeps in one value, unless its proto-max-bulk-len says so."""
SCAN_S = 30.0
"""Seconds that one step through a server's keys may take."""
SCAN_COUNT = 1000

_PLAIN_OPTIONS = {
    "cluster": "on: the address is one, or several joined by commas, of the servers of a redis cluster; off unless "
    "said otherwise",
    "connections": "connections to one server that may be open at once; 16 unless said otherwise",
    "max_value_mb": "blobs of more MiB are not stored; 512 unless said otherwise, which is redis' own limit",
    "prefix": "what every key begins with; lmcache: unless said otherwise",
    "ttl_s": "seconds after which the server forgets a blob that was not stored again; kept for ever unless said "
    "otherwise",
}
_TLS_OPTIONS = {
    "ca_file": "the certificates, in PEM form, that the server's must be signed by; the system's unless said otherwise",
    "cert_file": "our own certificate, in PEM form, for a server that asks for one",
    "key_file": "the key of our own certificate, in PEM form",
}


class RedisTier(StorageTier):
    """Blobs on a redis server or cluster, under `redis://`."""

    scheme = "redis"
    options: ClassVar[Mapping[str, str]] = _PLAIN_OPTIONS
    secrets: ClassVar[Mapping[str, str]] = {
        "username": "who logs in; redis' default user unless said otherwise",
        "password": "with which password; none unless said otherwise",
    }

    def __init__(self, location: TierLocation) -> None:
        """Read the settings; connects to nothing."""
        self._location = location
        option = location.options
        self._prefix = _prefix(option.get("prefix", "lmcache:"))
        ttl = option.get("ttl_s")
        self._expiry = [] if ttl is None else [b"PX", b"%d" % max(1, round(1000 * self._number("ttl_s", ttl)))]
        self._most_bytes = int(self._number("max_value_mb", option.get("max_value_mb", str(MOST_VALUE_MB))) * 2**20)
        connections = int(max(1.0, self._number("connections", option.get("connections", "16"))))
        cluster = choice(location.scheme, "cluster", option.get("cluster", "off"), ("on", "off")) == "on"
        self._servers = Servers(self._seeds(cluster), self._maker(self._database(cluster)), connections, cluster)

    def store(self, key: str, parts: Sequence[Buffer], deadline: float) -> None:
        """One SET, sent from the buffers as they are."""
        size = sum(memoryview(part).nbytes for part in parts)
        if size > self._most_bytes:
            raise TierError(
                f"a blob of {size} bytes is more than {self._location} takes",
                remedy="raise max_value_mb if the server's proto-max-bulk-len allows, or use a smaller --chunk-size",
            )
        name = self._name(key)
        self._servers.run(name, partial(Line.put, key=name, parts=parts, options=self._expiry), deadline)

    def load(self, key: str, into: Sequence[memoryview], deadline: float) -> int:
        """One GET, received into the buffers."""
        name = self._name(key)
        return self._servers.run(name, partial(Line.get, key=name, into=into), deadline)

    def contains(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """One round trip for all keys (of a cluster: to each of its servers); False for what a failed server has."""
        names = [self._name(key) for key in keys]
        # an EXISTS would say yes to values that are no strings, and so can never be loaded
        replies = self._servers.run_all({name: (b"STRLEN", name) for name in names}, deadline)
        return [isinstance(replies[name], int) and replies[name] > 0 for name in names]

    def delete(self, keys: Sequence[str], deadline: float) -> None:
        """One round trip as well."""
        names = [self._name(key) for key in keys]
        for reply in self._servers.run_all({name: (b"UNLINK", name) for name in names}, deadline).values():
            if isinstance(reply, TierError):
                raise reply
            if isinstance(reply, Exception):
                raise TierError(f"{self._location} did not delete a blob: {reply}") from reply

    def keys(self) -> Iterator[tuple[str, int]]:
        """Go through all keys of the servers, those of others included: may take minutes on a large one."""
        seen: set[str] = set()  # a server that grows meanwhile tells some keys twice
        for server in self._servers.all(time.monotonic() + SCAN_S):
            for names in self._scan(server):
                fresh = [name for name in names if self._key(name) is not None and self._key(name) not in seen]
                lengths = _told(server, partial(Line.ask_all, commands=[(b"STRLEN", name) for name in fresh]))
                for name, length in zip(fresh, lengths, strict=True):
                    key = self._key(name)
                    if key is not None and isinstance(length, int) and length > 0:
                        seen.add(key)
                        yield key, length

    def close(self) -> None:
        """Close all connections."""
        self._servers.close()

    def _scan(self, server: Server) -> Iterator[list[bytes]]:
        pattern = re.sub(rb"([*?\[\]\\^-])", rb"\\\1", self._prefix) + b"*"
        cursor = b"0"
        while True:
            words = ("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
            cursor, names = _told(server, partial(Line.ask, words=words))
            if names:
                yield names
            if int(cursor) == 0:
                return

    def _name(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _key(self, name: bytes) -> str | None:
        """The key of the blob under this name; None for what is none of ours."""
        key = name[len(self._prefix) :].decode(errors="replace")
        return key if re.fullmatch(rf"[0-9a-f]{{{KEY_DIGITS}}}", key) else None

    def _number(self, name: str, text: str) -> float:
        return positive_number(self._location.scheme, name, text)

    def _seeds(self, cluster: bool) -> list[Address]:
        location = self._location
        if not location.host:
            raise ConfigError(f"--l2 {location} names no server", remedy=f"write {location.scheme}://HOST:PORT")
        if "," not in location.host:
            return [Address(location.host, location.port or DEFAULT_PORT)]
        if not cluster:
            raise ConfigError(
                f"--l2 {location} names several servers", remedy="name one, or add cluster=on if they form a cluster"
            )
        return [self._seed(text) for text in location.host.split(",")]

    def _seed(self, text: str) -> Address:
        match = re.fullmatch(r"\[?([^\[\]:]+|(?<=\[)[0-9a-fA-F:.]+)\]?(?::(\d{1,5}))?", text)
        if not match:
            raise ConfigError(f"--l2 {self._location}: {text!r} is no server", remedy="write HOST:PORT,HOST:PORT")
        return Address(match[1], int(match[2] or DEFAULT_PORT))

    def _database(self, cluster: bool) -> int:
        text = self._location.path.strip("/")
        if not re.fullmatch(r"\d{0,5}", text):
            raise ConfigError(
                f"--l2 {self._location} has no database {text!r}", remedy="write a number after the slash, or nothing"
            )
        database = int(text or 0)
        if cluster and database:
            raise ConfigError(
                f"--l2 {self._location} names database {database}, but a cluster has only 0",
                remedy="leave the number out",
            )
        return database

    def _maker(self, database: int) -> Callable[..., Any]:
        """redis-py's class of connections, with everything but the address bound."""
        try:
            connection_class = self._connection_class()
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--l2 {self._location} needs redis-py, which is not installed",
                remedy=with_extra("redis"),
            ) from error
        secrets = self._location.secrets
        return partial(
            connection_class,
            db=database,
            username=secrets.get("username"),
            password=secrets.get("password"),
            protocol=2,
            **self._encryption(),
        )

    def _connection_class(self) -> Any:
        from redis.connection import Connection

        return Connection

    def _encryption(self) -> dict[str, Any]:
        return {}


class RedisOverTLS(RedisTier):
    """Blobs on a redis server or cluster that speaks TLS, under `rediss://`."""

    scheme = "rediss"
    options: ClassVar[Mapping[str, str]] = {**_PLAIN_OPTIONS, **_TLS_OPTIONS}

    def _connection_class(self) -> Any:
        from redis.connection import SSLConnection

        return SSLConnection

    def _encryption(self) -> dict[str, Any]:
        files = {name: self._location.options.get(name) for name in _TLS_OPTIONS}
        for name, path in files.items():
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"--l2 {self._location} has {name}={path}, where no file is", remedy="correct it")
        if files["key_file"] and not files["cert_file"]:
            raise ConfigError(f"--l2 {self._location} has a key_file", remedy="name its cert_file, too")
        return {
            "ssl_ca_certs": files["ca_file"],
            "ssl_certfile": files["cert_file"],
            "ssl_keyfile": files["key_file"],
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
        }


class ValkeyTier(RedisTier):
    """The same under `valkey://`: valkey speaks redis' protocol."""

    scheme = "valkey"


class ValkeyOverTLS(RedisOverTLS):
    """The same under `valkeys://`."""

    scheme = "valkeys"


@hookimpl
def lmcache_register_storage_tiers() -> list[type[StorageTier]]:
    """The built-in tiers on redis and valkey."""
    return [RedisTier, RedisOverTLS, ValkeyTier, ValkeyOverTLS]


def _prefix(text: str) -> bytes:
    if "{" in text:
        raise ConfigError(
            f"the prefix {text!r} of a redis tier has a brace, which would put all blobs on one server of a cluster",
            remedy="leave it out",
        )
    return text.encode()


def _told(server: Server, say: Callable[[Line], Any]) -> Any:
    """What a server tells in one exchange that nobody waits for; TierError if it tells nothing."""
    from redis.exceptions import ResponseError

    try:
        return server.talk(say, time.monotonic() + SCAN_S)
    except ResponseError as error:
        raise trouble(server.address, error) from error
