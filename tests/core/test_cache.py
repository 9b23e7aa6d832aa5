"""Scenarios of the cache: what each call answers, what goes when room is needed, and who ends what."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lmcache.core.cache import Cache, Placement
from lmcache.core.cells import CellAllocator, unpack_cells
from lmcache.core.index import Namespace
from lmcache.core.invariants import check_invariants
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.core.protocol import ErrorCode, Placed
from lmcache.errors import Refused
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.eviction.lru import LRU

CHUNK = 16
CELL = 4096
FULL = Geometry((KVGroup(GroupKind.FULL, 16, (CELL,)),))
"""One cell a chunk."""
TWO_GROUPS = Geometry((KVGroup(GroupKind.FULL, 16, (CELL,)), KVGroup(GroupKind.SLIDING_WINDOW, 16, (CELL,), window=16)))
TWO_RANKS = Geometry((KVGroup(GroupKind.FULL, 16, (CELL,), shards=2),), ranks=2)
SHARED = Geometry((KVGroup(GroupKind.FULL, 16, (CELL,), shards=1),), ranks=2)

GRANTED, PRESENT, BUSY = (bytes([placed]) for placed in (Placed.GRANTED, Placed.PRESENT, Placed.BUSY))

WRITER, READER, OTHER = 1, 2, 3


def prompt(name: str, chunks: int) -> list[ChainHash]:
    """The chain hashes of a prompt; prompts of one name are prefixes of each other."""
    return [ChainHash(hashlib.sha256(f"{name} {chunk}".encode()).digest()[:16]) for chunk in range(chunks)]


class Bench:
    """A cache with one namespace, and the calls of clients in few words."""

    def __init__(
        self, cells: int, geometry: Geometry = FULL, policy: EvictionPolicy | None = None, pin_share: float = 1.0
    ) -> None:
        self.cache = Cache(CellAllocator(cells), policy or LRU(), pin_share=pin_share)
        self.cache.allocator.back(cells)
        self.space = self.add_namespace(geometry)

    def add_namespace(self, geometry: Geometry) -> Namespace:
        digest = NamespaceDigest(bytes([len(self.cache.namespaces)]) * 16)
        self.cache.namespaces[digest] = Namespace(digest, {}, geometry, CHUNK, CELL)
        return self.cache.namespaces[digest]

    def reserve(
        self,
        hashes: Sequence[ChainHash],
        parent: bytes = b"",
        *,
        owner: int = WRITER,
        group: int = 0,
        shard: int = 0,
        space: Namespace | None = None,
    ) -> Placement:
        return self.cache.reserve(owner, space or self.space, "", parent, hashes, group, shard)

    def store(self, hashes: Sequence[ChainHash], parent: bytes = b"", **where: Any) -> Placement:
        placement = self.reserve(hashes, parent, **where)
        if placement.reservation:
            self.cache.commit(where.get("owner", WRITER), placement.reservation)
        return placement

    def hit(self, hashes: Sequence[ChainHash], owner: int = READER) -> int:
        """Tokens that a lookup promises; its ticket is dropped."""
        ticket = self.cache.lookup(owner, self.space, hashes, len(hashes) * CHUNK)
        if ticket is None:
            return 0
        self.cache.drop(owner, ticket.id)
        return ticket.hit.tokens

    def resident(self, hashes: Sequence[ChainHash]) -> list[bool]:
        return [chain_hash in self.space.nodes for chain_hash in hashes]


Make = Callable[..., Bench]


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    """Every bench a test makes is checked at its end."""
    made: list[Bench] = []
    yield made
    for bench in made:
        check_invariants(bench.cache)


@pytest.fixture
def make(benches: list[Bench]) -> Make:
    def make_bench(cells: int, geometry: Geometry = FULL, **settings: Any) -> Bench:
        benches.append(Bench(cells, geometry, **settings))
        return benches[-1]

    return make_bench


# -------------------------------------------------------------------------------------------------------------- storing


def test_new_chunks_are_granted_cells_in_chain_order_and_read_only_once_committed(make: Make) -> None:
    bench = make(8)
    p = prompt("a", 3)
    placement = bench.reserve(p)

    assert placement.placed == GRANTED * 3
    assert unpack_cells(placement.cells) == (0, 1, 2)
    assert bench.hit(p) == 0
    bench.cache.commit(WRITER, placement.reservation)
    assert bench.hit(p) == 48


def test_a_second_writer_is_told_what_is_being_written_and_what_is_there(make: Make) -> None:
    bench = make(8)
    p = prompt("a", 4)
    bench.store(p[:1])
    bench.reserve(p[1:3], parent=p[0])

    placement = bench.reserve(p, owner=OTHER)

    assert placement.placed == PRESENT + BUSY * 2 + GRANTED
    assert len(unpack_cells(placement.cells)) == 1


def test_a_request_in_which_nothing_is_new_makes_no_reservation(make: Make) -> None:
    bench = make(8)
    p = prompt("a", 2)
    bench.store(p)

    assert bench.reserve(p) == Placement(0, PRESENT * 2, b"")
    assert bench.cache.reservations == {}


def test_chunks_whose_parent_is_unknown_are_not_placed(make: Make) -> None:
    bench = make(8)
    p = prompt("a", 3)

    assert bench.reserve(p[1:], parent=p[0]) == Placement(0, b"", b"")
    assert bench.cache.allocator.used == 0
    assert bench.space.nodes == {}


def test_chunks_may_follow_a_parent_that_is_still_being_written(make: Make) -> None:
    bench = make(8)
    p = prompt("a", 2)
    first = bench.reserve(p[:1])
    second = bench.reserve(p[1:], parent=p[0], owner=OTHER)
    bench.cache.commit(OTHER, second.reservation)
    assert bench.hit(p) == 0  # the second is sealed, and no hit can reach it
    bench.cache.commit(WRITER, first.reservation)

    assert bench.hit(p) == 32


def test_an_object_is_readable_when_the_last_of_its_shards_is_committed(make: Make) -> None:
    bench = make(8, TWO_RANKS)
    p = prompt("a", 2)
    bench.store(p, shard=0)
    assert bench.hit(p) == 0
    bench.store(p, shard=1)

    assert bench.hit(p) == 32


def test_a_hit_needs_every_group_and_a_window_only_its_last_chunks(make: Make) -> None:
    bench = make(8, TWO_GROUPS)
    p = prompt("a", 3)
    bench.store(p, group=0)
    assert bench.hit(p) == 0
    bench.store(p[2:], parent=p[1], group=1)

    assert bench.hit(p) == 48  # a window of 16 tokens reads only the last chunk
    assert bench.hit(p[:2]) == 0


def test_one_rank_stores_for_all_that_hold_the_same_bytes(make: Make) -> None:
    bench = make(8, SHARED)
    p = prompt("a", 1)
    bench.store(p)

    ticket = bench.cache.lookup(READER, bench.space, p, 16)
    assert ticket is not None
    cells = [bench.cache.open(ticket.id, bench.space, rank)[1] for rank in range(2)]
    assert cells[0] == cells[1]


def test_each_rank_reads_its_own_shard(make: Make) -> None:
    bench = make(8, TWO_RANKS)
    p = prompt("a", 2)
    written = [unpack_cells(bench.store(p, shard=shard).cells) for shard in range(2)]
    ticket = bench.cache.lookup(READER, bench.space, p, 32)
    assert ticket is not None

    for rank in range(2):
        assert unpack_cells(bench.cache.open(ticket.id, bench.space, rank)[1][0]) == written[rank]


def test_cells_without_memory_are_not_handed_out(make: Make) -> None:
    bench = make(8)
    bench.cache.allocator.backed = 3
    p = prompt("a", 5)

    assert bench.store(p).placed == GRANTED * 3
    assert bench.store(p, owner=OTHER).placed == PRESENT * 3  # and nothing of the same prompt is evicted for its tail
    bench.cache.allocator.back(8)
    assert bench.store(p).placed == PRESENT * 3 + GRANTED * 2


def test_one_prompt_in_two_namespaces_is_two_prompts(make: Make) -> None:
    bench = make(8)
    p = prompt("a", 2)
    bench.store(p)
    other = bench.add_namespace(FULL)

    assert bench.cache.lookup(READER, other, p, 32) is None
    assert bench.reserve(p, space=other).placed == GRANTED * 2


def test_one_hash_twice_in_one_request_is_written_once(make: Make) -> None:
    bench = make(8)
    p = prompt("a", 1)

    assert bench.reserve([*p, *p]).placed == GRANTED + BUSY


def test_a_reservation_ends_once_and_only_by_its_owner(make: Make) -> None:
    bench = make(8)
    reservation = bench.reserve(prompt("a", 1)).reservation

    for end in (bench.cache.commit, bench.cache.abort):
        with pytest.raises(Refused) as refused:
            end(OTHER, reservation)
        assert refused.value.code == ErrorCode.STALE
    bench.cache.commit(WRITER, reservation)
    for end in (bench.cache.commit, bench.cache.abort):
        with pytest.raises(Refused, match=f"reservation {reservation} is not this client's, or has ended"):
            end(WRITER, reservation)


def test_an_aborted_reservation_leaves_nothing(make: Make) -> None:
    bench = make(8)
    p = prompt("a", 3)
    bench.cache.abort(WRITER, bench.reserve(p).reservation)

    assert bench.cache.allocator.used == 0
    assert bench.space.nodes == {}
    assert bench.hit(p) == 0


def test_a_dead_writers_chunks_are_freed_and_never_readable(make: Make) -> None:
    bench = make(8)
    p = prompt("a", 4)
    bench.store(p[:2])
    bench.reserve(p[2:], parent=p[1])
    bench.cache.owner_gone(WRITER)

    assert bench.hit(p) == 32
    assert bench.cache.allocator.used == 2
    assert bench.cache.reservations == {}


# ------------------------------------------------------------------------------------------------------------- evicting


def test_exactly_the_missing_cells_are_evicted(make: Make) -> None:
    """10 chunks of room, 11 to place; nothing goes before there is need, and then one chunk."""
    bench = make(10)
    bench.store(prompt("a", 4))
    bench.store(prompt("b", 5))
    assert bench.cache.counters.chunks_evicted == 0
    bench.store(prompt("c", 2))

    assert bench.cache.counters.chunks_evicted == 1
    assert bench.resident(prompt("a", 4)) == [True, True, True, False]
    assert bench.cache.allocator.free == 0


def test_a_restore_of_eleven_chunks_with_room_for_ten_at_sixty_four_percent_is_placed(
    make: Make,
) -> None:
    bench = make(28)
    for number in range(18):  # 18 of 28 cells are used: 64 %
        bench.store(prompt(f"old {number}", 1))
    new = prompt("new", 11)

    assert bench.store(new).placed == GRANTED * 11
    assert bench.cache.counters.chunks_evicted == 1
    assert bench.hit(new) == 11 * CHUNK


def test_of_a_request_larger_than_the_arena_the_leading_part_is_placed(make: Make) -> None:
    bench = make(6)
    bench.store(prompt("old", 6))
    p = prompt("new", 9)
    placement = bench.store(p)

    assert placement.placed == GRANTED * 6
    assert bench.cache.counters.chunks_evicted == 6
    assert bench.resident(p) == [True] * 6 + [False] * 3


def test_prompts_stored_in_several_calls_to_twice_the_arena_keep_their_heads(make: Make) -> None:
    """Four prompts of 16 chunks, four chunks a call in turns, into room for 32: what went are tails."""
    bench = make(32)
    prompts = [prompt(str(number), 16) for number in range(4)]
    for end in range(4, 17, 4):
        for p in prompts:
            bench.store(p[:end])

    lengths = [bench.hit(p) // CHUNK for p in prompts]
    assert [sum(bench.resident(p)) for p in prompts] == lengths  # every chunk that is there can be reached
    assert lengths == [0, 0, 16, 16]


def test_a_shared_trunk_outlives_its_branches(make: Make) -> None:
    bench = make(6)
    trunk = prompt("trunk", 2)
    bench.store(trunk)
    for number in range(20):
        bench.store(prompt(f"branch {number}", 2), parent=trunk[-1])

    assert bench.hit(trunk) == 32
    assert bench.hit([*trunk, *prompt("branch 19", 2)]) == 64


def test_what_was_looked_up_last_stays_longest(make: Make) -> None:
    bench = make(4)
    a, b = prompt("a", 2), prompt("b", 2)
    bench.store(a)
    bench.store(b)
    bench.hit(a)
    bench.store(prompt("c", 2))

    assert bench.resident(a) == [True, True]
    assert bench.resident(b) == [False, False]


def test_chunks_below_a_hole_go_first_though_they_are_the_newest(make: Make) -> None:
    bench = make(4)
    a, old = prompt("a", 2), prompt("old", 2)
    bench.store(old)
    head = bench.reserve(a[:1])
    bench.store(a[1:], parent=a[0], owner=OTHER)
    bench.cache.abort(WRITER, head.reservation)
    bench.store(prompt("new", 2))

    assert bench.resident(old) == [True, True]
    assert bench.resident(a) == [False, False]


def test_filling_a_hole_whose_orphans_make_the_room_keeps_it_in_the_index(make: Make) -> None:
    """The chunk being filled stood only for its child's sake, and its child is the victim that makes its room."""
    bench = make(2)
    a = prompt("a", 2)
    head = bench.reserve(a[:1])
    bench.store(a[1:], parent=a[0], owner=OTHER)
    bench.cache.abort(WRITER, head.reservation)
    bench.store(prompt("b", 1))
    assert bench.cache.allocator.free == 0  # b, and a's second chunk, which no hit can reach
    assert bench.store(a[:1]).placed == GRANTED

    assert bench.hit(a[:1]) == 16
    check_invariants(bench.cache)


def test_a_hole_does_not_protect_the_chunks_above_it(make: Make) -> None:
    """Head, hole, tail fill the arena; a chunk that needs all of it gets it at once."""
    bench = make(3, Geometry((KVGroup(GroupKind.FULL, 16, (CELL,)),)))
    a = prompt("a", 3)
    bench.store(a[:1])
    middle = bench.reserve(a[1:2], parent=a[0])
    bench.store(a[2:], parent=a[1], owner=OTHER)
    bench.cache.abort(WRITER, middle.reservation)
    big = bench.add_namespace(Geometry((KVGroup(GroupKind.FULL, 16, (3 * CELL,)),)))

    assert bench.reserve(prompt("b", 1), space=big).placed == GRANTED
    assert bench.space.nodes == {}


def test_a_hole_whose_orphans_made_room_for_another_chunk_is_forgotten(make: Make) -> None:
    bench = make(2)
    a, x = prompt("a", 2), prompt("x", 2)
    head = bench.reserve(a[:1])
    bench.store(a[1:], parent=a[0], owner=OTHER)
    bench.cache.abort(WRITER, head.reservation)
    bench.reserve(prompt("being written", 1), owner=OTHER)

    assert bench.store([*x, a[0]]).placed == GRANTED
    assert bench.resident([*x, *a]) == [True, False, False, False]


def test_a_hole_that_is_the_parent_of_what_is_stored_keeps_its_place(make: Make) -> None:
    """Its only child is evicted for the new one, and the new one must still hang from it."""
    bench = make(2)
    a, b = prompt("a", 2), prompt("b", 1)
    head = bench.reserve(a[:1])
    bench.store(a[1:], parent=a[0], owner=OTHER)
    bench.cache.abort(WRITER, head.reservation)
    bench.reserve(prompt("being written", 1), owner=OTHER)

    assert bench.store(b, parent=a[0]).placed == GRANTED
    assert bench.resident([*a, *b]) == [True, False, True]


def test_nothing_is_evicted_for_half_an_object(make: Make) -> None:
    bench = make(3)
    a = prompt("a", 3)
    bench.store(a)
    pairs = bench.add_namespace(Geometry((KVGroup(GroupKind.FULL, 16, (2 * CELL,)),)))

    assert bench.store(prompt("b", 2), space=pairs).placed == GRANTED
    assert bench.resident(a) == [True, False, False]
    assert bench.cache.counters.cells_evicted == 2


def test_what_a_ticket_holds_is_never_evicted_and_goes_after_it(make: Make) -> None:
    bench = make(4)
    a = prompt("a", 2)
    bench.store(a)
    ticket = bench.cache.lookup(READER, bench.space, a, 32)
    assert ticket is not None
    assert bench.store(prompt("b", 4)).placed == GRANTED * 2
    assert bench.resident(a) == [True, True]
    bench.cache.drop(READER, ticket.id)

    assert bench.store(prompt("c", 4)).placed == GRANTED * 4
    assert bench.resident(a) == [False, False]


def test_what_is_being_written_is_never_evicted(make: Make) -> None:
    bench = make(3)
    a = bench.reserve(prompt("a", 2))

    assert bench.store(prompt("b", 1), owner=OTHER).placed == GRANTED
    assert bench.store(prompt("c", 2), owner=OTHER).placed == GRANTED
    bench.cache.commit(WRITER, a.reservation)
    assert bench.hit(prompt("a", 2)) == 32


def test_a_lookup_in_a_loop_does_not_keep_anything_from_being_evicted(make: Make) -> None:
    bench = make(8)
    bench.store(prompt("a", 8))
    for number in range(50):
        bench.hit(prompt("a", 8))
        assert bench.store(prompt(f"b{number}", 1)).placed == GRANTED


class _First(EvictionPolicy):
    """Oldest insertion first, so trunks before leaves."""

    name = "first"

    def __init__(self) -> None:
        self.nodes: dict[ChunkNode, None] = {}

    def insert(self, node: ChunkNode) -> None:
        self.nodes[node] = None

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        assert len(set(nodes)) == len(nodes), "a node was touched twice in one request"
        assert all(node in self.nodes for node in nodes), "an unknown node was touched"

    def remove(self, node: ChunkNode) -> None:
        del self.nodes[node]

    def victims(self) -> Iterator[ChunkNode]:
        return iter(self.nodes)


def test_leaves_go_before_trunks_whatever_the_policy_says(make: Make) -> None:
    bench = make(4, policy=_First())
    a = prompt("a", 3)
    bench.store(a)
    bench.store(prompt("b", 2))

    assert bench.resident(a) == [True, True, False]


def test_a_whole_chain_may_go_at_once_though_the_policy_names_its_trunk_first(make: Make) -> None:
    bench = make(3, policy=_First())
    bench.store(prompt("a", 3))
    big = bench.add_namespace(Geometry((KVGroup(GroupKind.FULL, 16, (3 * CELL,)),)))

    assert bench.reserve(prompt("b", 1), space=big).placed == GRANTED
    assert bench.space.nodes == {}


def test_a_request_that_names_a_chunk_twice_touches_it_once(make: Make) -> None:
    bench = make(4, policy=_First())
    a = prompt("a", 2)
    bench.store(a)

    assert bench.hit([a[0], a[1], a[0]]) == 48


class _Raising(_First):
    """Works until told to fail."""

    failing = ""

    def _fail(self, call: str) -> None:
        if self.failing == call:
            raise RuntimeError("a policy's bug")

    def resize(self, cells: int) -> None:
        self._fail("resize")

    def insert(self, node: ChunkNode) -> None:
        self._fail("insert")
        super().insert(node)

    def touch(self, nodes: Sequence[ChunkNode]) -> None:
        self._fail("touch")

    def remove(self, node: ChunkNode) -> None:
        self._fail("remove")
        super().remove(node)

    def victims(self) -> Iterator[ChunkNode]:
        self._fail("victims")
        return super().victims()


@pytest.mark.parametrize("call", ["insert", "touch", "remove", "victims"])
def test_a_policy_that_raises_costs_space_and_neither_a_request_nor_a_right(make: Make, call: str) -> None:
    policy = _Raising()
    bench = make(4, policy=policy)
    bench.store(prompt("a", 2))
    policy.failing = call
    for number in range(4):
        bench.store(prompt(f"b{number}", 3), owner=OTHER)
        bench.reserve(prompt(f"c{number}", 3), owner=OTHER)
        bench.cache.owner_gone(OTHER)
        check_invariants(bench.cache)
    assert bench.cache.counters.policy_errors > 0
    policy.failing = ""

    assert bench.cache.reservations == {}
    bench.hit(prompt("a", 2))
    check_invariants(bench.cache)


def test_a_policy_hears_the_size_of_l1_before_anything_is_inserted(make: Make) -> None:
    calls: list[str] = []

    class Listening(_First):
        def resize(self, cells: int) -> None:
            calls.append(f"resize {cells}")

        def insert(self, node: ChunkNode) -> None:
            calls.append("insert")
            super().insert(node)

    bench = make(8, policy=Listening())
    bench.store(prompt("a", 1))

    assert calls == ["resize 8", "insert"]


def test_a_policy_that_raises_when_it_hears_the_size_is_counted_and_served_with(make: Make) -> None:
    policy = _Raising()
    policy.failing = "resize"
    bench = make(8, policy=policy)
    assert bench.cache.counters.policy_errors == 1
    assert bench.store(prompt("a", 1)).placed == GRANTED


# -------------------------------------------------------------------------------------------------------------- reading


def test_a_ticket_ends_when_every_rank_has_confirmed_and_repeats_are_answered_truthfully(
    make: Make,
) -> None:
    bench = make(4, SHARED)
    a = prompt("a", 2)
    bench.store(a)
    ticket = bench.cache.lookup(READER, bench.space, a, 32)
    assert ticket is not None

    assert bench.cache.confirm(ticket.id, bench.space, 0)
    assert bench.cache.confirm(ticket.id, bench.space, 0)
    assert ticket.id in bench.cache.tickets
    assert bench.cache.confirm(ticket.id, bench.space, 1)
    assert ticket.id not in bench.cache.tickets
    assert bench.cache.confirm(ticket.id, bench.space, 1)
    assert bench.cache.counters.loads_confirmed == 1


def test_a_load_that_outlives_its_ticket_does_not_count(make: Make) -> None:
    bench = make(2)
    a = prompt("a", 2)
    bench.store(a)
    ticket = bench.cache.lookup(READER, bench.space, a, 32)
    assert ticket is not None
    bench.cache.open(ticket.id, bench.space, 0)
    bench.cache.owner_gone(READER)
    bench.store(prompt("b", 2))

    assert not bench.cache.confirm(ticket.id, bench.space, 0)
    with pytest.raises(Refused, match="has ended"):
        bench.cache.open(ticket.id, bench.space, 0)


def test_only_its_owner_drops_a_ticket(make: Make) -> None:
    bench = make(4)
    a = prompt("a", 1)
    bench.store(a)
    ticket = bench.cache.lookup(READER, bench.space, a, 16)
    assert ticket is not None
    bench.cache.drop(OTHER, ticket.id)
    assert ticket.id in bench.cache.tickets
    bench.cache.drop(READER, ticket.id)
    bench.cache.drop(READER, ticket.id)

    assert bench.cache.tickets == {}
    assert bench.cache.counters.tickets_dropped == 1


def test_a_ticket_is_of_no_use_in_another_namespace(make: Make) -> None:
    bench = make(4)
    other = bench.add_namespace(FULL)
    a = prompt("a", 1)
    bench.store(a)
    ticket = bench.cache.lookup(READER, bench.space, a, 16)
    assert ticket is not None

    with pytest.raises(Refused):
        bench.cache.open(ticket.id, other, 0)
    assert not bench.cache.confirm(ticket.id, other, 0)
    assert bench.cache.confirm(ticket.id, bench.space, 0)


def test_one_owner_pins_at_most_its_share_and_others_keep_theirs(make: Make) -> None:
    bench = make(8, pin_share=0.5)
    a = prompt("a", 8)
    bench.store(a)
    first = bench.cache.lookup(READER, bench.space, a, 128)
    assert first is not None
    assert first.hit.tokens == 4 * CHUNK
    second = bench.cache.lookup(OTHER, bench.space, a, 128)

    assert second is not None
    assert second.hit.tokens == 4 * CHUNK


def test_a_chunk_that_many_tickets_hold_counts_once(make: Make) -> None:
    """A burst of prompts with one long system prompt: all hit, though the sum of their hits exceeds the share."""
    bench = make(16, pin_share=0.5)
    trunk = prompt("trunk", 6)
    bench.store(trunk)
    tickets = [bench.cache.lookup(READER, bench.space, trunk, 96) for _ in range(40)]

    assert [ticket.hit.tokens for ticket in tickets if ticket] == [96] * 40
    for ticket in tickets[:39]:
        assert ticket is not None
        bench.cache.drop(READER, ticket.id)
    bench.store(prompt("b", 16))
    assert bench.hit(trunk) == 96  # the last ticket still holds all of it
    other = prompt("other", 3)
    assert bench.store(other).placed == GRANTED * 3
    assert bench.hit(other) == 2 * CHUNK  # 6 of 8 cells of the share are still taken


def test_a_dead_schedulers_tickets_are_dropped(make: Make) -> None:
    bench = make(4)
    a = prompt("a", 2)
    bench.store(a)
    for _ in range(3):
        bench.cache.lookup(READER, bench.space, a, 32)
    bench.cache.owner_gone(READER)

    assert bench.cache.tickets == {}
    assert all(node.pins == 0 for node in bench.space.nodes.values())


def test_a_thousand_hits_that_nobody_loads_pin_nothing_once_dropped(make: Make) -> None:
    bench = make(4)
    a = prompt("a", 2)
    bench.store(a)
    for _ in range(1000):
        assert bench.hit(a) == 32

    assert bench.store(prompt("b", 4)).placed == GRANTED * 4


def test_counters_tell_what_happened(make: Make) -> None:
    bench = make(4)
    bench.store(prompt("a", 3))
    bench.cache.abort(WRITER, bench.reserve(prompt("b", 1)).reservation)
    bench.hit(prompt("a", 4))
    bench.store(prompt("c", 2))

    counters = bench.cache.counters
    assert (counters.chunks_reserved, counters.shards_committed, counters.chunks_aborted) == (6, 5, 1)
    assert (counters.lookups, counters.tokens_asked, counters.tokens_hit) == (1, 64, 48)
    assert (counters.chunks_evicted, counters.cells_evicted) == (1, 1)
