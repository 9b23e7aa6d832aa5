"""When chunks expire. Knows no clock: it is told what time it is."""

import heapq
import math
from collections.abc import Iterator

from lmcache.core.index import Node

FEWEST_ENTRIES = 1024
"""Entries that are kept without looking whether they still mean anything."""


class Deadlines:
    """Nodes that expire, by when. A node's own `expires` is what holds: entries here may come too early, never late."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Node]] = []
        self._waiting: set[Node] = set()
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def next(self) -> float:
        """When somebody should ask for what is due; infinite if never."""
        return self._entries[0][0] if self._entries else math.inf

    def watch(self, node: Node) -> None:
        """The node expires, or does so at another time than before."""
        if node not in self._waiting and node.expires < math.inf:
            self._waiting.add(node)
            self._push(node.expires, node)

    def forget(self, node: Node) -> None:
        """The node has gone."""
        self._waiting.discard(node)
        if len(self._entries) > max(FEWEST_ENTRIES, 2 * len(self._waiting)):
            # those that go before they expire must not pile up until they would have
            self._entries = [entry for entry in self._entries if entry[2] in self._waiting]
            heapq.heapify(self._entries)

    def due(self, now: float, most: int) -> Iterator[Node]:
        """Nodes that have expired, `most` at most, each once; the caller makes them go, or watches them `again`."""
        while most and self._entries and self._entries[0][0] <= now:
            _, _, node = heapq.heappop(self._entries)
            if node not in self._waiting:
                continue
            if node.expires > now:
                self.again(node, node.expires)
                continue
            most -= 1
            yield node

    def again(self, node: Node, when: float) -> None:
        """Look at the node once more at that time."""
        if when == math.inf:
            self._waiting.discard(node)
        else:
            self._push(when, node)

    def _push(self, when: float, node: Node) -> None:
        self._number += 1  # nodes have no order
        heapq.heappush(self._entries, (when, self._number, node))
