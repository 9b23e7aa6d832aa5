"""Tells a use from a store, for policies that count uses."""

from collections.abc import Sequence
from itertools import takewhile

from lmcache.core.policy import ChunkNode


class Arrivals:
    """The nodes that were inserted and not touched yet.

    A store touches the new nodes and the chain above them. The prompt's lookup has touched that chain already, and a
    prompt that is stored in sixteen parts touches its beginning sixteen times: none of this is a use. A policy hands on
    its calls of `insert` and `remove`, and asks here what a call of `touch` means.
    """

    __slots__ = ("_new",)

    def __init__(self) -> None:
        self._new: dict[ChunkNode, None] = {}

    def insert(self, node: ChunkNode) -> None:
        """`node` is new."""
        self._new[node] = None

    def remove(self, node: ChunkNode) -> None:
        """`node` is gone."""
        if self._new:
            self._new.pop(node, None)

    def settle(self, nodes: Sequence[ChunkNode]) -> list[ChunkNode]:
        """What a touch of `nodes` stores, from its tail on; empty when it is a use of every one of them."""
        if not self._new or not nodes or nodes[0] not in self._new:
            return []
        stored = list(takewhile(self._new.__contains__, nodes))
        for node in stored:
            del self._new[node]
        return stored
