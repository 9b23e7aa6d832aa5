"""What is held: by one owner's tickets, and by users who pin prefixes."""

import math
from collections.abc import Collection, Iterable, Sequence

import attrs

from lmcache.core.index import Namespace, Node
from lmcache.core.protocol import ErrorCode
from lmcache.errors import Refused


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


@attrs.frozen
class PrefixPin:
    """The leading chunks of a prompt, kept until somebody unpins them or their time is over."""

    id: int
    namespace: Namespace
    nodes: Sequence[Node]
    until: float
    """On the clock of `Cache.advance`."""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt that it covers."""
        return len(self.nodes) * self.namespace.chunk_size


class PrefixPins:
    """All of them. Together they hold `limit` cells at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = Pins()
        self._pins: dict[int, PrefixPin] = {}
        self.next_end = math.inf
        """When the first of them ends."""

    @property
    def all(self) -> Collection[PrefixPin]:
        """Those that have not ended."""
        return self._pins.values()

    @property
    def cells(self) -> int:
        """Cells that they hold."""
        return self._held.cells

    def pin(self, number: int, namespace: Namespace, nodes: Sequence[Node], until: float) -> PrefixPin:
        """Hold these chunks. Raises Refused when they are too many."""
        wanted = self._held.cells + self._held.added_by(nodes)
        if wanted > self._limit:
            raise Refused(
                f"with this prefix of {len(nodes)} chunks, pins would hold {wanted} cells; {self._limit} are allowed, "
                "a quarter of L1",
                code=ErrorCode.FULL,
                remedy="unpin others (lmcache pin --list), pin a shorter prefix, or give L1 more memory",
            )
        self._held.take(nodes)
        pin = self._pins[number] = PrefixPin(number, namespace, tuple(nodes), until)
        self.next_end = min(self.next_end, until)
        return pin

    def unpin(self, number: int) -> None:
        """Let one go. Raises Refused when there is none of that number."""
        pin = self._pins.pop(number, None)
        if pin is None:
            raise Refused(
                f"there is no pin {number}, or it has ended", code=ErrorCode.STALE, remedy="see lmcache pin --list"
            )
        self._held.release(pin.nodes)
        self.next_end = min((each.until for each in self._pins.values()), default=math.inf)

    def advance(self, now: float) -> None:
        """Let go those whose time is over."""
        while self.next_end <= now:
            for pin in [each for each in self._pins.values() if each.until <= now]:
                self.unpin(pin.id)
