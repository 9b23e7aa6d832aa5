"""Choosing victims: how far the search for them reaches, whatever is held."""

import itertools

import pytest

from lmcache.core.cache import Cache
from lmcache.core.cells import CellAllocator
from lmcache.core.index import Namespace, Node
from lmcache.core.invariants import check_invariants
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.core.order import VICTIM_SCAN
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.eviction.lru import LRU

WRITER, STALLED, READER = 1, 2, 3

numbers = itertools.count(1)


def prompt(chunks: int) -> list[ChainHash]:
    return [ChainHash(next(numbers).to_bytes(16, "big")) for _ in range(chunks)]


@pytest.fixture
def namespace() -> Namespace:
    geometry = Geometry((KVGroup(GroupKind.FULL, 64, (4096,)),))
    return Namespace(NamespaceDigest(b"n" * 16), {}, geometry, 64, 4096)


def cache_of(cells: int, namespace: Namespace) -> Cache:
    allocator = CellAllocator(cells)
    allocator.back(cells)
    cache = Cache(allocator, LRU())
    cache.namespaces[namespace.digest] = namespace
    return cache


def store(cache: Cache, namespace: Namespace, chunks: list[ChainHash]) -> int:
    placement = cache.reserve(WRITER, namespace, "", b"", chunks, 0, 0)
    if placement.reservation:
        cache.commit(WRITER, placement.reservation)
    return len(placement.placed)


@pytest.mark.parametrize("held", [1, 90, 91, 512])
def test_a_long_prompt_that_is_being_written_and_is_cold_does_not_keep_others_from_being_evicted(
    namespace: Namespace, held: int
) -> None:
    cache = cache_of(held + 20, namespace)
    assert len(cache.reserve(STALLED, namespace, "", b"", prompt(held), 0, 0).placed) == held
    assert store(cache, namespace, prompt(20)) == 20

    assert store(cache, namespace, prompt(20)) == 20
    assert cache.counters.chunks_evicted == 20
    check_invariants(cache)


def test_a_long_prompt_that_is_being_read_and_is_cold_does_not_keep_others_from_being_evicted(
    namespace: Namespace,
) -> None:
    cache = cache_of(2 * 512, namespace)
    pinned = prompt(512)
    assert store(cache, namespace, pinned) == 512
    ticket = cache.lookup(READER, namespace, pinned, 512 * 64)
    assert ticket
    assert ticket.hit.tokens == 512 * 64
    assert store(cache, namespace, prompt(512)) == 512

    assert store(cache, namespace, prompt(512)) == 512
    assert cache.counters.chunks_evicted == 512
    assert cache.confirm(ticket.id, namespace, 0)
    check_invariants(cache)


def test_a_trunk_whose_oldest_branch_is_held_loses_its_other_branches_from_their_leaves(namespace: Namespace) -> None:
    cache = cache_of(2 + 3 * 100, namespace)
    trunk = prompt(2)
    branches = [prompt(100) for _ in range(3)]
    for branch in branches:
        assert store(cache, namespace, trunk + branch) == 102
    ticket = cache.lookup(READER, namespace, trunk + branches[0], 102 * 64)
    assert ticket

    assert store(cache, namespace, prompt(150)) == 150

    assert [len([c for c in branch if c in namespace.nodes]) for branch in branches] == [100, 0, 50]
    assert all(chunk in namespace.nodes for chunk in [*trunk, *branches[2][:50]])
    check_invariants(cache)


def test_more_cold_chunks_in_use_than_a_request_looks_at_hide_the_others_for_one_request_only(
    namespace: Namespace,
) -> None:
    held = 2 * VICTIM_SCAN + 100  # a request searches twice before it gives up
    cache = cache_of(held + 3, namespace)
    assert len(cache.reserve(STALLED, namespace, "", b"", prompt(held), 0, 0).placed) == held
    assert store(cache, namespace, prompt(3)) == 3
    assert store(cache, namespace, prompt(3)) == 0

    assert store(cache, namespace, prompt(3)) == 3


def test_chunks_in_use_are_passed_over_once_and_not_by_every_search(namespace: Namespace) -> None:
    cache = cache_of(1000 + 20, namespace)
    assert len(cache.reserve(STALLED, namespace, "", b"", prompt(1000), 0, 0).placed) == 1000
    assert store(cache, namespace, prompt(20)) == 20
    assert store(cache, namespace, prompt(1)) == 1

    first_in_line = next(cache.policy.victims())
    assert isinstance(first_in_line, Node)
    assert first_in_line.evictable
