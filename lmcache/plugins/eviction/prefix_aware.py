"""prefix-aware: made for KV caches. Knows chains and what chunks cost, and learns when they come back."""

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import attrs

from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.plugins.eviction.arrivals import Arrivals
from lmcache.plugins.eviction.ghosts import Ghosts
from lmcache.plugins.eviction.queue import NodeQueue
from lmcache.plugins.eviction.returns import BINS, Life, Returns, bin_of

USES = (1, 2, 3, 4, 8, 16)
"""Chunks used as often, from one of these to the next, are of one kind: popularity counts by its order of magnitude."""

MOST_USES = USES[-1]
"""Nobody counts any further: what is used more often is of the same kind."""

KINDS = 2 * len(USES)

KIND_OF = tuple(
    tuple(bisect_right(USES, uses) - 1 + len(USES) * tail for uses in range(MOST_USES + 1)) for tail in (False, True)
)
"""By whether it is a prompt's tail, then by its uses: looked up for every chunk of every prompt."""

GHOSTS = 4
"""Chunks that are remembered for each one that is cached: what pauses longer than it stays must be seen to return."""

FEWEST_GHOSTS = 4096

HINTED = 8
"""How much more a chunk of high priority is worth than another, and how much less one of low priority."""

DEEP = 8192
"""Chunks before it at which a chunk counts twice, for attention looks back at all of them. Large models pay that much
earlier, but deep chunks come back less often: with 256, a tenth of the conversations' chunks hits 1.4 points less."""


@attrs.define(eq=False)
class Place(Life):
    """What is known of a node: `policy_state.mark`; and of a chunk that is gone."""

    uses: int = 1
    tail: bool = False
    """Whether a prompt ended here, and none went on since."""
    priority: int = 0
    """What requests said of it when it was put into its queue."""
    followers: int = 0
    """Known nodes of which it is the parent."""


class PrefixAware(EvictionPolicy):
    """Evicts the leaf from which fewest hits can be expected for the time that it would stay, weighted by their cost.

    *Learned*: what `Returns` has seen of chunks used as often, and of prompts' ends, at that age. A conversation that
    comes back after its user has read the answer is worth little at once, more later, and nothing after a long time;
    no order of recency says that. *Known*: only leaves can go, so trunks do not compete until their last branch is
    gone; a deep chunk costs more to compute again; what requests say of a chunk, by its priority.

    Where there is little to go by, recency decides. Chunks of one kind and one bin go in the order of their last use, a
    prompt at a time, and the first bin is as wide as a few long prompts: an L1 that holds no more than these, whose
    chunks are all as young, is told no more by what was learned than which kinds come back. Counts nodes, not cells.

    The index is Gittins's (1979, see `returns.py`); learned from when objects return, as in LHD (N. Beckmann, H. Chen,
    A. Cidon, LHD: improving cache hit rate by maximizing hit density, NSDI 2018).

    Leaves of one kind, bin of age and priority are in one queue, so a search compares queues, not nodes.
    """

    name = "prefix-aware"

    def __init__(self) -> None:
        self._returns = Returns(KINDS)
        self._worths = self._returns.worth()
        self._leaves: list[dict[tuple[int, int], NodeQueue]] = [{} for _ in range(BINS)]
        """By bin of age; then by kind and priority, as far as there ever were any."""
        self._trunks = NodeQueue()
        self._ghosts = Ghosts()
        self._arrivals = Arrivals()
        self._nodes = 0

    def insert(self, node: ChunkNode) -> None:
        """A new leaf, with the uses of its former life."""
        returns, place = self._returns, Place()
        known: Place | None = self._ghosts.pop(node.key)
        if known:
            returns.end((known,))
            place.uses = min(known.uses + 1, MOST_USES)
        place.kind = KIND_OF[False][place.uses]
        place.since = returns.now
        place.priority = node.priority
        self._queue(place, 0).append(node, place)
        self._arrivals.insert(node)
        self._nodes += 1
        above = _place(node.parent)
        if above:
            above.followers += 1
            if above.followers == 1 and node.parent:
                self._trunks.move_to_warm_end((node.parent,))

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """A use ends one life of each node and begins another; so does a store, for what it stored."""
        stored = self._arrivals.settle(nodes)
        begun = stored or nodes
        places: list[Place] = [node.policy_state.mark for node in begun]
        self._returns.now += len(begun)
        if stored:
            for place in places:
                place.tail = False
            places[0].tail = True
            for node in nodes[len(stored) : len(stored) + 1]:
                node.policy_state.mark.tail = False  # the prompt went on
        else:
            self._returns.end(places)
        self._begin(begun, places, used=not stored)
        self._returns.advance()

    def remove(self, node: ChunkNode) -> None:
        """Forget a node, and remember its chunk."""
        place: Place = node.policy_state.mark
        NodeQueue.remove(node)
        self._arrivals.remove(node)
        self._nodes -= 1
        above = _place(node.parent)
        if above and node.parent:
            above.followers -= 1
            if not above.followers:
                self._file(node.parent, above)
        self._ghosts.add(node.key, place)
        while len(self._ghosts) > max(FEWEST_GHOSTS, GHOSTS * self._nodes):
            self._returns.forget(self._ghosts.pop_oldest())

    def victims(self) -> Iterator[ChunkNode]:
        """Leaves by worth, the least first; a trunk as soon as all that follows it was named."""
        self._age()
        self._worths = self._returns.worth()
        line: list[tuple[float, int, int, ChunkNode, Iterator[ChunkNode]]] = []
        for queue in (queue for queues in self._leaves for queue in queues.values()):
            rest = iter(queue)
            for node in rest:
                line.append((*self._worth(node), len(line), node, rest))
                break
        heapq.heapify(line)
        number, unnamed = len(line), dict[ChunkNode, int]()
        while line:
            _, _, queue_number, node, rest = line[0]
            yield node
            following = next(rest, None)
            if following:
                heapq.heapreplace(line, (*self._worth(following), queue_number, following, rest))
            else:
                heapq.heappop(line)
            above = _place(node.parent)
            if above and node.parent:
                unnamed[node.parent] = unnamed.get(node.parent, above.followers) - 1
                if not unnamed[node.parent]:
                    number += 1
                    heapq.heappush(line, (*self._worth(node.parent), number, node.parent, iter(())))

    def _begin(self, nodes: Sequence[ChunkNode], places: Sequence[Place], *, used: bool) -> None:
        """A life of each begins. Plain loops, for a long prompt has hundreds of chunks, and is waiting."""
        for place in places:
            uses = place.uses
            if used and uses < MOST_USES:
                place.uses = uses = uses + 1
            place.kind = KIND_OF[place.tail][uses]
        self._returns.begin(places)
        for node, place in zip(nodes, places, strict=True):
            if not place.followers:
                place.priority = node.priority
                self._queue(place, 0).move_to_warm_end((node,))

    def _queue(self, place: Place, number: int) -> NodeQueue:
        queues = self._leaves[number]
        queue = queues.get((place.kind, place.priority))
        if queue is None:
            queue = queues[place.kind, place.priority] = NodeQueue()
        return queue

    def _file(self, node: ChunkNode, place: Place) -> None:
        """Put a leaf where its kind and age belong. What follows one that went is as old, and goes next, as in LRU."""
        place.priority = node.priority
        queue = self._queue(place, bin_of(self._returns.now - place.since))
        coldest = _place(queue.coldest)
        if coldest and place.since <= coldest.since:
            queue.move_to_cold_end(node)
        else:
            queue.move_to_warm_end((node,))

    def _age(self) -> None:
        """Move leaves that have outgrown their bin: each does so once for each bin, the oldest first."""
        now = self._returns.now
        for number, queue in [(n, queue) for n in range(BINS - 2, -1, -1) for queue in self._leaves[n].values()]:
            while node := queue.coldest:
                place: Place = node.policy_state.mark
                if bin_of(now - place.since) <= number:
                    break
                self._file(node, place)

    def _worth(self, node: ChunkNode) -> tuple[float, int]:
        """Hits to be expected for a place and time, by what they save and what is said of them; then the last use."""
        place: Place = node.policy_state.mark
        age = bin_of(self._returns.now - place.since)
        hits = self._worths[place.kind][age]
        return hits * (1 + node.depth / DEEP) * HINTED**place.priority, place.since


def _place(node: ChunkNode | None) -> Place | None:
    """What is known of a node; None for one that is not known (any more)."""
    place: Place | None = node.policy_state.mark if node and node.policy_state else None
    return place


@hookimpl
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:
    """Offer the policy to `--eviction-policy prefix-aware`."""
    return [PrefixAware]
