"""Another lmcache server as a tier: what its engines have stored is found here, and what ours store can be found there.

It keeps chunks, as any server does, and not blobs under keys: a chunk is found by its namespace, chain hash, group and
shard, whoever stored it, and takes its place in the other server's L1 by the other server's rules. So this tier is used
through `PeerStore`, and everything that asks for keys is told that there are none.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import Buffer, StorageTier, TierLocation
from lmcache.errors import ConfigError, TierError

if TYPE_CHECKING:
    from lmcache.core.blob import BlobStore


class PeerTier(StorageTier):
    """The L1 of another server, under `peer://HOST:PORT`."""

    scheme = "peer"
    options: ClassVar[Mapping[str, str]] = {
        "keys": "client.key of the other server, or its folder; what LMCACHE_KEYS names unless said otherwise",
    }
    shared = True

    def __init__(self, location: TierLocation) -> None:
        """Read the settings; connects to nothing."""
        from lmcache.core.control import ServerAddress, client_keys

        if not location.host or location.path not in ("", "/"):
            raise ConfigError(f"--l2 {location} names no server", remedy="write it like peer://10.0.0.2:5555")
        self.address = ServerAddress(location.host, location.port or 5555)
        self.client_keys = client_keys(location.options.get("keys", ""))
        self._name = str(location)
        self._chunks: BlobStore | None = None

    def store_of_chunks(self) -> "BlobStore":
        """What tiering talks to."""
        from lmcache.plugins.storage.peer_store import PeerStore

        if self._chunks is None:
            self._chunks = PeerStore(self)
        return self._chunks

    def store(self, key: str, parts: Sequence[Buffer], deadline: float) -> None:
        """Refused: see `PeerStore.store`."""
        raise self._no_blobs()

    def load(self, key: str, into: Sequence[memoryview], deadline: float) -> int:
        """Refused: see `PeerStore.load`."""
        raise self._no_blobs()

    def contains(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """Refused: see `PeerStore.contains`."""
        raise self._no_blobs()

    def delete(self, keys: Sequence[str], deadline: float) -> None:
        """Refused: what the other server keeps is its own."""
        raise self._no_blobs()

    def keys(self) -> Iterator[tuple[str, int]]:
        """Refused."""
        raise self._no_blobs()

    def close(self) -> None:
        """End the conversations."""
        if self._chunks is not None:
            self._chunks.close()  # type: ignore[attr-defined]

    def _no_blobs(self) -> TierError:
        return TierError(
            f"{self._name} is another lmcache server, which keeps chunks and no blobs",
            remedy="ask it what it holds with lmcache status",
        )


@hookimpl
def lmcache_register_storage_tiers() -> list[type[StorageTier]]:
    """The built-in tier of other servers."""
    return [PeerTier]
