"""Chunk nodes in an order: what most policies are made of, and what a third party's policy may be made of, too."""

from collections.abc import Iterator, Sequence
from typing import Any

from lmcache.core.policy import ChunkNode


class Link:
    """A node's place in a queue. `node.policy_state` holds it."""

    __slots__ = ("colder", "mark", "node", "warmer")

    node: ChunkNode
    colder: "Link"
    warmer: "Link"
    mark: Any
    """Free for the policy, and kept when the node moves to another queue."""


class NodeQueue:
    """Chunk nodes from cold to warm, in a doubly linked list that runs through `node.policy_state`.

    Every operation costs the same at a thousand nodes and at a million. An ordered dict does not: finding its oldest
    entry walks past the traces of all entries that were removed from its front since it last grew.

    A node is in one queue at a time, which owns its `policy_state` meanwhile: what a policy remembers about the node,
    it keeps in `node.policy_state.mark`. Nothing here refers to a removed node, not even in a cycle.
    """

    __slots__ = ("_end",)

    def __init__(self) -> None:
        # the list is a ring, closed by a link without a node: no operation has a special case at an end
        self._end = end = Link()
        end.colder = end.warmer = end

    def append(self, node: ChunkNode, mark: Any = None) -> None:
        """Put a node that is in no queue at the warm end."""
        end = self._end
        node.policy_state = link = Link()
        link.node = node
        link.mark = mark
        link.colder, link.warmer = end.colder, end
        end.colder.warmer = link
        end.colder = link

    def move_to_warm_end(self, nodes: Sequence[ChunkNode]) -> None:
        """Take nodes, each named once, out of their queues and put them here: the last is the warmest."""
        end = self._end
        links: list[Link] = [node.policy_state for node in nodes]
        at, count = 0, len(links)
        while at < count:
            first = last = links[at]
            at += 1
            # a prompt that was touched as a whole before still lies together, and moves in one piece
            while at < count and last.warmer is links[at]:
                last = links[at]
                at += 1
            colder, warmer = first.colder, last.warmer
            colder.warmer, warmer.colder = warmer, colder
            warmest = end.colder
            first.colder, last.warmer = warmest, end
            warmest.warmer, end.colder = first, last

    def move_to_cold_end(self, node: ChunkNode) -> None:
        """Take a node out of its queue and put it here: the next to go."""
        link, end = node.policy_state, self._end
        link.colder.warmer, link.warmer.colder = link.warmer, link.colder
        link.colder, link.warmer = end, end.warmer
        end.warmer.colder = link
        end.warmer = link

    @staticmethod
    def remove(node: ChunkNode) -> None:
        """Take a node out of the queue that it is in."""
        link = node.policy_state
        link.colder.warmer = link.warmer
        link.warmer.colder = link.colder
        node.policy_state = None

    @property
    def coldest(self) -> ChunkNode | None:
        """The node at the cold end; None when the queue is empty."""
        link = self._end.warmer
        return None if link is self._end else link.node

    def __iter__(self) -> Iterator[ChunkNode]:
        """Nodes from cold to warm. The queue must not change until the iteration ends or is given up."""
        end = self._end
        link = end.warmer
        while link is not end:
            yield link.node
            link = link.warmer
