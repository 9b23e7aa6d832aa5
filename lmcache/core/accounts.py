"""Who holds how much of L1, what they may hold, and in which order each one's chunks were last used.

Knows no policy: it is what the cache falls back on where the policy's order does not say enough.
"""

import heapq
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter

import attrs

from lmcache.core.hints import Priority
from lmcache.core.index import Node

EVERYBODY_ELSE = "*"
"""As a tenant's name in limits: each tenant that is not named."""

_HIGH = Priority.HIGH  # looking it up in its class takes longer than comparing it

_last_use = attrgetter("used")


def by_last_use(lists: Sequence[Iterator[Node]]) -> Iterator[Node]:
    """Chunks of several lists of this kind, the one used longest ago first."""
    return lists[0] if len(lists) == 1 else heapq.merge(*lists, key=_last_use)


@attrs.frozen
class Limits:
    """What tenants may hold and what they are promised, in cells."""

    quotas: Mapping[str, int] = attrs.field(factory=dict)
    """At most so much; a tenant that stores more gives up its own chunks for it."""
    guarantees: Mapping[str, int] = attrs.field(factory=dict)
    """What others cannot take from it, once it has it."""


@attrs.define(eq=False)
class Account:
    """A tenant with limits of its own, or all those without."""

    name: str
    """Empty for all those without limits."""
    quota: int | None = None
    """Cells; None: as many as there are."""
    guaranteed: int = 0
    """Cells."""
    cells: int = 0
    """Written and being written."""
    lists: tuple["OrderedDict[Node, None]", ...] = attrs.field(
        init=False, factory=lambda: tuple(OrderedDict() for _ in Priority)
    )
    """By priority as an index (NORMAL, HIGH, LOW): its chunks, the one used longest ago first."""

    @property
    def room(self) -> int:
        """Cells that its quota leaves it."""
        return sys.maxsize if self.quota is None else self.quota - self.cells

    def fits(self, cells: int) -> bool:
        """Whether its quota leaves it so many cells."""
        return self.quota is None or self.cells + cells <= self.quota

    def chunks(self, priority: Priority) -> "OrderedDict[Node, None]":
        """Its chunks of one priority, the one used longest ago first."""
        return self.lists[priority]

    @property
    def empty(self) -> bool:
        """Whether it has no chunk."""
        return not any(self.lists)


class Accounts:
    """All accounts. Every node is in one, from its insertion to its removal."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._others = Account("")
        self._limited = bool(limits.quotas or limits.guarantees)
        self.any_guarantee = bool(limits.guarantees)
        self._named = (limits.quotas.keys() | limits.guarantees.keys()) - {EVERYBODY_ELSE}
        self._accounts: dict[str, Account] = {}
        self._holders: tuple[dict[Account, None], ...] = tuple({} for _ in Priority)
        """By priority as an index: the accounts that have chunks of it."""
        self._uses = 0
        self.high_cells = 0
        """Cells of all chunks of HIGH priority."""
        for tenant in sorted(self._named):
            self._accounts[tenant] = self.of(tenant)

    def of(self, tenant: str) -> Account:
        """The account that a tenant's chunks are counted in."""
        if not self._limited:
            return self._others
        account = self._accounts.get(tenant)
        if account:
            return account
        quota, guaranteed = (
            limits.get(tenant, limits.get(EVERYBODY_ELSE)) for limits in (self._limits.quotas, self._limits.guarantees)
        )
        return self._others if quota is None and not guaranteed else Account(tenant, quota, guaranteed or 0)

    @property
    def all(self) -> Collection[Account]:
        """Every account that there is now."""
        return [self._others, *self._accounts.values()]

    def holders(self, priority: Priority) -> Collection[Account]:
        """The accounts that have chunks of one priority: of thousands of tenants, few have any that go first."""
        return self._holders[priority]

    def insert(self, node: Node) -> None:
        """A new node, of the account and the priority that it names."""
        account, priority = node.account, node.priority
        if account is not self._others:
            self._accounts[account.name] = account
        self._uses += 1
        node.used = self._uses
        chunks = account.lists[priority]
        if not chunks:
            self._holders[priority][account] = None
        chunks[node] = None

    def remove(self, node: Node) -> None:
        """The node has gone, and holds no cells any more."""
        account, priority = node.account, node.priority
        chunks = account.lists[priority]
        del chunks[node]
        if chunks:
            return
        del self._holders[priority][account]
        if account.empty and account.name not in self._named:
            # tenants come and go, and nothing may grow with the number of those that have gone
            self._accounts.pop(account.name, None)

    def take(self, node: Node, cells: int) -> None:
        """The node has so many cells more; fewer, if negative."""
        node.cells += cells
        node.account.cells += cells
        if node.priority is _HIGH:
            self.high_cells += cells

    def touch(self, nodes: Sequence[Node]) -> None:
        """These nodes were used, the last one last."""
        self._uses += 1
        used = self._uses
        for node in nodes:  # hundreds, for every lookup
            node.used = used
            node.account.lists[node.priority].move_to_end(node)

    def change_priority(self, node: Node, priority: Priority) -> None:
        """From now on the node has another priority. It counts as used now."""
        cells = node.cells
        self.take(node, -cells)
        self.remove(node)
        node.priority = priority
        self.insert(node)
        self.take(node, cells)
