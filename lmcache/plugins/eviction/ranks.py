"""Chunk nodes by a whole number: what policies are made of that compare priorities."""

import heapq
from collections.abc import Iterator, Sequence

from lmcache.core.policy import ChunkNode
from lmcache.plugins.eviction.queue import NodeQueue


class Ranks:
    """Chunk nodes from the lowest rank to the highest, those of one rank from cold to warm.

    A queue for each rank that is in use, and a heap of these ranks, each of them once: a node that moves or goes leaves
    no trace in it. What a call costs depends on how many different ranks there are, not on the nodes.
    """

    __slots__ = ("_queues", "_ranks")

    def __init__(self) -> None:
        self._queues: dict[int, NodeQueue] = {}
        self._ranks: list[int] = []

    def append(self, node: ChunkNode, rank: int, mark: object = None) -> None:
        """Put a node that is in no queue at the warm end of `rank`."""
        self._queue(rank).append(node, mark)

    def move(self, nodes: Sequence[ChunkNode], rank: int) -> None:
        """Put nodes that are here at the warm end of `rank`: the last is the warmest."""
        self._queue(rank).move_to_warm_end(nodes)

    def remove(self, node: ChunkNode) -> None:
        """Take a node out."""
        NodeQueue.remove(node)

    def lowest(self) -> int:
        """The lowest rank in use; the last that was when there are no nodes."""
        ranks = self._ranks
        while len(ranks) > 1 and self._queues[ranks[0]].coldest is None:
            del self._queues[heapq.heappop(ranks)]
        return ranks[0]

    def __iter__(self) -> Iterator[ChunkNode]:
        """Nodes from the lowest rank to the highest. Nothing may change until the iteration ends or is given up."""
        if not self._ranks:
            return
        first = self.lowest()
        yield from self._queues[first]
        # most searches end before the ranks need sorting
        for rank in sorted(self._ranks)[1:]:
            yield from self._queues[rank]

    def _queue(self, rank: int) -> NodeQueue:
        queue = self._queues.get(rank)
        if queue is None:
            queue = self._queues[rank] = NodeQueue()
            heapq.heappush(self._ranks, rank)
        return queue
