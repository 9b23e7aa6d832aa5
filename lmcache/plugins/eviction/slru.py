"""Segmented LRU: what was used again is protected from what was used once."""

from collections.abc import Iterator, Sequence
from itertools import chain

from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.plugins.eviction.arrivals import Arrivals
from lmcache.plugins.eviction.segments import Segments


class SLRU(EvictionPolicy):
    """SLRU (R. Karedla, J. S. Love, B. G. Wherry, Caching strategies to improve disk system performance, IEEE Computer
    27(3), 1994): new nodes are on probation, a use protects them, and the protected ones used longest ago make room for
    others by returning to probation.

    Four fifths of all nodes can be protected. Counts nodes, not cells.
    """

    name = "SLRU"

    def __init__(self) -> None:
        self._segments = Segments()
        self._arrivals = Arrivals()

    def insert(self, node: ChunkNode) -> None:
        """A new node is on probation."""
        self._segments.append(node)
        self._arrivals.insert(node)

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """Protect what was used; a store only renews its chain within its segments."""
        if self._arrivals.settle(nodes):
            self._segments.renew(nodes)
        else:
            self._segments.protect(nodes)

    def remove(self, node: ChunkNode) -> None:
        """Forget a node."""
        self._segments.remove(node)
        self._arrivals.remove(node)

    def victims(self) -> Iterator[ChunkNode]:
        """Those on probation, then the protected ones; in both, the one used longest ago first."""
        return chain(self._segments.probation, self._segments.protected)


@hookimpl
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:
    """Offer the policy to `--eviction-policy SLRU`."""
    return [SLRU]
