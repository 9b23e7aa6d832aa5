"""Who is evicted: the policy's order, bent where it would break a chain, or take what is in use or promised."""

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator

from lmcache.core.accounts import Account, Accounts, by_last_use
from lmcache.core.hints import Priority
from lmcache.core.index import Node
from lmcache.core.order import VICTIM_SCAN, GuardedOrder

IN_THE_WAY = 64
"""Nodes in use that one search passes over before the policy hears that they are in use."""

BRANCH_PATIENCE = 16
"""Nodes in use below one trunk, after which the search goes on elsewhere: what is free there has its own turn."""

SPARED_SCAN = 512
"""Nodes that are spared, at most, before the policy's order is left for the order of last use."""


class VictimSearch:
    """One search for nodes to evict, for the sake of `asker`.

    Who goes, in this order: what hangs below holes; chunks of low priority; the policy's order; where it does not name
    enough, the order of last use; chunks of high priority, which come into their own turn once they fill more than
    `high_limit` cells. Spared is what another account is guaranteed, and what is `unsaved`: a tier is to have it first;
    `within`, if given, spares all other accounts.
    """

    def __init__(
        self,
        order: GuardedOrder,
        accounts: Accounts,
        orphaned: Iterable[Node],
        asker: Account,
        *,
        within: Account | None = None,
        high_limit: int = 0,
        unsaved: Callable[[Node], bool] | None = None,
    ) -> None:
        self._order = order
        self._accounts = accounts
        self._orphaned = orphaned
        self._asker = asker
        self._within = within
        self._unsaved = unsaved
        self._sparing_high = accounts.high_cells <= high_limit
        self._sparing = bool(unsaved or within or accounts.high_cells or accounts.any_guarantee)
        """Whether anybody is spared at all: most servers have no limits, and look at a thousand chunks a search."""
        self._seen: set[Node] = set()
        self._taken: Counter[Account] = Counter()
        """Cells of the victims chosen so far."""

    def choose(self, free: int, wanted: int, unit: int) -> list[Node]:
        """Nodes whose cells, with `free` ones, make `wanted` cells, or as many whole units as can be had.

        In the order of eviction, leaves first, and marked as doomed. Among them may be holes, which free nothing and go
        with the last chunk below them.
        """
        chosen: list[Node] = []
        in_use: list[Node] = []
        reached = free
        candidates = self._candidates()
        for node in itertools.islice(candidates, VICTIM_SCAN):
            if not node.evictable:
                in_use.append(node)
            elif not (self._sparing and self._spared(node)):
                node.doom()
                chosen.append(node)
                reached += node.cells
                self._taken[node.account] += node.cells
                if reached >= wanted:
                    break
        candidates.close()
        if len(in_use) >= IN_THE_WAY:
            # otherwise every later search would pass over them again, or end among them and find nobody, ever
            self._order.touch(list(dict.fromkeys(in_use)))
        # nobody goes for the sake of half an object
        surplus = reached - min(wanted, reached // unit * unit)
        while chosen and chosen[-1].cells <= surplus:
            node = chosen.pop()
            surplus -= node.cells
            node.spare()
        return chosen

    def _spared(self, node: Node) -> bool:
        account = node.account
        if self._unsaved is not None and self._unsaved(node):
            return True
        if self._within is not None and account is not self._within:
            return True
        if self._sparing_high and node.priority is Priority.HIGH:
            return True
        if not account.guaranteed or account is self._asker:
            return False
        return account.cells - self._taken[account] - node.cells < account.guaranteed

    def _candidates(self) -> Generator[Node, None, None]:
        """Each node once, after those below it."""
        seen = self._seen
        for node in self._orphaned:
            yield from _from_its_leaves(node, seen)
        for victim in self._in_order():
            if victim in seen:
                continue  # a trunk that was reached from its leaves
            if victim.live_children:
                # leaves before trunks, whatever the policy says
                yield from _from_its_leaves(victim, seen)
            else:
                seen.add(victim)
                yield victim

    def _in_order(self) -> Iterator[Node]:
        yield from self._by_last_use(Priority.LOW)
        spared = 0
        for node in self._order.victims():
            if not (self._sparing and self._spared(node)):
                yield node
            elif (spared := spared + 1) == SPARED_SCAN:
                break
        yield from self._by_last_use(Priority.NORMAL)
        self._sparing_high = False
        # those that were met below others, and spared
        self._seen.difference_update([n for n in self._seen if n.priority is Priority.HIGH and not n.doomed])
        yield from self._by_last_use(Priority.HIGH)

    def _by_last_use(self, priority: Priority) -> Iterator[Node]:
        accounts = [self._within] if self._within else self._accounts.holders(priority)
        return by_last_use([self._to_be_had(account, priority) for account in accounts])

    def _to_be_had(self, account: Account, priority: Priority) -> Iterator[Node]:
        """An account's chunks, until nothing more can be taken from it."""
        promised = 0 if account is self._asker else account.guaranteed
        for node in account.chunks(priority):
            if promised and account.cells - self._taken[account] <= promised:
                return
            yield node


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
