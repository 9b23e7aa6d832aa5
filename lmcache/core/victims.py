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
    """What hangs below nodes without bytes first, then the policy's order.

    Before each node, whatever hangs below it.
    """
    for node in orphaned:
        yield from node.postorder()
    for victim in policy.victims():
        if not isinstance(victim, Node):
            continue  # a policy's invention
        if victim.live_children:
            # leaves before trunks, whatever the policy says
            yield from victim.postorder()
        else:
            yield victim
