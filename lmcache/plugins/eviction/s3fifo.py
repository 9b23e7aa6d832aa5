"""S3-FIFO: a small queue in which most nodes show that nobody wants them, before they reach the large one."""

from collections.abc import Iterator, Sequence

import attrs

from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.plugins.eviction.arrivals import Arrivals
from lmcache.plugins.eviction.ghosts import Ghosts
from lmcache.plugins.eviction.queue import NodeQueue

SMALL_SHARE = 0.1
"""Of all nodes, how many the small queue holds before it is the one to give."""

MOST_USES = 3


@attrs.define
class Visits:
    """What is known of a node: `policy_state.mark`."""

    small: bool
    uses: int = 0


class S3FIFO(EvictionPolicy):
    """S3-FIFO (J. Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023).

    New nodes enter the small queue S; there, a use earns a place in the main queue M (the paper's text: accessed more
    than once, storing being the first time; its pseudo-code wants one more, and hits less here), where each use earns
    another round. What leaves S unused is remembered in G, as many chunks as there are nodes (the paper: as many as M
    may have, a tenth fewer): should it come again, it enters M at once. Counts nodes, not cells.
    """

    name = "S3-FIFO"

    def __init__(self) -> None:
        self._small, self._main = NodeQueue(), NodeQueue()
        self._small_nodes = self._main_nodes = self._full = 0
        self._ghosts = Ghosts()
        self._arrivals = Arrivals()

    def insert(self, node: ChunkNode) -> None:
        """A node that is remembered enters M, another S."""
        visits = Visits(small=node.key not in self._ghosts)
        if visits.small:
            self._small.append(node, visits)
            self._small_nodes += 1
        else:
            self._ghosts.pop(node.key)
            self._main.append(node, visits)
            self._main_nodes += 1
        self._arrivals.insert(node)

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """A use is counted, and moves nothing. A store puts its new nodes in order: the tail shall go first."""
        stored = self._arrivals.settle(nodes)
        for node in stored:
            queue = self._small if node.policy_state.mark.small else self._main
            queue.move_to_warm_end((node,))
        if not stored:
            for node in nodes:
                visits: Visits = node.policy_state.mark
                visits.uses = min(visits.uses + 1, MOST_USES)

    def remove(self, node: ChunkNode) -> None:
        """Forget a node; its chunk is remembered if it was in S."""
        small = node.policy_state.mark.small
        NodeQueue.remove(node)
        self._arrivals.remove(node)
        self._small_nodes -= small
        self._main_nodes -= not small
        if small:
            self._ghosts.add(node.key)
        self._ghosts.trim(max(self._full, self._small_nodes + self._main_nodes))

    def victims(self) -> Iterator[ChunkNode]:
        """EVICT of the paper, as often as asked: from S while it has its share of the nodes, else from M."""
        self._full = self._small_nodes + self._main_nodes
        promoted: dict[ChunkNode, None] = {}
        small, main = self._leaving_small(promoted), self._leaving_main()
        gone = 0
        while node := next(small if self._small_nodes - gone >= SMALL_SHARE * self._full else main, None):
            gone += node.policy_state.mark.small
            promoted.pop(node, None)
            yield node
        yield from small
        for node in main:
            promoted.pop(node, None)
            yield node
        yield from promoted  # after M had been gone through

    def _leaving_small(self, promoted: dict[ChunkNode, None]) -> Iterator[ChunkNode]:
        """Nodes of S from the oldest on; those that were used move to M, and are told."""
        earned: list[ChunkNode] = []
        for node in self._small:
            if node.policy_state.mark.uses:
                earned.append(node)
                continue
            # behind the place where this iteration is
            self._promote(earned, promoted)
            earned = []
            yield node
        self._promote(earned, promoted)

    def _promote(self, nodes: Sequence[ChunkNode], promoted: dict[ChunkNode, None]) -> None:
        for node in nodes:
            node.policy_state.mark = Visits(small=False)
            promoted[node] = None
        self._main.move_to_warm_end(nodes)
        self._small_nodes -= len(nodes)
        self._main_nodes += len(nodes)

    def _leaving_main(self) -> Iterator[ChunkNode]:
        """Nodes of M from the oldest on; those that were used go round once more for each use."""
        spared: list[ChunkNode] = []
        for node in self._main:
            if node.policy_state.mark.uses:
                node.policy_state.mark.uses -= 1
                spared.append(node)
                continue
            # behind the place where this iteration is, which meets them again
            self._main.move_to_warm_end(spared)
            spared = []
            yield node
        self._main.move_to_warm_end(spared)
        while spared:
            again = [node for node in spared if node.policy_state.mark.uses]
            yield from [node for node in spared if not node.policy_state.mark.uses]
            for node in again:
                node.policy_state.mark.uses -= 1
            spared = again


@hookimpl
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:
    """Offer the policy to `--eviction-policy S3-FIFO`."""
    return [S3FIFO]
