"""First in, first out: what was stored the longest ago goes first, used or not."""

from collections.abc import Iterator, Sequence

from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.plugins.eviction.arrivals import Arrivals
from lmcache.plugins.eviction.queue import NodeQueue


class FIFO(EvictionPolicy):
    """Evicts in the order of storing (L. A. Belady, A study of replacement algorithms, IBM Systems Journal, 1966).

    A chunk is as young as the youngest that was stored below it: otherwise a shared beginning, which is the oldest of
    all, would take everything below it along. Counts nodes, not cells.
    """

    name = "FIFO"

    def __init__(self) -> None:
        self._by_store = NodeQueue()
        self._arrivals = Arrivals()

    def insert(self, node: ChunkNode) -> None:
        """A new node is the youngest."""
        self._by_store.append(node)
        self._arrivals.insert(node)

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """A use changes nothing; what was stored makes its chain young."""
        if self._arrivals.settle(nodes):
            self._by_store.move_to_warm_end(nodes)

    def remove(self, node: ChunkNode) -> None:
        """Forget a node."""
        self._by_store.remove(node)
        self._arrivals.remove(node)

    def victims(self) -> Iterator[ChunkNode]:
        """Nodes from the one stored longest ago to the one stored last."""
        return iter(self._by_store)


@hookimpl
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:
    """Offer the policy to `--eviction-policy FIFO`."""
    return [FIFO]
