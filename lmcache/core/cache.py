"""The state machine of the cache: reserve, commit, abort, lookup, open, confirm, drop, evict.

It decides; it has no clock, socket, thread or disk, and never touches payload. The server calls it from one thread, one
method a message. Owners are the server's numbers for client connections: what an owner holds ends with it.

What every method keeps true, whatever the order of calls (`core/invariants.py` checks it,
`tests/core/test_cache_model.py` tries to break it):

- a cell belongs to nobody, to one reservation, or to one committed shard;
- bytes are readable only when every shard of their object is committed, and only through a ticket;
- what a ticket or a reservation holds is never evicted; a chunk never goes before the chunks that follow it;
- a policy's mistakes cost space, not correctness.

One module, though a long one: each of these holds only because of all methods together, so they are read together.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

import attrs

from lmcache.core.cells import CellAllocator, pack_cells, unpack_cells
from lmcache.core.index import Namespace, Node
from lmcache.core.keys import ChainHash
from lmcache.core.metrics import Counters
from lmcache.core.order import GuardedOrder
from lmcache.core.pins import Pins
from lmcache.core.policy import EvictionPolicy
from lmcache.core.protocol import ErrorCode, Placed
from lmcache.core.victims import choose_victims
from lmcache.errors import Refused
from lmcache.geometry.hits import Hit, longest_hit

REMEMBERED_TICKETS = 4096
"""Completed tickets whose late or repeated confirmations are still answered truthfully."""


@attrs.frozen
class Reservation:
    """Cells that one writer fills: `(node, slot, packed cells)` for each granted object."""

    id: int
    owner: int
    objects: list[tuple[Node, int, bytes]]


@attrs.define
class Ticket:
    """A scheduler's right to have a hit loaded; pins `nodes` until every rank has confirmed or it is dropped."""

    id: int
    owner: int
    namespace: Namespace
    hit: Hit
    nodes: list[Node | None]
    """The prompt's chunks from its start; None where the hit does not need the chunk."""
    waiting: set[int]
    """Ranks that have not confirmed."""

    @property
    def held(self) -> list[Node]:
        """The chunks that it pins."""
        return [node for node in self.nodes if node]


@attrs.frozen
class Placement:
    """What `reserve` did."""

    reservation: int
    """0 when nothing was granted."""
    placed: bytes
    """One `Placed` for each chunk of the leading run that could be placed."""
    cells: bytes
    """Packed cells of the granted objects, in order."""


class Cache:
    """All namespaces, the cells behind them, and who holds what."""

    def __init__(
        self, allocator: CellAllocator, policy: EvictionPolicy, *, first_id: int = 1, pin_share: float = 0.5
    ) -> None:
        self.allocator = allocator
        self.policy = policy
        self.counters = Counters()
        self.namespaces: dict[bytes, Namespace] = {}
        self.reservations: dict[int, Reservation] = {}
        self.tickets: dict[int, Ticket] = {}
        self.pins: dict[int, Pins] = {}
        """For each owner that has tickets, what they hold."""
        self._order = GuardedOrder(policy, self.counters)
        self._order.resize(allocator.cells)
        self._pin_limit = int(allocator.cells * pin_share)
        self._next_id = first_id
        self._completed: deque[int] = deque(maxlen=REMEMBERED_TICKETS)
        self.orphaned: dict[Node, None] = {}
        """Holes: nodes without bytes that others hang below; what hangs there is evicted first."""

    # ------------------------------------------------------------------------------------------------------- writing

    def reserve(
        self,
        owner: int,
        namespace: Namespace,
        tenant: str,
        parent: bytes,
        hashes: Sequence[ChainHash],
        group: int,
        shard: int,
    ) -> Placement:
        """Give `owner` cells for one shard of one group of each chunk, as far as the leading run fits.

        Evicts exactly what is needed. Stops, without an error, at the first chunk that cannot be placed: no room, or a
        parent that is not in the index (bytes that no lookup could reach).
        """
        above = namespace.nodes.get(ChainHash(parent)) if parent else None
        if parent and above is None:
            return Placement(0, b"", b"")
        reservation = Reservation(self._new_id(), owner, [])
        # registered first: whatever fails half way, what was granted so far belongs to somebody
        self.reservations[reservation.id] = reservation
        slot, cells = namespace.slot(group, shard), namespace.object_cells[group]
        placed = bytearray()
        created = False
        with self._kept([above] if above else []):
            self._make_room_for_all(namespace, hashes, slot, cells)
            for chain_hash in hashes:
                node = namespace.nodes.get(chain_hash)
                state = _placed(node, slot)
                if state is Placed.GRANTED:
                    created = created or node is None
                    node = node or self._insert(namespace, chain_hash, above, tenant)
                    if not self._grant(node, slot, cells, reservation):
                        break
                placed.append(state)
                above = node
        if created and above:
            self._order.touch(list(above.chain()))
        return self._placement(reservation, bytes(placed))

    def cells_lacking(self, namespace: Namespace, hashes: Sequence[ChainHash], group: int, shard: int) -> int:
        """Cells that `reserve` would hand out if there were room for all."""
        slot = namespace.slot(group, shard)
        nodes = map(namespace.nodes.get, dict.fromkeys(hashes))
        return namespace.object_cells[group] * sum(_placed(node, slot) is Placed.GRANTED for node in nodes)

    def _make_room_for_all(self, namespace: Namespace, hashes: Sequence[ChainHash], slot: int, cells: int) -> None:
        """Evict for all chunks at once, as far as others' chunks go: a search for each takes several times as long."""
        distinct = dict.fromkeys(hashes)
        known = [node for node in map(namespace.nodes.get, distinct) if node]
        there = sum(1 for node in known if _placed(node, slot) is not Placed.GRANTED)
        with self._kept(known):
            self._make_room((len(distinct) - there) * cells, cells)

    def _grant(self, node: Node, slot: int, cells: int, reservation: Reservation) -> bool:
        """Reserve one object of `node`. False, and the node is forgotten if it is new, when there is no room."""
        if self.allocator.free < cells:
            # the end of the prompt itself may go, so that its beginning is whole
            node.pins += 1
            self._make_room(cells, cells)
            node.pins -= 1
        got = self.allocator.allocate(cells)
        if got is None:
            self._prune(node)
            return False
        node.writing |= 1 << slot
        node.cells += cells
        self.orphaned.pop(node, None)
        reservation.objects.append((node, slot, pack_cells(got)))
        return True

    @contextlib.contextmanager
    def _kept(self, nodes: Sequence[Node]) -> Iterator[None]:
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
                    self._prune(node)

    def _placement(self, reservation: Reservation, placed: bytes) -> Placement:
        if not reservation.objects:
            del self.reservations[reservation.id]
            return Placement(0, placed, b"")
        self.counters.chunks_reserved += len(reservation.objects)
        return Placement(reservation.id, placed, b"".join(cells for _, _, cells in reservation.objects))

    def commit(self, owner: int, reservation_id: int) -> None:
        """`owner` has written every cell of the reservation: publish it. Refuses what is not the owner's."""
        for node, slot, cells in self._take(owner, reservation_id).objects:
            node.writing &= ~(1 << slot)
            node.shards[slot] = cells
            self._seal(node)
            self.counters.shards_committed += 1

    def _seal(self, node: Node) -> None:
        namespace = node.namespace
        for group in namespace.cached_groups:
            if not node.sealed >> group & 1 and namespace.group_committed(node, group):
                # the one place where bytes become readable: every shard of the object is written
                node.sealed |= 1 << group

    def abort(self, owner: int, reservation_id: int) -> None:
        """Give a reservation back unpublished. Refuses what is not the owner's."""
        self._undo(self._take(owner, reservation_id))

    def _take(self, owner: int, reservation_id: int) -> Reservation:
        reservation = self.reservations.get(reservation_id)
        if reservation is None or reservation.owner != owner:
            raise Refused(
                f"reservation {reservation_id} is not this client's, or has ended",
                code=ErrorCode.STALE,
                remedy="reserve again",
            )
        return self.reservations.pop(reservation_id)

    def _undo(self, reservation: Reservation) -> None:
        self.counters.chunks_aborted += len(reservation.objects)
        # from the tail, so that a chain written by one reservation is pruned as a whole
        for node, slot, cells in reversed(reservation.objects):
            node.writing &= ~(1 << slot)
            released = unpack_cells(cells)
            node.cells -= len(released)
            self.allocator.release(released)
            self._prune(node)

    # ------------------------------------------------------------------------------------------------------- reading

    def lookup(self, owner: int, namespace: Namespace, hashes: Sequence[ChainHash], limit: int) -> Ticket | None:
        """The longest prefix that can be served, pinned; None when there is none.

        `limit` is the most tokens that the hit may cover. One owner's tickets hold at most a share of the arena; a hit
        that would exceed it is shortened.
        """
        nodes = list(map(namespace.nodes.get, hashes))
        sealed = [node.sealed if node else 0 for node in nodes]
        hit, needed = self._within_pin_share(owner, namespace, nodes, sealed, limit)
        self.counters.lookups += 1
        self.counters.tokens_asked += len(hashes) * namespace.chunk_size
        self.counters.tokens_hit += hit.tokens
        if not hit.tokens:
            return None
        reached = nodes[: -(-hit.tokens // namespace.chunk_size)]
        # each once, even where a client names a chunk twice
        self._order.touch(list(dict.fromkeys(filter(None, reversed(reached)))))
        return self._issue(owner, namespace, hit, needed)

    def _within_pin_share(
        self, owner: int, namespace: Namespace, nodes: list[Node | None], sealed: list[int], limit: int
    ) -> tuple[Hit, list[Node | None]]:
        """The hit, and the chunks that it needs."""
        hit = longest_hit(namespace.geometry, namespace.chunk_size, sealed, limit)
        pins = self.pins.get(owner) or Pins()
        room = self._pin_limit - pins.cells
        needed = _needed(hit, nodes)
        while hit.tokens and pins.added_by(filter(None, needed)) > room:
            chunks = hit.tokens // namespace.chunk_size
            # halve what is too much: a hit of thousands of chunks must not be shortened one chunk at a time
            fitting = max(0, min(chunks - 1, max(chunks // 2, room // namespace.chunk_cells)))
            hit = longest_hit(namespace.geometry, namespace.chunk_size, sealed[:fitting], limit)
            needed = _needed(hit, nodes)
        return hit, needed

    def _issue(self, owner: int, namespace: Namespace, hit: Hit, needed: list[Node | None]) -> Ticket:
        ticket = Ticket(self._new_id(), owner, namespace, hit, needed, set(range(namespace.geometry.ranks)))
        self.pins.setdefault(owner, Pins()).take(ticket.held)
        self.tickets[ticket.id] = ticket
        return ticket

    def open(self, ticket_id: int, namespace: Namespace, rank: int) -> tuple[Hit, list[bytes]]:
        """The hit, and for each group the packed cells of `rank`'s objects, chunk after chunk."""
        ticket = self.tickets.get(ticket_id)
        if ticket is None or ticket.namespace is not namespace:
            raise Refused(
                f"ticket {ticket_id} has ended, or is another engine's", code=ErrorCode.STALE, remedy="look up again"
            )
        geometry = namespace.geometry
        cells = []
        for group, needs in enumerate(ticket.hit.needs):
            slot = namespace.slot(group, geometry.shard_of(group, rank))
            cells.append(b"".join(_shard(ticket.nodes[chunk], slot) for chunk in needs))
        return ticket.hit, cells

    def confirm(self, ticket_id: int, namespace: Namespace, rank: int) -> bool:
        """`rank` has copied. False: the ticket did not hold throughout, so the load must not count. Idempotent."""
        ticket = self.tickets.get(ticket_id)
        if ticket is None or ticket.namespace is not namespace:
            return ticket is None and ticket_id in self._completed
        ticket.waiting.discard(rank)
        if not ticket.waiting:
            self._completed.append(ticket_id)
            self._end(ticket)
            self.counters.loads_confirmed += 1
        return True

    def drop(self, owner: int, ticket_id: int) -> None:
        """End a ticket of `owner`'s early. Unknown tickets, and other owners', are left alone."""
        ticket = self.tickets.get(ticket_id)
        if ticket and ticket.owner == owner:
            self._end(ticket)
            self.counters.tickets_dropped += 1

    def _end(self, ticket: Ticket) -> None:
        del self.tickets[ticket.id]
        pins = self.pins[ticket.owner]
        pins.release(ticket.held)
        if not pins.tickets:
            del self.pins[ticket.owner]

    def owner_gone(self, owner: int) -> None:
        """The owner's connection ended: free what it was writing, unpublished, and drop its tickets."""
        for reservation in [r for r in self.reservations.values() if r.owner == owner]:
            self._undo(self.reservations.pop(reservation.id))
        for ticket in [t for t in self.tickets.values() if t.owner == owner]:
            self._end(ticket)
            self.counters.tickets_dropped += 1

    # ------------------------------------------------------------------------------------------------------ evicting

    def _make_room(self, cells: int, unit: int) -> None:
        """Evict until `cells` cells are free, or as many units as can be."""
        while (free := self.allocator.free) < cells:
            victims = choose_victims(self._order, self.orphaned, free, cells, unit)
            if not victims:
                return
            for victim in victims:
                if victim.cells:  # a hole went with the last chunk below it
                    self._evict(victim)

    def _evict(self, node: Node) -> None:
        for packed in filter(None, node.shards):
            self.allocator.release(unpack_cells(packed))
        self.counters.chunks_evicted += 1
        self.counters.cells_evicted += node.cells
        node.cells = node.sealed = 0
        node.shards = [None] * node.namespace.slots
        if node.doomed:
            node.spare()
        self._prune(node)

    # --------------------------------------------------------------------------------------------------- bookkeeping

    def _insert(self, namespace: Namespace, chain_hash: ChainHash, parent: Node | None, tenant: str) -> Node:
        node = Node(namespace, chain_hash, parent, tenant)
        node.link()
        namespace.nodes[chain_hash] = node
        self._order.insert(node)
        return node

    def _prune(self, node: Node | None) -> None:
        """Forget a node that holds nothing, and those above it that stood only for its sake."""
        while node and node.empty:
            parent = node.parent
            node.unlink()
            del node.namespace.nodes[node.hash]
            self.orphaned.pop(node, None)
            self._order.remove(node)
            node = parent
        if node and not node.cells and not node.writing and not node.pins:
            self.orphaned[node] = None

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id


def _placed(node: Node | None, slot: int) -> Placed:
    """What a reservation of `slot` comes to, if there is room for it."""
    if node is None:
        return Placed.GRANTED
    if node.shards[slot] is not None:
        return Placed.PRESENT
    return Placed.BUSY if node.writing >> slot & 1 else Placed.GRANTED


def _shard(node: Node | None, slot: int) -> bytes:
    packed = node.shards[slot] if node else None
    if packed is None:
        raise RuntimeError(f"{node} is held by a ticket, and slot {slot} of it is not committed")
    return packed


def _needed(hit: Hit, nodes: list[Node | None]) -> list[Node | None]:
    """The chunks up to the hit's end, with None for those that no group needs."""
    end = max(needs.stop for needs in hit.needs)
    if any(needs.start == 0 and needs.stop == end for needs in hit.needs):
        return nodes[:end]  # what every prompt comes to that has a full group
    needed: set[int] = set().union(*hit.needs)
    return [node if chunk in needed else None for chunk, node in enumerate(nodes[:end])]
