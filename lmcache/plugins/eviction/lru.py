"""Least recently used: what was not asked for the longest goes first."""

from collections.abc import Iterator, Sequence

from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.plugins.eviction.queue import NodeQueue


class LRU(EvictionPolicy):
    """Evicts the chunk whose last use is longest ago; of a prompt's chunks, used together, those nearest to its end.

    R. L. Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970. Counts nodes,
    not cells.
    """

    name = "LRU"

    def __init__(self) -> None:
        self._by_last_use = NodeQueue()

    def insert(self, node: ChunkNode) -> None:
        """A new node counts as used just now."""
        self._by_last_use.append(node)

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """The root comes last, and so outlives the chunks that are of no use without it."""
        self._by_last_use.move_to_warm_end(nodes)

    def remove(self, node: ChunkNode) -> None:
        """Forget a node."""
        self._by_last_use.remove(node)

    def victims(self) -> Iterator[ChunkNode]:
        """Nodes from the one used longest ago to the one used last."""
        return iter(self._by_last_use)


@hookimpl
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:
    """Offer the policy to `--eviction-policy LRU`."""
    return [LRU]
