"""The state machine of the cache: reserve, commit, abort, lookup, open, confirm, drop, pin, evict.

It decides; it has no clock (`advance` tells it the time), socket, thread or disk, and never touches payload. The server
calls it from one thread, one method a message. Owners are the server's numbers for client connections: what an owner
holds ends with it.

What every method keeps true, whatever the order of calls (`core/invariants.py` checks it,
`tests/core/test_cache_model.py` tries to break it):

- a cell belongs to nobody, to one reservation, or to one committed shard;
- bytes are readable only when every shard of their object is committed, and only through a ticket;
- what a ticket or a reservation holds is never evicted; a chunk never goes before the chunks that follow it;
- no tenant holds more than its quota, or loses to others what it is guaranteed; nothing is served that has expired;
- a policy's mistakes cost space, not correctness.

One module, though a long one: each of these holds only because of all methods together, so they are read together.
"""

from collections import deque
from collections.abc import Callable, Sequence

import attrs

from lmcache.core.accounts import Account, Limits
from lmcache.core.admission import Offer
from lmcache.core.cells import CellAllocator, pack_cells, unpack_cells
from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.index import Namespace, Node
from lmcache.core.keys import ChainHash
from lmcache.core.metrics import Counters
from lmcache.core.pins import Pins, PrefixPin, PrefixPins
from lmcache.core.policy import EvictionPolicy
from lmcache.core.protocol import ErrorCode, Placed
from lmcache.core.residents import Residents
from lmcache.core.voices import Speakers, Voices
from lmcache.errors import Refused
from lmcache.geometry.hits import Hit, longest_hit

TIERS = 0
"""The owner of what is fetched from tiers: no client has this number."""

REMEMBERED_TICKETS = 4096
"""Completed tickets whose late or repeated confirmations are still answered truthfully."""

PREFIX_PIN_SHARE = 0.25
"""Share of L1 that prefix pins may hold together."""


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
        self,
        allocator: CellAllocator,
        policy: EvictionPolicy,
        *,
        limits: Limits | None = None,
        speakers: Speakers | None = None,
        first_id: int = 1,
        pin_share: float = 0.5,
    ) -> None:
        self.allocator = allocator
        self.policy = policy
        self.counters = Counters()
        self.residents = Residents(allocator, policy, limits or Limits(), self.counters)
        self.namespaces: dict[bytes, Namespace] = {}
        self.reservations: dict[int, Reservation] = {}
        self.tickets: dict[int, Ticket] = {}
        self.pins: dict[int, Pins] = {}
        """For each owner that has tickets, what they hold."""
        self.prefix_pins = PrefixPins(int(allocator.cells * PREFIX_PIN_SHARE))
        self._voices = Voices(speakers or Speakers(), self.counters)
        self._pin_limit = int(allocator.cells * pin_share)
        self._next_id = first_id
        self._completed: deque[int] = deque(maxlen=REMEMBERED_TICKETS)
        self.on_committed: Callable[[Node, int], None] | None = None
        """Hears of every slot of a chunk that becomes readable, in the call that makes it so."""
        self.on_short: Callable[[Account, int], None] | None = None
        """Hears of every `reserve` that there was too little room for: whose, and how many cells it lacked."""
        self.on_sealed: Callable[[Node, int], None] | None = None
        """Hears of every group of a chunk that becomes readable."""

    # ------------------------------------------------------------------------------------------------------------- time

    def advance(self, now: float) -> None:
        """It is `now`, in seconds on a clock that never goes back: end pins and drop chunks whose time has come."""
        self.prefix_pins.advance(now)
        self.residents.advance(now)

    @property
    def next_event(self) -> float:
        """When `advance` should be called at the latest; infinite if nothing waits for it."""
        return min(self.residents.next_expiry, self.prefix_pins.next_end)

    # ---------------------------------------------------------------------------------------------------------- writing

    def reserve(
        self,
        owner: int,
        namespace: Namespace,
        tenant: str,
        parent: bytes,
        hashes: Sequence[ChainHash],
        group: int,
        shard: int,
        hints: Hints = NO_HINTS,
    ) -> Placement:
        """Give `owner` cells for one shard of one group of each chunk, as far as the leading run fits.

        Evicts exactly what is needed. Stops, without an error, at the first chunk that cannot be placed: no room, no
        quota left, or a parent that is not in the index (bytes that no lookup could reach).
        """
        above = namespace.nodes.get(ChainHash(parent)) if parent else None
        if parent and above is None:
            return Placement(0, b"", b"")
        hints = self._advised(namespace, tenant, above, hashes, hints)
        admitted = self._admitted(namespace, tenant, above, hashes, hints)
        reservation = Reservation(self.new_id(), owner, [])
        # registered first: whatever fails half way, what was granted so far belongs to somebody
        self.reservations[reservation.id] = reservation
        placed, last = self._place(reservation, namespace, tenant, above, hashes[:admitted], group, shard, hints)
        if last:
            self.residents.retain(last.chain(), hints)
        if last and hints.ends_session:
            self.residents.end_session(last)
        if len(placed) < admitted and self.on_short:
            lacking = (admitted - len(placed)) * namespace.object_cells[group]
            self.on_short(self.residents.accounts.of(tenant), lacking)
        if len(placed) == admitted:
            self.counters.chunks_refused += len(hashes) - admitted
            placed += bytes([Placed.REFUSED]) * (len(hashes) - admitted)
        return self._placement(reservation, placed)

    def _place(
        self,
        reservation: Reservation,
        namespace: Namespace,
        tenant: str,
        above: Node | None,
        hashes: Sequence[ChainHash],
        group: int,
        shard: int,
        hints: Hints,
    ) -> tuple[bytes, Node | None]:
        """What became of the leading run that could be placed, and the last chunk of it."""
        slot, cells = namespace.slot(group, shard), namespace.object_cells[group]
        placed = bytearray()
        created, granted = False, Placed.GRANTED
        with self.residents.kept([above] if above else []):
            self._make_room_for_all(namespace, tenant, hashes, slot, cells)
            for chain_hash in hashes:
                node = namespace.nodes.get(chain_hash)
                state = granted if node is None else _placed(node, slot)
                if state is granted:
                    created = created or node is None
                    node = node or self.residents.insert(namespace, chain_hash, above, tenant, hints)
                    if not self._grant(node, slot, cells, reservation):
                        break
                placed.append(state)
                above = node
        if created and above:
            self.residents.order.touch(list(above.chain()))
        return bytes(placed), above

    def _advised(
        self, namespace: Namespace, tenant: str, above: Node | None, hashes: Sequence[ChainHash], hints: Hints
    ) -> Hints:
        """The request's hints, and what retention policies add."""
        if not self._voices.any_retention or not hashes:
            return hints
        return self._voices.hints(_offer(namespace, tenant, above, hashes, hints))

    def _admitted(
        self, namespace: Namespace, tenant: str, above: Node | None, hashes: Sequence[ChainHash], hints: Hints
    ) -> int:
        """How many of the chunks are there or may be stored."""
        if not self._voices.any_admission:
            return len(hashes)
        known = next((i for i, each in enumerate(hashes) if each not in namespace.nodes), len(hashes))
        if known == len(hashes):
            return known
        above = namespace.nodes[hashes[known - 1]] if known else above
        offer = _offer(namespace, tenant, above, hashes[known:], hints)
        return known + self._voices.admitted(offer, self.residents.now)

    def cells_lacking(self, namespace: Namespace, hashes: Sequence[ChainHash], group: int, shard: int) -> int:
        """Cells that `reserve` would hand out if there were room for all."""
        slot = namespace.slot(group, shard)
        nodes = map(namespace.nodes.get, dict.fromkeys(hashes))
        return namespace.object_cells[group] * sum(_placed(node, slot) is Placed.GRANTED for node in nodes)

    def _make_room_for_all(
        self, namespace: Namespace, tenant: str, hashes: Sequence[ChainHash], slot: int, cells: int
    ) -> None:
        """Evict for all chunks at once, as far as others' chunks go: a search for each takes several times as long."""
        distinct = dict.fromkeys(hashes)
        known = [node for node in map(namespace.nodes.get, distinct) if node]
        there = sum(1 for node in known if _placed(node, slot) is not Placed.GRANTED)
        with self.residents.kept(known):
            self.residents.make_room((len(distinct) - there) * cells, cells, self.residents.accounts.of(tenant))

    def _grant(self, node: Node, slot: int, cells: int, reservation: Reservation) -> bool:
        """Reserve one object of `node`. False, and the node is forgotten if it is new, when there is no room."""
        got = self.residents.grant(node, cells)
        if got is None:
            return False
        node.writing |= 1 << slot
        reservation.objects.append((node, slot, pack_cells(got)))
        return True

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
            if self.on_committed:
                self.on_committed(node, slot)

    def _seal(self, node: Node) -> None:
        namespace = node.namespace
        for group in namespace.cached_groups:
            if not node.sealed >> group & 1 and namespace.group_committed(node, group):
                # the one place where bytes become readable: every shard of the object is written
                node.sealed |= 1 << group
                if self.on_sealed:
                    self.on_sealed(node, group)

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
            self.residents.give_back(node, unpack_cells(cells))

    # ---------------------------------------------------------------------------------------------------------- reading

    def lookup(
        self,
        owner: int,
        namespace: Namespace,
        hashes: Sequence[ChainHash],
        limit: int,
        tenant: str = "",
        hints: Hints = NO_HINTS,
        number: int = 0,
    ) -> Ticket | None:
        """The longest prefix that can be served, pinned; None when there is none.

        `limit` is the most tokens that the hit may cover; `number`, if given, is to be the ticket's. One owner's
        tickets hold at most a share of the arena; a hit that would exceed it is shortened.
        """
        nodes = list(map(namespace.nodes.get, hashes))
        sealed = self.residents.served(nodes)
        hit, needed = self._within_pin_share(owner, namespace, nodes, sealed, limit)
        self.counters.lookups += 1
        self.counters.tokens_asked += len(hashes) * namespace.chunk_size
        self.counters.tokens_hit += hit.tokens
        if self._voices.any_admission:
            self._voices.asked_for(namespace.digest + each for each in hashes)
        if not hit.tokens:
            return None
        reached = nodes[: -(-hit.tokens // namespace.chunk_size)]
        # each once, even where a client names a chunk twice
        chain = list(dict.fromkeys(filter(None, reversed(reached))))
        self.residents.order.touch(chain)
        hints = self._advised(namespace, tenant, None, hashes[: len(reached)], hints)
        self.residents.retain(chain, hints)
        if hints.ends_session:  # it may have nothing new to store
            self.residents.end_session(chain[0])
        return self._issue(number or self.new_id(), owner, namespace, hit, needed)

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

    def _issue(self, number: int, owner: int, namespace: Namespace, hit: Hit, needed: list[Node | None]) -> Ticket:
        ticket = Ticket(number, owner, namespace, hit, needed, set(range(namespace.geometry.ranks)))
        self.pins.setdefault(owner, Pins()).take(ticket.held)
        self.tickets[ticket.id] = ticket
        return ticket

    def holds(self, namespace: Namespace, chain_hash: ChainHash, slot: int) -> bool:
        """Whether this shard of the chunk can be read."""
        node = namespace.nodes.get(chain_hash)
        return node is not None and node.shards[slot] is not None and node.expires > self.residents.now

    def take(self, owner: int, namespace: Namespace, chain_hash: ChainHash, slot: int, rank: int) -> Ticket | None:
        """A ticket for one chunk, whatever groups of it are there, that `rank` alone confirms; None: it cannot be had.

        The chunk counts as used by nobody: whoever asks keeps it from then on.
        """
        node = namespace.nodes.get(chain_hash)
        if node is None or not self.holds(namespace, chain_hash, slot):
            return None
        if (self.pins.get(owner) or Pins()).added_by([node]) > self._pin_limit:
            return None
        ticket = self._issue(self.new_id(), owner, namespace, Hit(0, ()), [node])
        ticket.waiting = {rank}
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

    # -------------------------------------------------------------------------------------------------------- for tiers

    def hold(self, node: Node) -> None:
        """Keep a chunk where it is: a tier reads it, or it is being fetched."""
        node.pins += 1
        node.held += 1

    def let_go(self, node: Node) -> None:
        """End a `hold`; the chunk is forgotten if it has come to nothing."""
        node.pins -= 1
        node.held -= 1
        if node.empty:
            self.residents.prune(node)

    def fetch(
        self, namespace: Namespace, hashes: Sequence[ChainHash], chunk: int, slot: int, tenant: str, hints: Hints
    ) -> "Reservation | Node | None":
        """Cells for one shard of a prompt's chunk that comes from a tier: `TIERS` is their writer.

        The chunk itself where the shard is there or is being written; None where there is no room for it, or where it
        would hang below chunks that have expired.
        """
        node = self.residents.chain_to(namespace, hashes[: chunk + 1], tenant, hints)
        if node is None:
            return None
        if _placed(node, slot) is not Placed.GRANTED:
            return node
        reservation = Reservation(self.new_id(), TIERS, [])
        group, _ = namespace.group_and_shard(slot)
        if not self._grant(node, slot, namespace.object_cells[group], reservation):
            return None
        self.reservations[reservation.id] = reservation
        return reservation

    # ---------------------------------------------------------------------------------------------------------- pinning

    def pin(self, namespace: Namespace, hashes: Sequence[ChainHash], seconds: float) -> PrefixPin | None:
        """Keep the longest prefix of a prompt that can be served now, for so long; None when there is none.

        Nothing evicts it meanwhile, and it does not expire. Prefix pins hold a share of the arena at most: Refused.
        """
        known = list(map(namespace.nodes.get, hashes))
        limit = len(known) * namespace.chunk_size
        hit = longest_hit(namespace.geometry, namespace.chunk_size, self.residents.served(known), limit)
        nodes = [node for node in known[: hit.tokens // namespace.chunk_size] if node]
        if not nodes:
            return None
        pin = self.prefix_pins.pin(self.new_id(), namespace, nodes, self.residents.now + seconds)
        self.residents.retain(reversed(nodes), Hints(ttl_s=seconds))
        return pin

    def unpin(self, number: int) -> None:
        """End a prefix pin early. Raises Refused when there is none of that number."""
        self.prefix_pins.unpin(number)

    # ------------------------------------------------------------------------------------------------------ bookkeeping

    def new_id(self) -> int:
        """A number for a reservation, a ticket, a pin: never used twice."""
        self._next_id += 1
        return self._next_id


def _offer(namespace: Namespace, tenant: str, above: Node | None, hashes: Sequence[ChainHash], hints: Hints) -> Offer:
    return Offer(
        keys=[namespace.digest + each for each in hashes],
        depth=above.depth + 1 if above else 0,
        tenant=tenant,
        model=namespace.facts.get("model", ""),
        chunk_size=namespace.chunk_size,
        chunk_bytes=namespace.chunk_cells * namespace.cell_bytes,
        hints=hints,
    )


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
