"""Adaptive Replacement Cache: balances what was used once against what was used again, by its own mistakes."""

from collections.abc import Iterator, Sequence

from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.plugins.eviction.arrivals import Arrivals
from lmcache.plugins.eviction.ghosts import Ghosts
from lmcache.plugins.eviction.queue import NodeQueue


class _List:
    """T and B of the paper: nodes that are cached, and ghosts of nodes that were evicted from here."""

    __slots__ = ("ghosts", "nodes", "queue")

    def __init__(self) -> None:
        self.queue = NodeQueue()
        self.nodes = 0
        self.ghosts = Ghosts()


class ARC(EvictionPolicy):
    """ARC (N. Megiddo, D. S. Modha, ARC: a self-tuning, low overhead replacement cache, USENIX FAST 2003).

    `_once` is T1 and B1, `_again` is T2 and B2, `_target` is p: how many of the nodes should be ones used once. A chunk
    that comes back soon after it was evicted moves the target towards the list that it was evicted from.

    In the paper the chunk that comes is known when another must go; here room is made first, so that a returning chunk
    moves the target for the next eviction, not for its own. Counts nodes, not cells: c is how many there were when the
    cache was last found full.
    """

    name = "ARC"

    def __init__(self) -> None:
        self._once, self._again = _List(), _List()
        self._arrivals = Arrivals()
        self._target = 0.0
        self._full = 0

    @property
    def _nodes(self) -> int:
        return self._once.nodes + self._again.nodes

    def insert(self, node: ChunkNode) -> None:
        """A chunk that nobody remembers was used once; one that is remembered was used again, and teaches."""
        home = self._remembered(node)
        home.queue.append(node, home)
        home.nodes += 1
        self._arrivals.insert(node)

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """A use moves to T2; a store only renews its chain within its lists."""
        if self._arrivals.settle(nodes):
            for node in nodes:
                node.policy_state.mark.queue.move_to_warm_end((node,))
            return
        for node in nodes:
            node.policy_state.mark.nodes -= 1
            node.policy_state.mark = self._again
        self._again.nodes += len(nodes)
        self._again.queue.move_to_warm_end(nodes)

    def remove(self, node: ChunkNode) -> None:
        """Forget a node, and remember its chunk among the ghosts of its list."""
        home: _List = node.policy_state.mark
        NodeQueue.remove(node)
        home.nodes -= 1
        self._arrivals.remove(node)
        home.ghosts.add(node.key)
        capacity = max(self._full, self._nodes)
        self._once.ghosts.trim(capacity - self._once.nodes)
        self._again.ghosts.trim(2 * capacity - self._nodes - len(self._once.ghosts))

    def victims(self) -> Iterator[ChunkNode]:
        """REPLACE of the paper, as often as asked: T1 while it is larger than its target, else T2."""
        self._full = self._nodes
        once, again = iter(self._once.queue), iter(self._again.queue)
        left, others = self._once.nodes, self._again.nodes
        while left or others:
            if left and (left > self._target or not others):
                left -= 1
                yield next(once)
            else:
                others -= 1
                yield next(again)

    def _remembered(self, node: ChunkNode) -> _List:
        """Cases II to IV of the paper: where a new node belongs, with the target moved if it is a ghost."""
        once, again = self._once.ghosts, self._again.ghosts
        if node.key in once:
            self._target = min(max(self._full, self._nodes), self._target + max(1.0, len(again) / len(once)))
            once.pop(node.key)
            return self._again
        if node.key in again:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))
            again.pop(node.key)
            return self._again
        return self._once


@hookimpl
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:
    """Offer the policy to `--eviction-policy ARC`."""
    return [ARC]
