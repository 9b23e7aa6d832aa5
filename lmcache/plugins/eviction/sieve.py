"""SIEVE: a hand goes through the nodes in the order of storing, and takes the first that nobody used."""

from collections.abc import Iterator, Sequence

from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.plugins.eviction.arrivals import Arrivals
from lmcache.plugins.eviction.queue import NodeQueue


class SIEVE(EvictionPolicy):
    """SIEVE (Y. Zhang et al., SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for Web caches, NSDI
    2024). `mark` says whether a node was used since the hand passed it.

    The paper's one list is two queues here, of which the hand is the border: what it has yet to pass, new nodes last,
    and what it has passed. They swap when it has passed all. What it was offered and may not take lies behind it then.
    Counts nodes, not cells.
    """

    name = "SIEVE"

    def __init__(self) -> None:
        self._ahead, self._passed = NodeQueue(), NodeQueue()
        self._arrivals = Arrivals()

    def insert(self, node: ChunkNode) -> None:
        """A new node is the last that the hand will meet, and not used yet."""
        self._ahead.append(node, False)
        self._arrivals.insert(node)

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """A use only leaves a mark. A store puts its new nodes in order: the hand shall meet the tail first."""
        stored = self._arrivals.settle(nodes)
        if stored:
            self._ahead.move_to_warm_end(stored)
            return
        for node in nodes:
            node.policy_state.mark = True

    def remove(self, node: ChunkNode) -> None:
        """Forget a node."""
        NodeQueue.remove(node)
        self._arrivals.remove(node)

    def victims(self) -> Iterator[ChunkNode]:
        """What the hand would take, one after the other."""
        if self._ahead.coldest is None:
            self._ahead, self._passed = self._passed, self._ahead
        yield from self._unused(self._ahead)
        # the hand has gone through all that was ahead, and goes on from the beginning
        self._ahead, self._passed = self._passed, self._ahead
        spared = []
        for node in self._ahead:
            if node.policy_state.mark:
                spared.append(node)
            else:
                yield node
        yield from spared

    def _unused(self, queue: NodeQueue) -> Iterator[ChunkNode]:
        """Nodes of `queue` without a mark. The hand passes the others, and takes their mark."""
        passed: list[ChunkNode] = []
        for node in queue:
            if node.policy_state.mark:
                node.policy_state.mark = False
                passed.append(node)
                continue
            # behind the place where this iteration is
            self._passed.move_to_warm_end(passed)
            passed = []
            yield node
        self._passed.move_to_warm_end(passed)


@hookimpl
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:
    """Offer the policy to `--eviction-policy SIEVE`."""
    return [SIEVE]
