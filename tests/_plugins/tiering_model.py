"""A model of a server with tiers, for `tests/core/test_tiering_model.py`.

It plays the engines, the clock, and the tiers' threads: it decides which call of a tier runs when, whether it works,
fails half way, hangs, or comes back when nobody waits any more; and it spoils what the tiers hold. Blobs, tiering,
cache and index are the real ones.
"""

import contextlib
import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import attrs
import hypothesis.strategies as st
import model_prompts
from dict_tier import DictTier
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from model_prompts import CELL, CHUNK, PATHS, hashes_of

from lmcache.core.arena import Mapping
from lmcache.core.blob import BlobStore
from lmcache.core.cache import TIERS, Cache
from lmcache.core.cells import CellAllocator, unpack_cells
from lmcache.core.hints import Hints
from lmcache.core.index import Namespace, Node
from lmcache.core.invariants import check_invariants
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.core.promotion import Asked
from lmcache.core.protocol import Placed
from lmcache.core.tier import TierLocation
from lmcache.core.tier_in_use import TierInUse
from lmcache.core.tier_threads import Call
from lmcache.core.tier_url import StorePolicy, TierSettings
from lmcache.core.tiering import Answer, Tiering
from lmcache.errors import Refused, TierError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.eviction.lru import LRU

DEADLINE = 10.0
TIMEOUT = 5.0

GEOMETRIES = (*model_prompts.GEOMETRIES, Geometry((KVGroup(GroupKind.SLIDING_WINDOW, 2, (32,), window=4),)))
"""The last one is nothing but a window: its hits need no chunk but the last ones."""

OWNERS = st.integers(0, 2)
SPACES = st.integers(0, 1)
WHICH = st.integers(0, 99)
LIFETIMES = st.sampled_from([None, None, None, None, 2.0, 20.0])
OUTCOMES = st.sampled_from(["works", "works", "works", "fails", "half"])


def pattern(namespace: Namespace, chain_hash: bytes, group: int, shard: int, position: int) -> bytes:
    """What one cell of one object holds: nobody else's is equal."""
    return hashlib.sha256(namespace.digest + chain_hash + bytes([group, shard, position])).digest() * 2


class Shelf(DictTier):
    """A tier that does what it is told to do next."""

    scheme = "shelf"

    def __init__(self, shared: bool) -> None:
        super().__init__(shared)
        self.next = "works"

    def _may_fail(self) -> None:
        if self.next != "works":
            raise TierError("told to")

    def store(self, key, parts, deadline):
        self._may_fail()
        super().store(key, parts, deadline)

    def load(self, key, into, deadline):
        if self.next == "half":
            for view in into:
                view[: len(view) // 2 + 1] = b"\xee" * (len(view) // 2 + 1)
        self._may_fail()
        return super().load(key, into, deadline)

    def contains(self, keys, deadline):
        self._may_fail()
        return super().contains(keys, deadline)


class ThreadsByHand:
    """As `TierThreads`; a call runs when the model says so."""

    def __init__(self, clock: Callable[[], float], most: int, timeout: float) -> None:
        self._clock, self._most, self._timeout = clock, most, timeout
        self.waiting: list[deque[Call]] = [deque(), deque()]
        self.running: list[Call] = []
        self._done: deque[Call] = deque()

    @property
    def busy(self) -> int:
        return sum(map(len, self.waiting)) + len(self.running)

    @property
    def stuck(self) -> bool:
        return sum(call.overdue for call in self.running) >= self._most

    def submit(self, work, then, *, urgent: bool) -> None:
        self.waiting[not urgent].append(Call(work, then))
        self._start()

    def _start(self) -> None:
        while len(self.running) < self._most and any(self.waiting):
            call = (self.waiting[0] or self.waiting[1]).popleft()
            call.started = self._clock()
            self.running.append(call)

    def run(self, call: Call) -> None:
        try:
            call.outcome = call.work(call.started + self._timeout)
        except TierError as error:
            call.outcome = error

    def give_back(self, call: Call) -> None:
        self.run(call)
        self.running.remove(call)
        self._done.append(call)
        self._start()

    def finished(self):
        while self._done:
            yield self._done.popleft()

    def newly_overdue(self, now: float) -> int:
        late = [c for c in self.running if not c.overdue and now > c.started + 1.5 * self._timeout]
        for call in late:
            call.overdue = True
        return len(late)

    def withdraw(self) -> list[Call]:
        calls = [*self.waiting[0], *self.waiting[1]]
        self.waiting = [deque(), deque()]
        return calls


@attrs.frozen
class Written:
    """A reservation as its holder sees it."""

    owner: int
    namespace: Namespace
    objects: list[tuple[ChainHash, int, int, tuple[int, ...]]]
    """(hash, group, shard, cells)."""


@attrs.frozen
class Lookup:
    """A lookup as its scheduler sees it."""

    owner: int
    namespace: Namespace
    hashes: list[ChainHash]
    until: float


@attrs.frozen(eq=False)
class Save:
    """A save that has not come back."""

    tier: TierInUse
    node: Node
    slot: int
    packed: bytes


TIER = st.tuples(st.sampled_from(list(StorePolicy)), st.integers(1, 2), st.booleans())
"""Policy, threads, whether others write to it, too."""


class TieringModel(RuleBasedStateMachine):
    @initialize(
        cells=st.integers(6, 20),
        pin_share=st.sampled_from([0.5, 1.0]),
        spaces=st.sets(st.sampled_from(range(len(GEOMETRIES))), min_size=1, max_size=2),
        tiers=st.lists(TIER, min_size=1, max_size=2),
    )
    def start(self, cells: int, pin_share: float, spaces: set[int], tiers: list[tuple[StorePolicy, int, bool]]) -> None:
        self.now = 1000.0
        self.cache = Cache(CellAllocator(cells), LRU(), pin_share=pin_share)
        self.cache.allocator.back(cells)
        self.namespaces = [
            Namespace(NamespaceDigest(bytes([number]) * 16), {"n": str(number)}, GEOMETRIES[number], CHUNK, CELL)
            for number in sorted(spaces)
        ]
        self.cache.namespaces = {namespace.digest: namespace for namespace in self.namespaces}
        self.memory = memoryview(bytearray(cells * CELL))
        arena = SimpleNamespace(memory=self.memory)
        self.shelves = [Shelf(shared) for _, _, shared in tiers]
        self.tiering = Tiering(
            self.cache,
            [
                (BlobStore(shelf), TierSettings(TierLocation(f"shelf{n}"), policy, threads, TIMEOUT))
                for n, (shelf, (policy, threads, _)) in enumerate(zip(self.shelves, tiers, strict=True))
            ],
            lambda cells, length: Mapping.pieces(arena, CELL, cells, length),
            deadline_s=DEADLINE,
            clock=lambda: self.now,
            make_threads=lambda _, threads, timeout, __: ThreadsByHand(lambda: self.now, threads, timeout),
        )
        self.threads: list[ThreadsByHand] = [tier.threads for tier in self.tiering.tiers]
        for tier in self.tiering.tiers:
            self.watch(tier)
        self.owners = [1, 2, 3]
        self.fresh_owner = itertools.count(4)
        self.written: dict[int, Written] = {}
        self.pending: dict[int, Lookup] = {}
        self.tickets: dict[int, Lookup] = {}
        self.fetching: dict[tuple[Node, int], tuple[int, ...]] = {}
        self.saving: list[Save] = []

    def watch(self, tier: TierInUse) -> None:
        """Keep book of what the tier's calls may still touch."""
        fetch, save = tier.fetch, tier.save

        def watched_fetch(node, slot, cells, then):
            key = (node, slot)
            assert key not in self.fetching, "two fetches of one shard"

            def ended(there):
                del self.fetching[key]
                then(there)

            self.fetching[key] = cells
            started = fetch(node, slot, cells, ended)
            if not started:
                del self.fetching[key]
            return started

        def watched_save(node, slot, then):
            assert not node.expires_some_day, "what expires went to a tier"
            own = Save(tier, node, slot, node.shards[slot])

            def ended():
                self.saving.remove(own)
                then()

            self.saving.append(own)
            started = save(node, slot, ended)
            if not started:
                self.saving.remove(own)
            return started

        tier.fetch, tier.save = watched_fetch, watched_save

    def teardown(self) -> None:
        if not hasattr(self, "tiering"):
            return
        for owner in self.owners:
            self.gone(owner)
        for _ in range(200):
            if not self.tiering.busy:
                break
            self.now += 40.0
            self.run_all("works")
        assert (self.tiering.busy, self.tiering._promotions) == (0, {})
        for pin in list(self.cache.prefix_pins.all):
            self.cache.unpin(pin.id)
        cache = self.cache
        assert (len(cache.reservations), len(cache.tickets)) == (0, 0)
        assert not any(node.held or node.pins for space in self.namespaces for node in space.nodes.values())
        while leaves := [n for s in self.namespaces for n in s.nodes.values() if not n.first_child]:
            for leaf in leaves:
                cache.residents.evict(leaf)
        assert (cache.allocator.used, cache.allocator.free) == (0, cache.allocator.cells)
        assert not cache.residents.orphaned
        check_invariants(cache)

    def space(self, number: int) -> Namespace:
        return self.namespaces[number % len(self.namespaces)]

    # ---------------------------------------------------------------------------------------------------------- engines

    def reserve(
        self, owner: int, namespace: Namespace, path: Sequence[int], group: int, shard: int, ttl: float | None
    ) -> int:
        hashes = hashes_of(path)
        placement = self.cache.reserve(owner, namespace, "", b"", hashes, group, shard, Hints(ttl_s=ttl))
        granted = [h for h, place in zip(hashes, placement.placed, strict=False) if place == Placed.GRANTED]
        cells, size = unpack_cells(placement.cells), namespace.object_cells[group]
        if granted:
            self.written[placement.reservation] = Written(
                owner,
                namespace,
                [(h, group, shard, cells[n * size : (n + 1) * size]) for n, h in enumerate(granted)],
            )
        return placement.reservation

    def write(self, written: Written, whole: bool = True) -> None:
        for chain_hash, group, shard, cells in written.objects:
            for position, cell in enumerate(cells):
                data = pattern(written.namespace, chain_hash, group, shard, position)
                self.memory[cell * CELL : (cell + 1) * CELL] = data if whole else data[:9] + bytes(CELL - 9)

    @rule(owner=OWNERS, space=SPACES, path=PATHS, lazy=st.sampled_from([9, 9, 9, 0, 1, 2]), ttl=LIFETIMES)
    def store(self, owner: int, space: int, path: tuple[int, ...], lazy: int, ttl: float | None) -> None:
        """The ranks of an engine store a prompt; one of them may not get far."""
        namespace = self.space(space)
        for turn, slot in enumerate(range(namespace.slots)):
            group, shard = namespace.group_and_shard(slot)
            reservation = self.reserve(self.owners[owner], namespace, path, group, shard, ttl)
            if reservation and turn == lazy:
                self.write(self.written[reservation], whole=False)
            elif reservation:
                self.write(self.written[reservation])
                self.cache.commit(self.owners[owner], reservation)
                del self.written[reservation]

    @rule(owner=OWNERS, space=SPACES, path=PATHS)
    def store_all(self, owner: int, space: int, path: tuple[int, ...]) -> None:
        self.store(owner, space, path, 9, None)

    @precondition(lambda self: self.written)
    @rule(which=WHICH, end=st.sampled_from(["commit", "abort"]))
    def end_writing(self, which: int, end: str) -> None:
        number = sorted(self.written)[which % len(self.written)]
        written = self.written.pop(number)
        if end == "commit":
            self.write(written)
        getattr(self.cache, end)(written.owner, number)

    @rule(owner=OWNERS, space=SPACES, path=PATHS, limit=st.sampled_from([16, 16, 16, 15, 6]), ttl=LIFETIMES)
    def look_up(self, owner: int, space: int, path: tuple[int, ...], limit: int, ttl: float | None) -> None:
        namespace, hashes = self.space(space), hashes_of(path)
        asked = Asked(self.owners[owner], namespace, hashes, limit, "", Hints(ttl_s=ttl))
        answer = self.tiering.lookup(asked)
        self.heard(answer, Lookup(self.owners[owner], namespace, hashes, self.now + DEADLINE))

    @rule(owner=OWNERS, space=SPACES, path=PATHS)
    def look_up_all(self, owner: int, space: int, path: tuple[int, ...]) -> None:
        self.look_up(owner, space, path, 16, None)

    @rule(owner=OWNERS, space=SPACES, path=PATHS, outcome=OUTCOMES, told=st.booleans())
    def look_up_and_search(self, owner: int, space: int, path: tuple[int, ...], outcome: str, told: bool) -> None:
        """What is being done is done, the search for this lookup as well: it fetches, and one fetch comes back."""
        self.look_up_all(owner, space, path)
        for shelf, threads in zip(self.shelves, self.threads, strict=True):
            shelf.next = "works"
            for call in list(threads.running):
                threads.give_back(call)
            self.tick()
        for tier in range(len(self.threads)):
            self.call_returns(tier, 0, outcome, told)

    def heard(self, answer: Answer, lookup: Lookup) -> None:
        if not answer.final:
            assert (answer.tokens, bool(answer.ticket)) == (0, True)
            self.pending[answer.ticket] = lookup
        elif answer.ticket:
            assert answer.tokens > 0
            assert self.cache.tickets[answer.ticket].owner == lookup.owner
            self.tickets[answer.ticket] = lookup

    @precondition(lambda self: self.pending)
    @rule(which=WHICH)
    def ask_again(self, which: int) -> None:
        number = sorted(self.pending)[which % len(self.pending)]
        lookup = self.pending.pop(number)
        self.tick()
        answer = self.tiering.poll(lookup.owner, number)
        assert answer.final or (answer.ticket == number and self.now < lookup.until), "its time is over"
        self.heard(answer, lookup)

    @precondition(lambda self: self.pending)
    @rule(which=WHICH, owner=OWNERS)
    def ask_for_anothers(self, which: int, owner: int) -> None:
        """Another's lookup can neither be asked for nor dropped."""
        number = sorted(self.pending)[which % len(self.pending)]
        if self.owners[owner] != self.pending[number].owner:
            assert self.tiering.poll(self.owners[owner], number) == Answer(0, 0, final=True)
            self.tiering.drop(self.owners[owner], number)
            assert number in self.tiering._promotions

    @precondition(lambda self: self.pending or self.tickets)
    @rule(which=WHICH)
    def drop(self, which: int) -> None:
        numbers = sorted([*self.pending, *self.tickets])
        number = numbers[which % len(numbers)]
        lookup = self.pending.pop(number, None) or self.tickets.pop(number)
        self.tiering.drop(lookup.owner, number)
        self.cache.drop(lookup.owner, number)

    @precondition(lambda self: self.tickets)
    @rule(which=WHICH)
    def load(self, which: int) -> None:
        """Every rank reads what the ticket says."""
        number = sorted(self.tickets)[which % len(self.tickets)]
        lookup = self.tickets.pop(number)
        for rank in range(lookup.namespace.geometry.ranks):
            self.check(number, lookup, rank)
            assert self.cache.confirm(number, lookup.namespace, rank)

    def check(self, number: int, lookup: Lookup, rank: int) -> None:
        namespace = lookup.namespace
        hit, packed = self.cache.open(number, namespace, rank)
        for group, needs in enumerate(hit.needs):
            shard, size = namespace.geometry.shard_of(group, rank), namespace.object_cells[group]
            cells = unpack_cells(packed[group])
            assert len(cells) == size * len(needs)
            for turn, (chunk, position) in enumerate(itertools.product(needs, range(size))):
                expected = pattern(namespace, lookup.hashes[chunk], group, shard, position)
                assert self.memory[cells[turn] * CELL : (cells[turn] + 1) * CELL] == expected, "foreign bytes"

    @rule(which=st.integers(0, 9))
    def owner_dies(self, which: int) -> None:
        if which < len(self.owners):  # else nobody, this time
            self.gone(self.owners[which])
            self.owners[which] = next(self.fresh_owner)

    @rule(owner=OWNERS, space=SPACES, path=PATHS)
    def only_tiers_have(self, owner: int, space: int, path: tuple[int, ...]) -> None:
        """A prompt is stored, and everything that may go leaves L1 when tiers have it."""
        self.store_all(owner, space, path)
        self.all_calls_return("works")
        self.forget()

    def forget(self) -> None:
        while leaves := [n for s in self.namespaces for n in s.nodes.values() if n.evictable and n.cells]:
            for leaf in leaves:
                self.cache.residents.evict(leaf)

    def gone(self, owner: int) -> None:
        self.tiering.owner_gone(owner)
        self.cache.owner_gone(owner)
        for book in (self.written, self.pending, self.tickets):
            for number in [number for number, each in book.items() if each.owner == owner]:
                del book[number]

    @rule(space=SPACES, path=PATHS, seconds=st.sampled_from([1.0, 30.0]), pinned=st.booleans())
    def pin(self, space: int, path: tuple[int, ...], seconds: float, pinned: bool) -> None:
        if pinned:
            with contextlib.suppress(Refused):  # too many are
                self.cache.pin(self.space(space), hashes_of(path), seconds)
        elif pins := list(self.cache.prefix_pins.all):
            self.cache.unpin(pins[0].id)

    # -------------------------------------------------------------------------------------------------- tiers and time

    @rule(seconds=st.sampled_from([0.0, 0.0, 0.5, 3.0, 8.0, 12.0]))
    def later(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    def tick(self) -> None:
        self.cache.advance(self.now)
        self.tiering.advance()

    @rule(tier=st.integers(0, 1), which=WHICH, outcome=OUTCOMES, told=st.booleans())
    def call_returns(self, tier: int, which: int, outcome: str, told: bool) -> None:
        """One call comes back, in any order, and the server hears of it at once or later."""
        number = tier % len(self.threads)
        threads = self.threads[number]
        if threads.running:
            self.shelves[number].next = outcome
            threads.give_back(threads.running[which % len(threads.running)])
        if told:
            self.tick()

    @rule(tier=st.integers(0, 1), which=WHICH)
    def call_touches_its_buffers(self, tier: int, which: int) -> None:
        """One call goes about its business and does not come back yet."""
        number = tier % len(self.threads)
        threads = self.threads[number]
        if threads.running:
            self.shelves[number].next = "half"
            threads.run(threads.running[which % len(threads.running)])

    @rule(outcome=st.sampled_from(["works", "works", "works", "fails"]))
    def all_calls_return(self, outcome: str) -> None:
        """Whatever becomes of them: then nothing is left to wait for, and every lookup is final."""
        self.run_all(outcome)
        for number, lookup in list(self.pending.items()):
            answer = self.tiering.poll(lookup.owner, number)
            assert answer.final, "nothing is on its way, and it waits"
            del self.pending[number]
            self.heard(answer, lookup)

    def run_all(self, outcome: str) -> None:
        for shelf in self.shelves:
            shelf.next = outcome
        for _ in range(1000):
            for threads in self.threads:
                while threads.running:
                    threads.give_back(threads.running[0])
            self.tick()
            if not any(threads.busy for threads in self.threads):
                return
        raise AssertionError("tiers are given work for ever")

    @rule(
        tier=st.integers(0, 1),
        which=WHICH,
        other=WHICH,
        how=st.sampled_from(["delete", "flip", "cut", "foreign", "another's"]),
    )
    def spoil(self, tier: int, which: int, other: int, how: str) -> None:
        """Somebody changes what a tier holds."""
        blobs = self.shelves[tier % len(self.shelves)].blobs
        if not blobs:
            return
        keys = sorted(blobs)
        key = keys[which % len(keys)]
        blob = blobs.pop(key)
        flipped = bytearray(blob) or bytearray(1)
        flipped[7919 * other % len(flipped) if other % 2 else -1] ^= 1
        match how:
            case "flip":
                blobs[key] = bytes(flipped)
            case "cut":
                blobs[key] = blob[:-1]
            case "foreign":
                blobs[key] = b"somebody else's"
            case "another's":
                blobs[key] = blobs[keys[other % len(keys)]] if keys[other % len(keys)] != key else blob

    @rule(how=st.sampled_from(["delete", "flip", "flip", "cut", "foreign"]))
    def spoil_much(self, how: str) -> None:
        """Every other blob."""
        for tier, shelf in enumerate(self.shelves):
            for which in range(0, len(shelf.blobs), 2):
                self.spoil(tier, which, 2, how)

    # ------------------------------------------------------------------------------------------- what holds at any time

    @invariant()
    def cache_is_consistent(self) -> None:
        if hasattr(self, "tiering"):
            check_invariants(self.cache)

    @invariant()
    def what_is_readable_is_what_was_stored(self) -> None:
        for namespace in getattr(self, "namespaces", ()):
            for node in namespace.nodes.values():
                for slot, packed in enumerate(node.shards):
                    for position, cell in enumerate(unpack_cells(packed or b"")):
                        expected = pattern(namespace, node.hash, *namespace.group_and_shard(slot), position)
                        assert self.memory[cell * CELL : (cell + 1) * CELL] == expected, "foreign bytes"

    @invariant()
    def cells_that_a_call_may_touch_are_nobody_elses(self) -> None:
        if not hasattr(self, "tiering"):
            return
        reserved = {
            (node, slot): unpack_cells(packed)
            for reservation in self.cache.reservations.values()
            if reservation.owner == TIERS
            for node, slot, packed in reservation.objects
        }
        assert reserved == self.fetching
        for save in self.saving:
            assert save.node.shards[save.slot] == save.packed

    @invariant()
    def whatever_is_held_is_held_by_somebody(self) -> None:
        if not hasattr(self, "tiering"):
            return
        held = Counter(node for promotion in self.tiering._promotions.values() for node in promotion._held)
        leaving = self.tiering._saving._on_evict
        held.update(list(leaving._leaving) if leaving else ())
        held.update(s.node for s in self.saving if s.tier.settings.store_policy is StorePolicy.WRITE_THROUGH)
        nodes = {node for namespace in self.namespaces for node in namespace.nodes.values()}
        assert {node: node.held for node in nodes if node.held} == held
        assert {n for n, each in self.tiering._promotions.items() if not each.over} <= self.pending.keys()
