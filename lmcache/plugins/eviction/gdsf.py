"""Greedy-Dual-Size-Frequency: what brings fewest hits for its room goes first."""

from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.plugins.eviction.lfu import LFU

PER_USE = 1024
"""Rank that one use of a node of one cell adds: larger nodes get their share of it."""


class GDSF(LFU):
    """GDSF (L. Cherkasova, Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy, HP
    Laboratories report HPL-98-69R1, 1998), for the number of hits: priority = age + uses / size, the cost being 1.

    The one policy here that goes by cells: of two chunks that are used as often, the larger goes first. With chunks of
    one size it is LFU with dynamic aging. A node that is inserted has no cells yet: it is ranked when its store ends.
    """

    name = "GDSF"

    def _worth(self, node: ChunkNode, uses: int) -> int:
        return max(1, uses * PER_USE // node.cells) if node.cells else 0


@hookimpl
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:
    """Offer the policy to `--eviction-policy GDSF`."""
    return [GDSF]
