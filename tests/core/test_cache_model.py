"""The cache against a simple model of it: in no order of calls does a ticket that holds read a byte not its own.

The model keeps its own book of who wrote what, plays the clients (it writes and reads simulated cells, half-writes
included), and knows nothing of the cache's data structures beyond looking at which shards are there. Long runs:
`LMCACHE_MODEL_EXAMPLES=5000 pytest tests/core/test_cache_model.py`.
"""

import itertools
import os
import random
from collections.abc import Iterator, Sequence

import attrs
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model_prompts import CELL, CHUNK, DEPTH, GEOMETRIES, PATHS, hash_of, hashes_of

from lmcache.core.cache import Cache
from lmcache.core.cells import CellAllocator, unpack_cells
from lmcache.core.index import Namespace, Node
from lmcache.core.invariants import check_invariants
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.core.protocol import Placed
from lmcache.errors import Refused
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.eviction.lru import LRU

EXAMPLES = int(os.environ.get("LMCACHE_MODEL_EXAMPLES", "60"))
STEPS = int(os.environ.get("LMCACHE_MODEL_STEPS", "60"))

MOST_CELLS = 14

ALL_PATHS = [path for length in range(1, DEPTH + 1) for path in itertools.product((0, 1), repeat=length)]


class Nasty(EvictionPolicy):
    """Everything that a policy must not be: random, forgetful, inventive, and it raises."""

    name = "nasty"
    random = random.Random(0)

    def __init__(self) -> None:
        self.seen: list[ChunkNode] = []

    def _raise_now_and_then(self) -> None:
        if self.random.random() < 0.05:
            raise RuntimeError("a policy's bug")

    def insert(self, node: ChunkNode) -> None:
        self._raise_now_and_then()
        self.seen.append(node)

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        self._raise_now_and_then()

    def remove(self, node: ChunkNode) -> None:
        self._raise_now_and_then()

    def victims(self) -> Iterator[ChunkNode]:
        self._raise_now_and_then()
        for node in self.random.choices([*self.seen, None, "no node"], k=len(self.seen) + 2):
            self._raise_now_and_then()
            yield node  # removed ones as well


@attrs.define
class Written:
    """A reservation as its holder sees it."""

    owner: int
    namespace: Namespace
    objects: list[tuple[ChainHash, int, int, tuple[int, ...]]]
    """(hash, group, shard, cells)."""


@attrs.define
class Copy:
    """A load by one rank of a ticket: what it should read where, and what it has read so far."""

    ticket: int
    rank: int
    wanted: list[tuple[int, object]]
    """(cell, the bytes that belong there)."""
    read: list[object] = attrs.Factory(list)


@attrs.define
class Issued:
    """A ticket as its scheduler sees it."""

    owner: int
    namespace: Namespace
    path: tuple[int, ...]
    tokens: int
    needs: set[tuple[ChainHash, int]]
    """(hash, group)."""
    confirmed: set[int] = attrs.Factory(set)
    state: str = "held"


def payload(namespace: Namespace, chain_hash: ChainHash, group: int, shard: int, position: int) -> object:
    """What the bytes of one cell of one object are: nobody else's are equal."""
    return (namespace.digest, chain_hash, group, shard, position)


def first_read(group: KVGroup, end: int) -> int:
    match group.kind:
        case GroupKind.FULL:
            return 0
        case GroupKind.SLIDING_WINDOW:
            return max(0, end - group.window + 1)
        case GroupKind.RECURRENT:
            return end - group.tokens_per_block
    return end


def needs_of(geometry: Geometry, hashes: Sequence[ChainHash], end: int) -> set[tuple[ChainHash, int]]:
    """The objects that a hit of `end` tokens reads."""
    return {
        (hashes[chunk], number)
        for number, group in enumerate(geometry.groups)
        for chunk in range(-(-end // CHUNK))
        if (chunk + 1) * CHUNK > first_read(group, end) and first_read(group, end) < end
    }


class CacheModel(RuleBasedStateMachine):
    policy_class: type[EvictionPolicy] = LRU
    complete_policy = True
    """Whether the policy offers everybody, so that a reserve may stop only when there is truly no room."""

    @initialize(
        seed=st.integers(0, 9),
        cells=st.integers(3, MOST_CELLS),
        unbacked=st.integers(0, 4),
        pin_share=st.sampled_from([0.5, 1.0]),
        spaces=st.sets(st.sampled_from(range(len(GEOMETRIES))), min_size=1, max_size=2),
    )
    def start(self, seed: int, cells: int, unbacked: int, pin_share: float, spaces: set[int]) -> None:
        Nasty.random = random.Random(seed)
        self.cells = cells
        self.cache = Cache(CellAllocator(cells), self.policy_class(), pin_share=pin_share)
        self.cache.allocator.back(max(1, cells - unbacked))
        self.namespaces = [
            Namespace(NamespaceDigest(bytes([number]) * 16), {}, geometry, CHUNK, CELL)
            for number, geometry in enumerate(GEOMETRIES)
            if number in spaces
        ]
        self.told: set[tuple[bytes, ChainHash, int]] = set()
        """(namespace, hash, group): what an observer thinks that can be read."""
        self.cache.on_sealed = self.seal
        self.cache.residents.on_evicted = self.evict
        self.cache.namespaces = {namespace.digest: namespace for namespace in self.namespaces}
        self.owners = [1, 2, 3]
        self.fresh_owner = itertools.count(4)
        self.memory: list[object] = [None] * cells
        self.written: dict[int, Written] = {}
        self.ended_reservations: list[int] = []
        self.tickets: dict[int, Issued] = {}
        self.copies: list[Copy] = []
        self.committed: dict[tuple[bytes, ChainHash, int], tuple[int, ...]] = {}
        """(namespace, hash, slot) → cells."""
        self.parents: dict[tuple[bytes, ChainHash], ChainHash | None] = {}

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for owner in self.owners:
            self.owner_gone(owner)
        cache = self.cache
        assert (len(cache.reservations), len(cache.tickets)) == (0, 0)
        while leaves := [n for s in self.namespaces for n in s.nodes.values() if not n.first_child]:
            for leaf in leaves:
                cache.residents.evict(leaf)
        assert (cache.allocator.used, cache.allocator.free) == (0, cache.allocator.backed)
        assert not cache.residents.orphaned
        check_invariants(cache)

    def seal(self, node: Node, group: int) -> None:
        key = (node.namespace.digest, node.hash, group)
        assert key not in self.told
        self.told.add(key)

    def evict(self, node: Node) -> None:
        self.told = {key for key in self.told if key[:2] != (node.namespace.digest, node.hash)}

    def space(self, number: int) -> Namespace:
        return self.namespaces[number % len(self.namespaces)]

    # --------------------------------------------------------------------------------------------- what the model knows

    def writing(self) -> set[tuple[bytes, ChainHash, int]]:
        return {
            (w.namespace.digest, chain_hash, w.namespace.slot(group, shard))
            for w in self.written.values()
            for chain_hash, group, shard, _ in w.objects
        }

    def held(self) -> list[Issued]:
        return [ticket for ticket in self.tickets.values() if ticket.state == "held"]

    def pinned(self, owner: int | None = None) -> set[tuple[bytes, ChainHash]]:
        return {
            (ticket.namespace.digest, chain_hash)
            for ticket in self.held()
            if owner in (None, ticket.owner)
            for chain_hash, _ in ticket.needs
        }

    def cells_of(self, key: tuple[bytes, ChainHash]) -> int:
        """Cells of a node, written and being written."""
        digest, chain_hash = key
        done = sum(len(c) for (d, h, _), c in self.committed.items() if (d, h) == key)
        return done + sum(
            len(cells)
            for w in self.written.values()
            for h, _, _, cells in w.objects
            if (w.namespace.digest, h) == (digest, chain_hash)
        )

    def known(self) -> set[tuple[bytes, ChainHash]]:
        return {(s.digest, chain_hash) for s in self.namespaces for chain_hash in s.nodes}

    def above(self, key: tuple[bytes, ChainHash]) -> Iterator[tuple[bytes, ChainHash]]:
        """The node and its ancestors."""
        digest, chain_hash = key
        current: ChainHash | None = chain_hash
        while current is not None:
            yield digest, current
            current = self.parents[digest, current]

    def sealed(self, namespace: Namespace, chain_hash: ChainHash, group: int) -> bool:
        shards = range(namespace.geometry.groups[group].shards)
        return all((namespace.digest, chain_hash, namespace.slot(group, shard)) in self.committed for shard in shards)

    def longest(self, namespace: Namespace, hashes: Sequence[ChainHash], limit: int) -> int:
        geometry = namespace.geometry
        whole = any(group.cached and group.kind is not GroupKind.FULL for group in geometry.groups)
        for end in range(min(limit, len(hashes) * CHUNK), 0, -1):
            if end % geometry.alignment or (whole and end % CHUNK):
                continue
            if all(self.sealed(namespace, chain_hash, group) for chain_hash, group in needs_of(geometry, hashes, end)):
                return end
        return 0

    # ---------------------------------------------------------------------------------------------------------- writing

    @rule(
        owner=st.integers(0, 9),
        space=st.integers(0, 1),
        path=PATHS,
        start=st.integers(0, DEPTH - 1),
        group=st.integers(0, 2),
        shard=st.integers(0, 1),
    )
    def reserve(self, owner: int, space: int, path: tuple[int, ...], start: int, group: int, shard: int) -> None:
        namespace = self.space(space)
        cached = namespace.geometry.cached_groups
        group = cached[group % len(cached)]
        shard %= namespace.geometry.groups[group].shards
        owner = self.owners[owner % len(self.owners)]
        start = min(start, len(path) - 1)
        parent = hash_of(path[:start]) if start else b""
        hashes = hashes_of(path)[start:]
        size, slot = namespace.object_cells[group], namespace.slot(group, shard)
        busy, before, pinned = self.writing(), dict(self.committed), self.pinned()
        free = self.cache.allocator.free
        known = self.known()

        placement = self.cache.reserve(owner, namespace, "", parent, hashes, group, shard)

        evicted = self.learn_evictions()
        if start and (namespace.digest, ChainHash(parent)) not in known:
            assert (placement.placed, placement.reservation, evicted) == (b"", 0, set())
            return
        # each answer is true of what was there before
        granted = []
        for chain_hash, place in zip(hashes, placement.placed, strict=False):
            key = (namespace.digest, chain_hash, slot)
            present = key in before and key[:2] not in evicted  # it may have made room for a chunk before it
            expected = Placed.PRESENT if present else Placed.BUSY if key in busy else Placed.GRANTED
            assert place == expected
            if place == Placed.GRANTED:
                granted.append(chain_hash)
        cells = unpack_cells(placement.cells)
        assert len(cells) == size * len(granted)
        assert bool(placement.reservation) == bool(granted)
        if granted:
            objects = [
                (chain_hash, group, shard, cells[n * size : (n + 1) * size]) for n, chain_hash in enumerate(granted)
            ]
            self.written[placement.reservation] = Written(owner, namespace, objects)
        self.learn_parents(namespace, parent, hashes[: len(placement.placed)])
        # victims: nobody reads or writes them, and none of their descendants stays
        assert not evicted & pinned
        assert not {(d, h) for d, h, _ in busy} & evicted
        anew = {(namespace.digest, chain_hash) for chain_hash in granted}  # may have gone, and come back in its turn
        for key in self.known():
            assert not (evicted - anew) & set(self.above(key))
        sizes = [sum(len(c) for (d, h, _), c in before.items() if (d, h) == key) for key in evicted]
        after = free + sum(sizes) - len(cells)
        assert self.cache.allocator.free == after
        if evicted:
            assert after < max(sizes), "evicted more than was needed"
        if len(placement.placed) < len(hashes) and self.complete_policy:
            self.check_no_room(namespace, hashes[len(placement.placed)], size)

    def check_no_room(self, namespace: Namespace, chain_hash: ChainHash, size: int) -> None:
        """A reserve stopped before this chunk: everything that could have gone is too little."""
        in_use = self.pinned() | {(d, h) for d, h, _ in self.writing()}
        staying: set[tuple[bytes, ChainHash]] = set()
        for key in in_use:
            staying |= set(self.above(key))
        path = next(path for path in ALL_PATHS if hash_of(path) == chain_hash)
        staying |= {(namespace.digest, each) for each in hashes_of(path)}
        could_go = sum(self.cells_of(key) for key in self.known() - staying)
        assert self.cache.allocator.free + could_go < size, "stopped although there was room"

    def learn_evictions(self) -> set[tuple[bytes, ChainHash]]:
        """See which committed shards are gone; a node goes as a whole."""
        gone = set()
        for namespace in self.namespaces:
            for digest, chain_hash, slot in list(self.committed):
                if digest != namespace.digest:
                    continue
                node = namespace.nodes.get(chain_hash)
                if node is None or node.shards[slot] is None:
                    del self.committed[digest, chain_hash, slot]
                    gone.add((digest, chain_hash))
        assert not gone & {(digest, chain_hash) for digest, chain_hash, _ in self.committed}
        return gone

    def learn_parents(self, namespace: Namespace, parent: bytes, hashes: Sequence[ChainHash]) -> None:
        above = ChainHash(parent) if parent else None
        for chain_hash in hashes:
            self.parents[namespace.digest, chain_hash] = above
            above = chain_hash

    @precondition(lambda self: self.written)
    @rule(which=st.integers(0, 99), how=st.sampled_from(["half", "all", "garbage"]))
    def write(self, which: int, how: str) -> None:
        """The holder of a reservation copies, perhaps not to the end."""
        written = self.written[sorted(self.written)[which % len(self.written)]]
        for chain_hash, group, shard, cells in written.objects:
            for position, cell in enumerate(cells):
                whole = payload(written.namespace, chain_hash, group, shard, position)
                self.memory[cell] = whole if how == "all" else ("half of", whole) if how == "half" else "garbage"

    @precondition(lambda self: self.written)
    @rule(which=st.integers(0, 99))
    def commit(self, which: int) -> None:
        reservation = sorted(self.written)[which % len(self.written)]
        self.write(which, "all")
        written = self.written.pop(reservation)
        self.cache.commit(written.owner, reservation)
        self.ended_reservations.append(reservation)
        for chain_hash, group, shard, cells in written.objects:
            self.committed[written.namespace.digest, chain_hash, written.namespace.slot(group, shard)] = cells

    @precondition(lambda self: self.written)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        reservation = sorted(self.written)[which % len(self.written)]
        self.cache.abort(self.written.pop(reservation).owner, reservation)
        self.ended_reservations.append(reservation)

    @rule(owner=st.integers(0, 9), space=st.integers(0, 1), path=PATHS, lazy=st.sampled_from([9, 9, 9, 0, 1, 2]))
    def store(self, owner: int, space: int, path: tuple[int, ...], lazy: int) -> None:
        """The ranks of a well-behaved engine store a prompt; one of them may not."""
        geometry = self.space(space).geometry
        objects = [
            (group, shard)
            for group, number in enumerate(geometry.cached_groups)
            for shard in range(geometry.groups[number].shards)
        ]
        for turn, (group, shard) in enumerate(objects):
            if turn != lazy:
                before = set(self.written)
                self.reserve(owner, space, path, 0, group, shard)
                for reservation in set(self.written) - before:
                    self.commit(sorted(self.written).index(reservation))

    @rule(owner=st.integers(0, 9), space=st.integers(0, 1), path=PATHS)
    def store_all(self, owner: int, space: int, path: tuple[int, ...]) -> None:
        self.store(owner, space, path, 9)

    @rule(which=st.integers(0, 99), owner=st.integers(0, 9), end=st.sampled_from(["commit", "abort"]))
    def end_what_is_not_ones_own(self, which: int, owner: int, end: str) -> None:
        """Another's reservation, one that has ended, or none: refused, and nothing happens."""
        owner = self.owners[owner % len(self.owners)]
        others = [number for number, written in self.written.items() if written.owner != owner]
        candidates = sorted([*others, *self.ended_reservations[-3:], 0, 10**9])
        with pytest.raises(Refused):
            getattr(self.cache, end)(owner, candidates[which % len(candidates)])

    # ---------------------------------------------------------------------------------------------------------- reading

    @rule(
        owner=st.integers(0, 9),
        space=st.integers(0, 1),
        path=PATHS,
        limit=st.sampled_from([DEPTH * CHUNK, DEPTH * CHUNK, DEPTH * CHUNK - 1, 6, 3]),
    )
    def lookup(self, owner: int, space: int, path: tuple[int, ...], limit: int) -> None:
        namespace, hashes = self.space(space), hashes_of(path)
        owner = self.owners[owner % len(self.owners)]
        best = self.longest(namespace, hashes, limit)
        needs = needs_of(namespace.geometry, hashes, best)
        wanted = self.pinned(owner) | {(namespace.digest, chain_hash) for chain_hash, _ in needs}
        fits = sum(map(self.cells_of, wanted)) <= self.cache._pin_limit

        ticket = self.cache.lookup(owner, namespace, hashes, limit)

        tokens = ticket.hit.tokens if ticket else 0
        assert tokens == best if fits else tokens < best
        if ticket is None:
            return
        assert ticket.id not in self.tickets
        needs = needs_of(namespace.geometry, hashes, tokens)
        assert all(self.sealed(namespace, chain_hash, group) for chain_hash, group in needs)
        self.tickets[ticket.id] = Issued(owner, namespace, path, tokens, needs)
        assert sum(map(self.cells_of, self.pinned(owner))) <= self.cache._pin_limit

    @rule(owner=st.integers(0, 9), space=st.integers(0, 1), path=PATHS)
    def load(self, owner: int, space: int, path: tuple[int, ...]) -> None:
        """Every rank of a well-behaved engine loads what it can of a prompt."""
        before = set(self.tickets)
        self.lookup(owner, space, path, DEPTH * CHUNK)
        for number in set(self.tickets) - before:
            for rank in range(self.space(space).geometry.ranks):
                self.open(sorted(self.tickets)[-8:].index(number), rank, 9)
                self.confirm(len(self.copies) - 1)

    @rule(owner=st.integers(0, 9), space=st.integers(0, 1), path=PATHS)
    def load_another(self, owner: int, space: int, path: tuple[int, ...]) -> None:
        self.load(owner, space, path)

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 99), rank=st.integers(0, 1), space=st.integers(0, 9))
    def open(self, which: int, rank: int, space: int) -> None:
        number = self.any_ticket(which)
        issued = self.tickets[number]
        namespace = self.namespaces[space] if space < len(self.namespaces) else issued.namespace
        rank %= namespace.geometry.ranks
        if issued.state != "held" or namespace is not issued.namespace:
            with pytest.raises(Refused):
                self.cache.open(number, namespace, rank)
            return
        hit, cells = self.cache.open(number, namespace, rank)
        assert hit.tokens == issued.tokens
        hashes, geometry = hashes_of(issued.path), namespace.geometry
        wanted = []
        for group, packed in enumerate(cells):
            chunks = [chunk for chunk, chain_hash in enumerate(hashes) if (chain_hash, group) in issued.needs]
            assert chunks == list(hit.needs[group])
            shard, size = geometry.shard_of(group, rank), namespace.object_cells[group]
            expected = [
                payload(namespace, hashes[chunk], group, shard, position)
                for chunk in chunks
                for position in range(size)
            ]
            wanted += zip(unpack_cells(packed), expected, strict=True)
        self.copies.append(Copy(number, rank, wanted))

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(0, 99), cells=st.integers(1, 3))
    def read(self, which: int, cells: int) -> None:
        """A worker copies on, from wherever the cells were when it opened the ticket."""
        copy = self.copies[which % len(self.copies)]
        for cell, _ in copy.wanted[len(copy.read) : len(copy.read) + cells]:
            copy.read.append(self.memory[cell])

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(0, 99))
    def confirm(self, which: int) -> None:
        copy = self.copies.pop(which % len(self.copies))
        for cell, _ in copy.wanted[len(copy.read) :]:
            copy.read.append(self.memory[cell])
        issued = self.tickets[copy.ticket]
        held = self.cache.confirm(copy.ticket, issued.namespace, copy.rank)
        assert held == (issued.state in ("held", "complete"))
        if held and copy.rank not in issued.confirmed:
            assert copy.read == [expected for _, expected in copy.wanted]
            issued.confirmed.add(copy.rank)
            if len(issued.confirmed) == issued.namespace.geometry.ranks:
                issued.state = "complete"

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 99), space=st.integers(0, 1))
    def confirm_for_another_namespace(self, which: int, space: int) -> None:
        number = self.any_ticket(which)
        if self.space(space) is not self.tickets[number].namespace and self.tickets[number].state != "complete":
            assert not self.cache.confirm(number, self.space(space), 0)

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 99), owner=st.integers(0, 9))
    def drop(self, which: int, owner: int) -> None:
        number = self.any_ticket(which)
        issued = self.tickets[number]
        owner = self.owners[owner] if owner < len(self.owners) else issued.owner
        self.cache.drop(owner, number)
        if owner == issued.owner and issued.state == "held":
            issued.state = "dropped"

    def any_ticket(self, which: int) -> int:
        """One of the newest tickets, ended or not."""
        newest = sorted(self.tickets)[-8:]
        return newest[which % len(newest)]

    # ------------------------------------------------------------------------------------------------ owners and memory

    @rule(which=st.integers(0, 9))
    def owner_dies(self, which: int) -> None:
        if which >= len(self.owners):
            return  # this time, nobody
        owner = self.owners[which]
        self.owner_gone(owner)
        self.owners[self.owners.index(owner)] = next(self.fresh_owner)

    def owner_gone(self, owner: int) -> None:
        self.cache.owner_gone(owner)
        for number in [n for n, written in self.written.items() if written.owner == owner]:
            del self.written[number]
            self.ended_reservations.append(number)
        for issued in self.held():
            if issued.owner == owner:
                issued.state = "dropped"

    @precondition(lambda self: self.cache.allocator.backed < self.cells)
    @rule(cells=st.integers(1, 4))
    def back_more(self, cells: int) -> None:
        self.cache.allocator.back(min(self.cells, self.cache.allocator.backed + cells))

    # ------------------------------------------------------------------------------------------- what holds at any time

    @invariant()
    def cache_is_consistent(self) -> None:
        if hasattr(self, "cache"):
            check_invariants(self.cache)

    @invariant()
    def observers_know_what_can_be_read(self) -> None:
        if hasattr(self, "cache"):
            assert self.told == {
                (namespace.digest, node.hash, group)
                for namespace in self.namespaces
                for node in namespace.nodes.values()
                for group in range(len(namespace.geometry.groups))
                if node.sealed >> group & 1
            }

    @invariant()
    def cells_are_where_the_model_says(self) -> None:
        if not hasattr(self, "cache"):
            return
        for namespace in self.namespaces:
            there = {
                (namespace.digest, node.hash, slot): unpack_cells(packed)
                for node in namespace.nodes.values()
                for slot, packed in enumerate(node.shards)
                if packed
            }
            assert there == {key: cells for key, cells in self.committed.items() if key[0] == namespace.digest}
        assert set(self.cache.reservations) == set(self.written)
        assert set(self.cache.tickets) == {number for number, t in self.tickets.items() if t.state == "held"}
        handed_out = [c for cells in self.committed.values() for c in cells]
        handed_out += [c for w in self.written.values() for *_, cells in w.objects for c in cells]
        assert len(handed_out) == len(set(handed_out)) == self.cache.allocator.used
        assert all(cell < self.cache.allocator.backed for cell in handed_out)

    @invariant()
    def readable_bytes_are_whole(self) -> None:
        """Whatever a ticket pins is, right now, what was committed there."""
        if not hasattr(self, "cache"):
            return
        for issued in self.held():
            for chain_hash, group in issued.needs:
                for shard in range(issued.namespace.geometry.groups[group].shards):
                    slot = issued.namespace.slot(group, shard)
                    for position, cell in enumerate(self.committed[issued.namespace.digest, chain_hash, slot]):
                        assert self.memory[cell] == payload(issued.namespace, chain_hash, group, shard, position)


class NastyCacheModel(CacheModel):
    policy_class = Nasty
    complete_policy = False


SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_no_order_of_calls_makes_foreign_or_unfinished_bytes_readable_or_leaks_a_cell() -> None:
    run_state_machine_as_test(CacheModel, settings=SETTINGS)


def test_the_worst_policy_harms_nobody() -> None:
    run_state_machine_as_test(NastyCacheModel, settings=SETTINGS)
