"""The offline optimum (Belady's MIN): evicts what is asked for last of all, and keeps nothing that is asked for later.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5 (2), 1966. It
knows the future, so it is a bound, not a choice: no policy can hit more where all chunks have one size. Where they have
several it is a good policy that knows the future, and no bound.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence

from lmcache.core.index import Namespace
from lmcache.core.keys import ChainHash
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.simulator.trace import NO_LOOKUP, Event, Trace

NEVER = 1 << 62
"""The next use of what is not asked for again."""


class Opt(EvictionPolicy):
    """Belady's choice, for one replay of one trace. `advance` goes before every event.

    A bound for all policies only where chunks have one size: it does not weigh one large chunk against several small.
    """

    name = "opt"

    def __init__(self, next_uses: Sequence[Sequence[int]]) -> None:
        """`next_uses`: what `next_uses(trace)` gives, shared by all replays of it."""
        self._next_uses = next_uses
        self._next_use: dict[bytes, int] = {}
        self._heap: list[tuple[int, int, int, ChunkNode]] = []
        """(minus the next use, minus the depth, a tie breaker, node); entries of the past stay until they come up."""
        self._known: dict[ChunkNode, int] = {}
        """Each node's next use as the heap has it."""
        self._order = itertools.count()

    def advance(self, number: int, event: Event, namespace: Namespace) -> None:
        """Event `number` is next: learn when its chunks are asked for after it."""
        for chunk, use in zip(event.hashes, self._next_uses[number], strict=True):
            self._next_use[namespace.digest + chunk] = use

    def worth_storing(self, namespace: Namespace, hashes: Sequence[ChainHash], free: int) -> int:
        """How many leading chunks of a prompt to keep, given `free` cells: others than they would be missed sooner."""
        victims = self.victims()
        for number, chunk in enumerate(hashes):
            if chunk in namespace.nodes:
                continue
            use = self._next_use.get(namespace.digest + chunk, NEVER)
            if use == NEVER:
                return number
            while free < namespace.chunk_cells:
                victim = next(victims, None)
                if victim is None or self._known[victim] <= use:
                    return number
                free += victim.cells
            free -= namespace.chunk_cells
        return len(hashes)

    def insert(self, node: ChunkNode) -> None:
        """Take it in with its next use."""
        self._known[node] = 0
        self.touch([node])

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        """They are used now, so each has another next use."""
        for node in nodes:
            use = self._next_use.get(node.key, NEVER)  # type: ignore[call-overload]  # keys of the cache are bytes
            if self._known[node] != use:
                self._known[node] = use
                heapq.heappush(self._heap, (-use, -node.depth, next(self._order), node))

    def remove(self, node: ChunkNode) -> None:
        """Forget a node; its entry in the heap is passed over."""
        del self._known[node]

    def victims(self) -> Iterator[ChunkNode]:
        """From the one that is asked for last; of a prompt's chunks, asked for together, from the tail."""
        taken = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._known.get(entry[3]) == -entry[0]:
                    taken.append(entry)
                    yield entry[3]
        finally:
            for entry in taken:
                heapq.heappush(self._heap, entry)


def next_uses(trace: Trace) -> list[list[int]]:
    """For each event and each of its chunks, the number of the next event that looks it up."""
    upcoming: dict[tuple[int, ChainHash], int] = {}
    found: list[list[int]] = []
    for number in range(len(trace.events) - 1, -1, -1):
        event = trace.events[number]
        found.append([upcoming.get((event.namespace, chunk), NEVER) for chunk in event.hashes])
        if event.limit != NO_LOOKUP:
            upcoming.update(((event.namespace, chunk), number) for chunk in event.hashes)
    return found[::-1]
