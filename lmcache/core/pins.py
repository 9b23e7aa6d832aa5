"""How much of the arena one owner's tickets hold."""

from collections.abc import Iterable

from lmcache.core.index import Node


class Pins:
    """The chunks that one owner's tickets hold: each counted once, however many of its tickets hold it."""

    __slots__ = ("_held", "cells", "tickets")

    def __init__(self) -> None:
        self.tickets = 0
        self.cells = 0
        """Cells of all of them, as they were when first held."""
        self._held: dict[Node, tuple[int, int]] = {}  # node → tickets that hold it, its cells

    @property
    def nodes(self) -> set[Node]:
        """All of them."""
        return set(self._held)

    def added_by(self, nodes: Iterable[Node]) -> int:
        """Cells by which holding `nodes` as well would add to `cells`."""
        return sum(node.cells for node in nodes if node not in self._held)

    def take(self, nodes: Iterable[Node]) -> None:
        """One more ticket holds `nodes`."""
        self.tickets += 1
        for node in nodes:
            node.pins += 1
            held = self._held.get(node)
            if held is None:
                self._held[node] = (1, node.cells)
                self.cells += node.cells
            else:
                self._held[node] = (held[0] + 1, held[1])

    def release(self, nodes: Iterable[Node]) -> None:
        """A ticket that held `nodes` has ended."""
        self.tickets -= 1
        for node in nodes:
            node.pins -= 1
            tickets, cells = self._held[node]
            if tickets > 1:
                self._held[node] = (tickets - 1, cells)
            else:
                del self._held[node]
                self.cells -= cells
