"""Least frequently used, with dynamic aging: what was used least goes first, but old fame fades."""

from collections.abc import Iterator, Sequence

import attrs

from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.plugins.eviction.arrivals import Arrivals
from lmcache.plugins.eviction.ranks import Ranks

MOST_USES = 255
"""Uses that count: what was popular without end would otherwise stay as long again."""


@attrs.define
class Fame:
    """What is known of a node: `policy_state.mark`."""

    uses: int
    rank: int


class LFU(EvictionPolicy):
    """LFU-DA (M. Arlitt et al., Evaluating content management techniques for Web proxy caches, Performance Evaluation
    Review 27(4), 2000): a node ranks at its uses plus the age of the cache, which is the rank of what went last.

    What is used now ranks above what was used as often, long ago. Among equals the one used longest ago goes first.
    Counts nodes, not cells.
    """

    name = "LFU"

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._arrivals = Arrivals()
        self._age = 0

    def insert(self, node: ChunkNode) -> None:
        """A new node was used once."""
        fame = Fame(1, self._age + self._worth(node, 1))
        self._ranks.append(node, fame.rank, fame)
        self._arrivals.insert(node)

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """Count a use of each; the new nodes of a store are only put in order."""
        used = not self._arrivals.settle(nodes)
        for node in nodes:
            fame: Fame = node.policy_state.mark
            if used:
                fame.uses = min(fame.uses + 1, MOST_USES)
            fame.rank = self._age + self._worth(node, fame.uses)
            self._ranks.move((node,), fame.rank)

    def remove(self, node: ChunkNode) -> None:
        """Forget a node; the cache is as old as what went, unless that went out of turn."""
        rank = node.policy_state.mark.rank
        self._age = max(self._age, min(rank, self._ranks.lowest()))
        self._ranks.remove(node)
        self._arrivals.remove(node)

    def victims(self) -> Iterator[ChunkNode]:
        """Nodes from the lowest rank to the highest."""
        return iter(self._ranks)

    def _worth(self, node: ChunkNode, uses: int) -> int:
        """What `uses` uses of a node add to its rank."""
        return uses


@hookimpl
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:
    """Offer the policy to `--eviction-policy LFU`."""
    return [LFU]
