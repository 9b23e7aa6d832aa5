"""Which chunks are in L1, how many cells they hold, when each expires, and who goes when room is needed.

The half of the cache's state machine that knows no reservation and no ticket: `core/cache.py` is the other one, and
says what holds between any two of its calls.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from lmcache.core.accounts import Account, Accounts, Limits
from lmcache.core.cells import CellAllocator, unpack_cells
from lmcache.core.expiry import Deadlines
from lmcache.core.hints import NO_HINTS, Hints, Priority
from lmcache.core.index import Namespace, Node
from lmcache.core.keys import ChainHash
from lmcache.core.metrics import Counters
from lmcache.core.order import GuardedOrder
from lmcache.core.policy import EvictionPolicy
from lmcache.core.victims import VictimSearch

HIGH_SHARE = 0.5
"""Chunks of high priority that hold more of L1 than this are treated as others are."""

EXPIRED_AT_ONCE = 1024
"""Chunks that one call drops, at most, because they have expired: others are waiting to be served."""

EXPIRED_RETRY_SECONDS = 1.0
"""Chunks that have expired and are in use are looked at again so much later. Nobody is served them meanwhile."""


class Residents:
    """The chunks that are there: every change of what the index holds, and of who holds which cells, is made here."""

    def __init__(self, allocator: CellAllocator, policy: EvictionPolicy, limits: Limits, counters: Counters) -> None:
        self.allocator = allocator
        self.accounts = Accounts(limits)
        self.counters = counters
        self.now = 0.0
        self.order = GuardedOrder(policy, self.accounts, counters)
        self.order.resize(allocator.cells)
        self.orphaned: dict[Node, None] = {}
        """Holes: nodes without bytes that others hang below; what hangs there is evicted first."""
        self.unsaved: Callable[[Node], bool] | None = None
        """Whether a chunk must not go before a tier has it."""
        self.on_evicted: Callable[[Node], None] | None = None
        """Hears of every chunk that held something and goes."""
        self.on_kept: Callable[[Node], None] | None = None
        """Hears of every chunk that was to expire and is not to any more."""
        self._deadlines = Deadlines()
        self._high_limit = int(allocator.cells * HIGH_SHARE)
        self._demoted = False
        """Whether there ever was a chunk of low priority: until then, the hot path does not look for any."""

    # ------------------------------------------------------------------------------------------------- coming and going

    def insert(
        self, namespace: Namespace, chain_hash: ChainHash, parent: Node | None, tenant: str, hints: Hints
    ) -> Node:
        """A new chunk, that holds nothing yet."""
        node = Node(namespace, chain_hash, parent, tenant, self.accounts.of(tenant))
        if hints is not NO_HINTS:
            node.priority = Priority.NORMAL if hints.priority is None else hints.priority
            node.expires = self._until(hints)
            self._demoted = self._demoted or node.priority is Priority.LOW
            self._deadlines.watch(node)
        node.link()
        namespace.nodes[chain_hash] = node
        self.order.insert(node)
        return node

    def chain_to(self, namespace: Namespace, hashes: Sequence[ChainHash], tenant: str, hints: Hints) -> Node | None:
        """The node of the last of a prompt's chunks, no two alike; it and those before it are made where they lack.

        None where the last one that is there has expired. Whoever gives the node nothing to hold has to `prune` it.
        """
        known = next((n for n in range(len(hashes), 0, -1) if hashes[n - 1] in namespace.nodes), 0)
        node = namespace.nodes[hashes[known - 1]] if known else None
        if node and node.expires <= self.now:
            return None
        for chain_hash in hashes[known:]:
            above, node = node, self.insert(namespace, chain_hash, node, tenant, hints)
            if above and not above.cells:
                self.orphaned[above] = None  # a hole, until it is filled
        if node and known < len(hashes):
            self.retain(node.chain(), hints)  # nothing expires before what hangs below it
        return namespace.nodes[hashes[-1]]

    def grant(self, node: Node, cells: int) -> tuple[int, ...] | None:
        """So many cells for one object of `node`, whatever has to be evicted for them; None if they cannot be had."""
        account = node.account
        limited = account.quota is not None
        if self.allocator.free < cells or (limited and not account.fits(cells)):
            # the end of the prompt itself may go, so that its beginning is whole
            node.pins += 1
            self.make_room(cells, cells, account)
            node.pins -= 1
        got = None if limited and not account.fits(cells) else self.allocator.allocate(cells)
        if got is None:
            self.prune(node)
            return None
        self.accounts.take(node, cells)
        if self.orphaned:
            self.orphaned.pop(node, None)
        return got

    def give_back(self, node: Node, cells: Sequence[int]) -> None:
        """An object of `node` was not written after all."""
        self.allocator.release(cells)
        self.accounts.take(node, -len(cells))
        self.prune(node)

    @contextlib.contextmanager
    def kept(self, nodes: Sequence[Node]) -> Iterator[None]:
        """Keep `nodes`, and what they hang from, from being evicted; afterwards forget those that stand for nothing."""
        for node in nodes:
            node.pins += 1
        try:
            yield
        finally:
            for node in nodes:
                node.pins -= 1
            for node in nodes:
                if node.empty and node.namespace.nodes.get(node.hash) is node:  # a hole: its children made the room
                    self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Forget a node that holds nothing, and those above it that stood only for its sake."""
        while node and node.empty:
            parent = node.parent
            node.unlink()
            del node.namespace.nodes[node.hash]
            self.orphaned.pop(node, None)
            self.order.remove(node)
            if self._deadlines:
                self._deadlines.forget(node)
            node = parent
        if node and not node.cells:
            self.orphaned[node] = None

    # --------------------------------------------------------------------------------------------------------- evicting

    def make_room(self, cells: int, unit: int, asker: Account) -> None:
        """Evict until `asker` can take `cells` more cells, or as many units as can be."""
        if asker.quota is not None:
            self._evict_until(lambda: asker.room, cells, unit, asker, within=asker)
            cells = min(cells, asker.room // unit * unit)
        self._evict_until(lambda: self.allocator.free, cells, unit, asker)

    def _evict_until(
        self, room: Callable[[], int], cells: int, unit: int, asker: Account, within: Account | None = None
    ) -> None:
        while (free := room()) < cells:
            search = VictimSearch(
                *(self.order, self.accounts, self.orphaned, asker),
                within=within,
                high_limit=self._high_limit,
                unsaved=self.unsaved,
            )
            victims = search.choose(free, cells, unit)
            if not victims:
                return
            for victim in victims:
                if victim.cells:  # a hole went with the last chunk below it
                    self.evict(victim)

    def next_victims(self, cells: int, within: Account | None = None) -> list[Node]:
        """Who would be evicted now for so many free cells, or for such room in the quota of `within`; nobody is."""
        asker = within or self.accounts.of("")
        search = VictimSearch(
            self.order, self.accounts, self.orphaned, asker, within=within, high_limit=self._high_limit
        )
        victims = search.choose(within.room if within else self.allocator.free, cells, 1)
        for victim in reversed(victims):
            victim.spare()
        return [victim for victim in victims if victim.cells]

    def evict(self, node: Node) -> None:
        """Free what a chunk holds that nobody uses and nothing hangs below, and forget it."""
        for packed in filter(None, node.shards):
            self.allocator.release(unpack_cells(packed))
        self.counters.chunks_evicted += 1
        self.counters.cells_evicted += node.cells
        self.accounts.take(node, -node.cells)
        if self.on_evicted:
            self.on_evicted(node)
        node.sealed = 0
        node.tiers = None
        node.shards = [None] * node.namespace.slots
        if node.doomed:
            node.spare()
        self.prune(node)

    # ----------------------------------------------------------------------------------------------- how long they stay

    def retain(self, chain: Iterable[Node], hints: Hints) -> None:
        """A request has used `chain`, from a chunk up to its prompt's first one, and says this of it.

        Of several requests, the one that wants a chunk longest has it so, and the one that gives it most priority; what
        a request does not say is: as long as there is room, and as normal chunks are.
        """
        if hints == NO_HINTS and not self._deadlines and not self._demoted:
            return
        until = self._until(hints)
        priority = Priority.NORMAL if hints.priority is None else hints.priority
        for node in chain:
            if node.expires < until:
                node.expires = until
                self._deadlines.watch(node)
                if until == math.inf and self.on_kept:
                    self.on_kept(node)
            if node.priority < priority:
                self.accounts.change_priority(node, priority)

    def end_session(self, node: Node | None) -> None:
        """What only one prompt, which ends at `node`, goes through will hardly be asked for again."""
        if node and node.first_child:
            return  # somebody went on from there
        while node and node.first_child is node.last_child:
            self._demoted = True
            if node.priority is not Priority.LOW:
                self.accounts.change_priority(node, Priority.LOW)
            node = node.parent

    def served(self, nodes: Sequence[Node | None]) -> list[int]:
        """For each chunk, the groups whose objects may be read now, as bits."""
        if not self._deadlines:
            return [node.sealed if node else 0 for node in nodes]
        now = self.now
        return [node.sealed if node and node.expires > now else 0 for node in nodes]

    @property
    def next_expiry(self) -> float:
        """When `advance` should be called at the latest; infinite if nothing expires."""
        return self._deadlines.next

    def advance(self, now: float) -> None:
        """It is `now`: drop what has expired."""
        self.now = now
        if self._deadlines.next > now:
            return
        due = sorted(self._deadlines.due(now, EXPIRED_AT_ONCE), key=lambda node: -node.depth)
        for node in due:
            if node.evictable and node.cells:
                self.counters.chunks_expired += 1
                self.evict(node)
            else:
                self._deadlines.again(node, now + EXPIRED_RETRY_SECONDS)

    def _until(self, hints: Hints) -> float:
        return math.inf if hints.ttl_s is None else self.now + hints.ttl_s
