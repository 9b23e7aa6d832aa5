"""Two queues, of which nodes earn the second: what SLRU and the main part of W-TinyLFU are."""

from collections.abc import Sequence

from lmcache.core.policy import ChunkNode
from lmcache.plugins.eviction.queue import NodeQueue

PROTECTED_SHARE = 0.8
"""Of all nodes of both segments, how many can be protected."""


class Segments:
    """Nodes on probation and protected nodes, both from the one used longest ago to the one used last."""

    __slots__ = ("_protected_nodes", "nodes", "probation", "protected")

    def __init__(self) -> None:
        self.probation = NodeQueue()
        self.protected = NodeQueue()
        self.nodes = 0
        """In both segments."""
        self._protected_nodes = 0

    def append(self, node: ChunkNode) -> None:
        """Put a node that is in no queue on probation."""
        self.probation.append(node, self.probation)
        self.nodes += 1

    def adopt(self, node: ChunkNode) -> None:
        """Put a node of a queue that is none of these on probation."""
        self.probation.move_to_warm_end((node,))
        node.policy_state.mark = self.probation
        self.nodes += 1

    def renew(self, nodes: Sequence[ChunkNode]) -> None:
        """Make `nodes` the warmest of their segments, the last the warmest."""
        for node in nodes:
            node.policy_state.mark.move_to_warm_end((node,))

    def protect(self, nodes: Sequence[ChunkNode]) -> None:
        """`nodes` were used: protect them, and put others on probation again when too many are."""
        for node in nodes:
            link = node.policy_state
            if link.mark is self.probation:
                link.mark = self.protected
                self._protected_nodes += 1
        self.protected.move_to_warm_end(nodes)
        while self._protected_nodes > max(1, PROTECTED_SHARE * self.nodes) and (coldest := self.protected.coldest):
            self.probation.move_to_warm_end((coldest,))
            coldest.policy_state.mark = self.probation
            self._protected_nodes -= 1

    def remove(self, node: ChunkNode) -> None:
        """Take a node out."""
        self.nodes -= 1
        self._protected_nodes -= node.policy_state.mark is self.protected
        NodeQueue.remove(node)
