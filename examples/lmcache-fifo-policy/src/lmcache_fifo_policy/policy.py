"""The plugin: an eviction policy, and the hook that offers it."""

from collections.abc import Iterator, Sequence

from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.plugins.eviction.queue import NodeQueue


class FIFO(EvictionPolicy):
    """Evicts the chunk that was stored first, however often it was used since."""

    name = "my-fifo"

    def __init__(self) -> None:
        self._by_arrival = NodeQueue()

    def insert(self, node: ChunkNode) -> None:
        """New chunks go to the warm end."""
        self._by_arrival.append(node)

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """Being used changes nothing: that is all that sets it apart from LRU."""

    def remove(self, node: ChunkNode) -> None:
        """Forget a chunk."""
        self._by_arrival.remove(node)

    def victims(self) -> Iterator[ChunkNode]:
        """Chunks from the one stored first to the one stored last."""
        return iter(self._by_arrival)


@hookimpl
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:
    """Offer the policy to `lmcache server --eviction-policy my-fifo`."""
    return [FIFO]
