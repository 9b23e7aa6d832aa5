"""W-TinyLFU: a new chunk has to be more popular than the one that would go in its place."""

from collections.abc import Iterator, Sequence
from itertools import chain

from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.plugins.eviction.arrivals import Arrivals
from lmcache.plugins.eviction.queue import NodeQueue
from lmcache.plugins.eviction.segments import Segments
from lmcache.plugins.eviction.sketch import FrequencySketch

WINDOW_SHARE = 0.01
"""Of all nodes, how many are in the window."""

WAITING_SHARE = 0.1
"""Of all nodes, how many may wait for their contest."""

PERIOD = 10
"""Uses for each node that is cached, after which the sketch forgets half."""

KEYS = 1 << 12
MOST_KEYS = 1 << 20
"""Sketches count this many keys at least and at most: 16 KiB to 4 MiB."""


class WTinyLFU(EvictionPolicy):
    """W-TinyLFU (G. Einziger, R. Friedman, B. Manes, TinyLFU: a highly efficient cache admission policy, ACM
    Transactions on Storage 13(4), 2017).

    A small LRU window takes new nodes; what falls out of it contends with the next victim of a segmented LRU, and the
    less frequent of the two goes. The paper refuses the loser; a policy here cannot, and names it first instead: until
    room is needed, contenders wait. Before the cache was full for the first time, nobody has to contend. `mark` is the
    queue that a node is in. Counts nodes, not cells.
    """

    name = "W-TinyLFU"

    def __init__(self) -> None:
        self._window, self._contenders = NodeQueue(), NodeQueue()
        self._window_nodes = self._waiting_nodes = 0
        self._main = Segments()
        self._full = False
        self._arrivals = Arrivals()
        self._sketch = FrequencySketch(KEYS)

    @property
    def _nodes(self) -> int:
        return self._window_nodes + self._waiting_nodes + self._main.nodes

    def resize(self, cells: int) -> None:
        """Start a sketch for as many chunks as there can be; called before there are any, so nothing is forgotten."""
        self._sketch = FrequencySketch(min(max(KEYS, cells), MOST_KEYS))

    def insert(self, node: ChunkNode) -> None:
        """A new node is in the window."""
        self._window.append(node, self._window)
        self._window_nodes += 1
        self._arrivals.insert(node)
        self._count(node)

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """Count a use of each; in the main part it protects. A store only renews its chain, then bounds the window."""
        stored = self._arrivals.settle(nodes)
        for node in nodes:
            home: NodeQueue = node.policy_state.mark
            if not stored:
                self._count(node)
                if home is self._main.probation or home is self._main.protected:
                    self._main.protect((node,))
                    continue
            home.move_to_warm_end((node,))
        self._bound_window(max(1, WINDOW_SHARE * self._nodes))

    def remove(self, node: ChunkNode) -> None:
        """Forget a node."""
        home: NodeQueue = node.policy_state.mark
        self._arrivals.remove(node)
        if home is self._window:
            self._window_nodes -= 1
        elif home is self._contenders:
            self._waiting_nodes -= 1
        else:
            self._main.remove(node)
            return
        NodeQueue.remove(node)

    def victims(self) -> Iterator[ChunkNode]:
        """Losers of the contest, then the main part, then the window."""
        self._full = True
        # whoever needs room brings one node at least, which pushes another out of the window
        self._bound_window(max(1, WINDOW_SHARE * self._nodes) - 1)
        self._bound_contenders(max(1, WAITING_SHARE * self._nodes))
        contenders, main = iter(self._contenders), chain(self._main.probation, self._main.protected)
        contender, victim = next(contenders, None), next(main, None)
        late: list[ChunkNode] = []
        while contender and victim:
            loser, following = contender, next(contenders, None)
            if self._sketch.estimate(contender.key) > self._sketch.estimate(victim.key):
                if victim.policy_state.mark is self._main.protected:
                    late.append(contender)  # this search has left the segment that it enters
                self._main.adopt(contender)
                self._waiting_nodes -= 1
                loser, victim = victim, next(main, None)
            contender = following
            yield loser
        yield from self._rest(contender, contenders)
        yield from self._rest(victim, main)
        yield from late
        yield from self._window

    def _bound_window(self, most: float) -> None:
        """Let nodes fall out of the window until it has at most so many."""
        while self._window_nodes > most and (node := self._window.coldest):
            self._window_nodes -= 1
            if self._full:
                self._contenders.move_to_warm_end((node,))
                node.policy_state.mark = self._contenders
                self._waiting_nodes += 1
            else:
                self._main.adopt(node)

    def _bound_contenders(self, most: float) -> None:
        """Let those in that have lost and not gone: the cache evicts what hangs below a node before the node itself."""
        while self._waiting_nodes > most and (node := self._contenders.coldest):
            self._main.adopt(node)
            self._waiting_nodes -= 1

    def _count(self, node: ChunkNode) -> None:
        self._sketch.add(node.key, PERIOD * max(KEYS // PERIOD, self._nodes))

    @staticmethod
    def _rest(first: ChunkNode | None, others: Iterator[ChunkNode]) -> Iterator[ChunkNode]:
        if first:
            yield first
            yield from others


@hookimpl
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:
    """Offer the policy to `--eviction-policy W-TinyLFU`."""
    return [WTinyLFU]
