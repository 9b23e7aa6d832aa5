"""Who is evicted: the policy's order, bent where it would break a chain or take what is in use."""

import itertools
from collections.abc import Iterable, Iterator

from lmcache.core.index import Node
from lmcache.core.policy import EvictionPolicy

VICTIM_SCAN = 4096
"""Nodes looked at, at most, in one search for victims: bounds the request when nearly everything is pinned."""


def choose_victims(policy: EvictionPolicy, orphaned: Iterable[Node], cells: int) -> list[Node]:
    """Nodes that free at least `cells`, leaves first, marked as doomed; none at all when that much cannot be freed."""
    chosen: list[Node] = []
    freed = 0
    for node in itertools.islice(_candidates(policy, orphaned), VICTIM_SCAN):
        if node.evictable and node.cells:
            node.doom()
            chosen.append(node)
            freed += node.cells
            if freed >= cells:
                return chosen
    for node in chosen:
        node.spare()
    return []


def _candidates(policy: EvictionPolicy, orphaned: Iterable[Node]) -> Iterator[Node]:
    """What hangs below nodes without bytes first, then the policy's order; each node once, after those below it."""
    seen: set[Node] = set()
    for node in orphaned:
        yield from _from_its_leaves(node, seen)
    for victim in policy.victims():
        if not isinstance(victim, Node) or victim in seen:
            continue  # a policy's invention, or a trunk that was reached from its leaves
        if victim.live_children:
            # leaves before trunks, whatever the policy says
            yield from _from_its_leaves(victim, seen)
        else:
            seen.add(victim)
            yield victim


def _from_its_leaves(top: Node, seen: set[Node]) -> Iterator[Node]:
    """The tree below and including `top`, older branches first, and no branch that was seen before.

    Without `seen`, a held prompt of n chunks would be walked n times, and the search would end before it found others.
    """
    node = _oldest_leaf(top, seen)
    while True:
        seen.add(node)
        yield node
        if node is top or node.parent is None:
            return
        sibling = _first_unseen(node.next_sibling, seen)
        node = _oldest_leaf(sibling, seen) if sibling else node.parent


def _oldest_leaf(node: Node, seen: set[Node]) -> Node:
    while child := _first_unseen(node.first_child, seen):
        node = child
    return node


def _first_unseen(node: Node | None, seen: set[Node]) -> Node | None:
    """The first of `node` and its younger siblings that this search has not looked at."""
    while node in seen:
        node = node.next_sibling
    return node
