"""Up: one lookup that is longer with what the tiers have, from its first question to its final hit. Server's thread."""

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from lmcache.core.cache import Cache, Reservation, Ticket
from lmcache.core.cells import unpack_cells
from lmcache.core.index import Namespace, Node
from lmcache.core.keys import ChainHash
from lmcache.core.l1_only import Asked
from lmcache.core.tier_in_use import TierInUse
from lmcache.geometry.hits import Hit, longest_hit

AT_ONCE = 4
"""Shards that one promotion fetches at once, for each thread of a tier: so that several promotions share it."""


class Fetches:
    """Shards that are on their way from a tier: each is fetched once, whoever needs it."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Node, int], list[Callable[[bool], None]]] = {}
        self._begun_by: dict[tuple[Node, int], Promotion] = {}
        self._tiers: dict[Node, dict[int, TierInUse]] = {}

    def under_way(self, node: Node) -> Iterable[tuple[int, TierInUse]]:
        """Slots of the chunk that are being fetched, and from where."""
        return self._tiers.get(node, {}).items()

    @property
    def left_over(self) -> int:
        """Cells of those whose lookup is over, and that have not come back."""
        return sum(
            node.namespace.object_cells[node.namespace.group_and_shard(slot)[0]]
            for (node, slot), promotion in self._begun_by.items()
            if promotion.over
        )

    def join(self, node: Node, slot: int, then: Callable[[bool], None]) -> bool:
        """Hear of a fetch that somebody else has begun. False: nobody has."""
        waiting = self._waiting.get((node, slot))
        if waiting is None:
            return False
        waiting.append(then)
        return True

    def begin(
        self, node: Node, slot: int, tier: TierInUse, promotion: "Promotion", then: Callable[[bool], None]
    ) -> None:
        """A promotion begins a fetch; `then` is the first to hear of it."""
        self._waiting[node, slot] = [then]
        self._begun_by[node, slot] = promotion
        self._tiers.setdefault(node, {})[slot] = tier

    def end(self, node: Node, slot: int, there: bool) -> None:
        """It has ended."""
        del self._begun_by[node, slot]
        del self._tiers[node][slot]
        if not self._tiers[node]:
            del self._tiers[node]
        for then in self._waiting.pop((node, slot)):
            then(there)


class Promotion:
    """A lookup whose answer is not final yet.

    Searches tier after tier, decides which longer hit to go for, and fetches what that needs: in chain order, so that
    whatever ends it, what has come is worth most. It holds the chunks that it goes for until it is over.
    """

    def __init__(
        self,
        number: int,
        asked: Asked,
        until: float,
        cache: Cache,
        tiers: Sequence[TierInUse],
        fetches: Fetches,
        room: Callable[[], int],
        room_comes: Callable[[], bool],
        memory_comes: Callable[[int], bool],
        min_speedup: float = 0.0,
    ) -> None:
        """`room`: cells that it may go for, beyond those promised to others and to itself.

        `room_comes` says whether L1 makes room that is not there yet, `memory_comes` whether L1 grows and so many cells
        have no memory yet: nothing is evicted for want of what is on its way, and no hit is shorter for it.

        What reading does not make `min_speedup` times as fast as computing is left to the engine; 0 reads everything.
        """
        self.id = number
        self.asked = asked
        self.until = until
        """When the hit is frozen, whatever is still on its way."""
        self.over = False
        self.ticket: Ticket | None = None
        """Once it is over, if something was hit."""
        self._cache = cache
        self._tiers = tiers
        self._fetches = fetches
        self._room = room
        self._room_comes = room_comes
        self._memory_comes = memory_comes
        self._min_speedup = min_speedup
        self._held: dict[Node, None] = {}
        self._missing: dict[int, int] = {}
        self._found: dict[tuple[int, int], TierInUse] = {}
        self._plan: deque[tuple[int, int]] = deque()
        """(chunk, slot) to fetch."""
        self._decided = False
        """Whether it is known what to fetch."""
        self._out = 0
        """Answers of tiers that it waits for."""
        self.promised = 0
        """Cells that it keeps from others: those of the hit it goes for, what is in L1 already included."""

    # -------------------------------------------------------------------------------------------------------- searching

    def begin(self) -> None:
        """Look in the first tier."""
        space = self.asked.namespace
        whole = (1 << space.slots) - 1
        for chunk, node in enumerate(map(space.nodes.get, self._reachable())):
            lacking = whole if node is None else whole & ~_present(node)
            if lacking:
                self._missing[chunk] = lacking
            if node:
                self._hold(node)
                for slot, tier in self._fetches.under_way(node):
                    self._found[chunk, slot] = tier
        self.promised = sum(node.cells for node in self._held)
        self._search(0)

    def _reachable(self) -> Sequence[ChainHash]:
        """The chunks that a hit may come to that there is room for: none that has expired, or is named twice."""
        space, hashes, now = self.asked.namespace, self.asked.hashes, self._cache.residents.now
        seen: set[ChainHash] = set()
        for chain_hash in hashes[: self._fitting()]:
            node = space.nodes.get(chain_hash)
            if chain_hash in seen or (node and node.expires <= now):
                break
            seen.add(chain_hash)
        return hashes[: len(seen)]

    def _fitting(self) -> int:
        """How many chunks there is room for."""
        return max(0, self._room()) // max(1, self.asked.namespace.chunk_cells)

    def _search(self, number: int) -> None:
        """Look in the tiers from `number` on for what none before has."""
        for tier in self._tiers[number:]:
            if not self._missing:
                break

            def heard(found: Mapping[int, int], tier: TierInUse = tier) -> None:
                self._out -= 1
                if not self.over:
                    self._note(tier, found)
                    self._search(tier.number + 1)

            self._out += 1
            if tier.usable() and tier.search(self.asked.namespace, self.asked.hashes, self._missing, heard):
                return
            self._out -= 1
        self._decide()

    def _note(self, tier: TierInUse, found: Mapping[int, int]) -> None:
        for chunk, slots in found.items():
            for slot in range(self.asked.namespace.slots):
                if slots >> slot & 1:
                    self._found[chunk, slot] = tier
            self._missing[chunk] &= ~slots
            if not self._missing[chunk]:
                del self._missing[chunk]

    # --------------------------------------------------------------------------------------------------------- deciding

    def _decide(self) -> None:
        self._decided = True
        self.promised = 0
        hit = self._possible()
        space = self.asked.namespace
        self._let_go(keeping=set(map(space.nodes.get, self.asked.hashes[: _chunks(hit, space)])))
        self.promised = _chunks(hit, space) * space.chunk_cells
        now = longest_hit(space.geometry, space.chunk_size, self._in_l1(), self.asked.limit)
        needed = list(self._needed(hit)) if hit.tokens > now.tokens else []
        if self._worth_reading(needed, hit.tokens - now.tokens):
            self._plan.extend(needed)
        else:
            self._cache.counters.promotions_declined += 1
        self.pump()

    def _worth_reading(self, needed: Sequence[tuple[int, int]], tokens: int) -> bool:
        """Whether reading these shards saves the engine `tokens` tokens in time, as far as both speeds are known."""
        space, speed = self.asked.namespace, self.asked.prefill_speed
        if not needed or not speed or not self._min_speedup:
            return True
        sizes: Counter[TierInUse] = Counter()
        for chunk, slot in needed:
            sizes[self._found[chunk, slot]] += space.object_bytes[space.group_and_shard(slot)[0]]
        seconds = sum(tier.seconds_to_read(size) for tier, size in sizes.items())
        return tokens / speed >= self._min_speedup * seconds

    def _possible(self) -> Hit:
        """The longest hit with what has been found, that there is room for."""
        space = self.asked.namespace
        sealed = [
            sum(1 << group for group in space.cached_groups if self._whole(chunk, group))
            for chunk in range(len(self._reachable()))
        ]
        return longest_hit(space.geometry, space.chunk_size, sealed, self.asked.limit)

    def _whole(self, chunk: int, group: int) -> bool:
        """Whether every shard of the object is in L1 or in a tier that has been searched."""
        space = self.asked.namespace
        node = space.nodes.get(self.asked.hashes[chunk])
        return all(
            (chunk, slot) in self._found or (node is not None and node.shards[slot] is not None)
            for slot in space.slots_of(group)
        )

    def _in_l1(self) -> list[int]:
        space = self.asked.namespace
        return self._cache.residents.served(list(map(space.nodes.get, self.asked.hashes)))

    def _needed(self, hit: Hit) -> Iterator[tuple[int, int]]:
        """What has to be fetched for a hit, in chain order."""
        space = self.asked.namespace
        return iter(
            sorted(
                (chunk, slot)
                for group in space.cached_groups
                for chunk in hit.needs[group]
                for slot in space.slots_of(group)
                if (chunk, slot) in self._found
            )
        )

    # --------------------------------------------------------------------------------------------------------- fetching

    @property
    def next_cells(self) -> int:
        """Cells that what it is to fetch next needs; 0 where nothing is."""
        if self.over or not self._plan:
            return 0
        space = self.asked.namespace
        return space.object_cells[space.group_and_shard(self._plan[0][1])[0]]

    def pump(self) -> bool:
        """Fetch on; freeze the hit when nothing is on its way any more. False: there is no room now, and will be."""
        while self._plan and not self.over and self._out < AT_ONCE * self._found[self._plan[0]].settings.threads:
            if self._memory_comes(self.next_cells):
                return False  # `pump` is called again
            next_one = self._plan.popleft()
            fetched = self._fetch(*next_one)
            if fetched is None and self._room_comes():
                self._plan.appendleft(next_one)
                return False  # `pump` is called again
            if not fetched:
                self._plan.clear()  # without it, what follows is worth nothing, or less than what it costs
        if not self._out and not self._plan and self._decided and not self.over:
            self.freeze()
        return True

    def _fetch(self, chunk: int, slot: int) -> bool | None:
        """Have one shard fetched, unless it is there. False: it cannot be had; None: there is no room for it now."""
        asked, tier = self.asked, self._found[chunk, slot]
        got = self._cache.fetch(asked.namespace, asked.hashes, chunk, slot, asked.tenant, asked.hints)
        if got is None:
            return None
        if isinstance(got, Node):
            self._hold(got)
            if got.shards[slot] is not None:
                return True
            self._out += 1
            if self._fetches.join(got, slot, self._came):
                return True
            self._out -= 1
            return False  # an engine writes it: it is computed anew, and will be there next time
        node = got.objects[0][0]
        self._hold(node)
        self._out += 1
        self._fetches.begin(node, slot, tier, self, self._came)
        if not tier.fetch(node, slot, unpack_cells(got.objects[0][2]), lambda there: self._ended(got, slot, there)):
            self._ended(got, slot, there=False)
        return True

    def _ended(self, reservation: Reservation, slot: int, there: bool) -> None:
        node = reservation.objects[0][0]
        (self._cache.commit if there else self._cache.abort)(reservation.owner, reservation.id)
        self._fetches.end(node, slot, there)

    def _came(self, there: bool) -> None:
        self._out -= 1
        if not there:
            self._plan.clear()
        self.pump()

    # ----------------------------------------------------------------------------------------------------------- ending

    def freeze(self) -> None:
        """What is in L1 by now is the hit. What is still on its way arrives there for the next one."""
        asked = self.asked
        self.over = True
        self._plan.clear()
        self.ticket = self._cache.lookup(
            *(asked.owner, asked.namespace, asked.hashes, asked.limit, asked.tenant, asked.hints), number=self.id
        )
        if self.ticket:
            self._touch(self.ticket)
        self._let_go()

    def _touch(self, ticket: Ticket) -> None:
        """What lay in L1 was not read, and is needed in the tiers as long as what was."""
        space = self.asked.namespace
        tail = space.nodes[self.asked.hashes[_chunks(ticket.hit, space) - 1]]
        for tier in set(self._found.values()):
            tier.touch(tail, range(space.slots))

    def give_up(self) -> None:
        """Nobody wants to know any more."""
        self.over = True
        self._plan.clear()
        self._let_go()

    def _hold(self, node: Node) -> None:
        if node not in self._held:
            self._held[node] = None
            self._cache.hold(node)

    def _let_go(self, keeping: Container[Node | None] = ()) -> None:
        # from the tail: what was made for those below, and has come to nothing, goes with them
        for node in sorted(self._held, key=lambda node: -node.depth):
            if node not in keeping:
                del self._held[node]
                self._cache.let_go(node)


def _present(node: Node) -> int:
    """Slots that are committed or being written, as bits."""
    return node.writing | sum(1 << slot for slot, packed in enumerate(node.shards) if packed is not None)


def _chunks(hit: Hit, space: Namespace) -> int:
    return -(-hit.tokens // space.chunk_size)
