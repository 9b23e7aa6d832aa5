"""Who is evicted: the policy's order, bent where it would break a chain or take what is in use."""

import itertools
from collections.abc import Generator, Iterable, Iterator

from lmcache.core.index import Node
from lmcache.core.order import VICTIM_SCAN, GuardedOrder

IN_THE_WAY = 64
"""Nodes in use that one search passes over before the policy hears that they are in use."""

BRANCH_PATIENCE = 16
"""Nodes in use below one trunk, after which the search goes on elsewhere: what is free there has its own turn."""


def choose_victims(order: GuardedOrder, orphaned: Iterable[Node], free: int, wanted: int, unit: int) -> list[Node]:
    """Nodes whose cells, with `free` ones, make `wanted` cells, or as many whole units as can be had.

    In the order of eviction, leaves first, and marked as doomed. Among them may be holes, which free nothing and go
    with the last chunk below them.
    """
    chosen: list[Node] = []
    in_use: list[Node] = []
    reached = free
    candidates = _candidates(order, orphaned)
    for node in itertools.islice(candidates, VICTIM_SCAN):
        if node.evictable:
            node.doom()
            chosen.append(node)
            reached += node.cells
            if reached >= wanted:
                break
        else:
            in_use.append(node)
    candidates.close()
    if len(in_use) >= IN_THE_WAY:
        # otherwise every later search would pass over them again, or end among them and find nobody, ever
        order.touch(in_use)
    # nobody goes for the sake of half an object
    surplus = reached - min(wanted, reached // unit * unit)
    while chosen and chosen[-1].cells <= surplus:
        node = chosen.pop()
        surplus -= node.cells
        node.spare()
    return chosen


def _candidates(order: GuardedOrder, orphaned: Iterable[Node]) -> Generator[Node, None, None]:
    """What hangs below nodes without bytes first, then the policy's order; each node once, after those below it."""
    seen: set[Node] = set()
    for node in orphaned:
        yield from _from_its_leaves(node, seen)
    for victim in order.victims():
        if victim in seen:
            continue  # a trunk that was reached from its leaves
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
    patience = BRANCH_PATIENCE
    node: Node | None = _oldest_leaf(top, seen)
    while node and node is not top:
        seen.add(node)
        yield node
        patience -= not node.doomed
        sibling = _first_unseen(node.next_sibling, seen)
        node = top if patience <= 0 else _oldest_leaf(sibling, seen) if sibling else node.parent
    seen.add(top)
    yield top


def _oldest_leaf(node: Node, seen: set[Node]) -> Node:
    while child := _first_unseen(node.first_child, seen):
        node = child
    return node


def _first_unseen(node: Node | None, seen: set[Node]) -> Node | None:
    """The first of `node` and its younger siblings that this search has not looked at."""
    while node in seen:
        node = node.next_sibling
    return node
