"""How much of the arena one owner's tickets hold."""

from collections.abc import Collection, Iterable

from lmcache.core.index import Node


class Pins:
    """The chunks that one owner's tickets hold: each counted once, however many of its tickets hold it."""

    __slots__ = ("_again", "_held", "cells", "tickets")

    def __init__(self) -> None:
        self.tickets = 0
        self.cells = 0
        """Cells of all of them, as they were when first held."""
        self._held: dict[Node, int] = {}  # node → its cells
        self._again: dict[Node, int] = {}  # node → tickets that hold it besides the first, if any

    @property
    def nodes(self) -> set[Node]:
        """All of them."""
        return set(self._held)

    def added_by(self, nodes: Iterable[Node]) -> int:
        """Cells by which holding `nodes` as well would add to `cells`."""
        held = self._held
        return sum([node.cells for node in nodes if node not in held])

    def take(self, nodes: Collection[Node]) -> None:
        """One more ticket holds `nodes`."""
        self.tickets += 1
        for node in nodes:
            node.pins += 1
        distinct = dict.fromkeys(nodes)
        for node in distinct.keys() & self._held.keys():
            self._again[node] = self._again.get(node, 0) + 1
        added = {node: node.cells for node in distinct if node not in self._held}
        self._held.update(added)
        self.cells += sum(added.values())

    def release(self, nodes: Collection[Node]) -> None:
        """A ticket that held `nodes` has ended."""
        self.tickets -= 1
        for node in nodes:
            node.pins -= 1
        if not self.tickets:
            self._held.clear()
            self._again.clear()
            self.cells = 0
            return
        for node in dict.fromkeys(nodes):
            others = self._again.pop(node, 0)
            if others > 1:
                self._again[node] = others - 1
            elif not others:
                self.cells -= self._held.pop(node)
