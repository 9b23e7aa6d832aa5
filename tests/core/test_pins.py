"""What tickets hold, and how much of it counts against their owner."""

from lmcache.core.cache import Cache
from lmcache.core.cells import CellAllocator
from lmcache.core.index import Namespace
from lmcache.core.invariants import check_invariants
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.eviction.lru import LRU

WRITER, READER = 1, 2

PROMPT = [ChainHash(bytes([number]) * 16) for number in range(8)]


def cache_with_a_prompt(*groups: KVGroup, cells: int = 100) -> tuple[Cache, Namespace]:
    """Eight chunks of 64 tokens, all groups stored, a cell an object."""
    allocator = CellAllocator(cells)
    allocator.back(cells)
    cache = Cache(allocator, LRU())
    namespace = Namespace(NamespaceDigest(b"n" * 16), {}, Geometry(groups), 64, 4096)
    cache.namespaces[namespace.digest] = namespace
    for group in range(len(groups)):
        placement = cache.reserve(WRITER, namespace, "", b"", PROMPT, group, 0)
        cache.commit(WRITER, placement.reservation)
    return cache, namespace


def test_a_ticket_holds_the_chunks_that_the_hit_needs_and_no_others() -> None:
    cache, namespace = cache_with_a_prompt(KVGroup(GroupKind.SLIDING_WINDOW, 64, (4096,), window=65))

    ticket = cache.lookup(READER, namespace, PROMPT, 8 * 64)

    assert ticket
    assert [namespace.nodes[chunk].pins for chunk in PROMPT] == [0, 0, 0, 0, 0, 0, 0, 1]
    assert cache.pins[READER].cells == 1
    check_invariants(cache)


def test_a_full_group_beside_a_window_holds_every_chunk_once() -> None:
    cache, namespace = cache_with_a_prompt(
        KVGroup(GroupKind.SLIDING_WINDOW, 64, (4096,), window=65), KVGroup(GroupKind.FULL, 64, (4096,))
    )

    assert cache.lookup(READER, namespace, PROMPT, 8 * 64)

    assert [namespace.nodes[chunk].pins for chunk in PROMPT] == [1] * 8
    assert cache.pins[READER].cells == 16
    check_invariants(cache)


def test_what_two_tickets_hold_stays_counted_until_both_have_ended() -> None:
    cache, namespace = cache_with_a_prompt(KVGroup(GroupKind.FULL, 64, (4096,)))
    long, short, again = (cache.lookup(READER, namespace, PROMPT, tokens) for tokens in (8 * 64, 3 * 64, 3 * 64))
    assert long
    assert short
    assert again
    assert cache.pins[READER].cells == 8

    cache.drop(READER, long.id)
    assert cache.pins[READER].cells == 3
    cache.drop(READER, again.id)
    assert cache.pins[READER].cells == 3
    check_invariants(cache)
    cache.drop(READER, short.id)

    assert cache.pins == {}
    assert [namespace.nodes[chunk].pins for chunk in PROMPT] == [0] * 8
    check_invariants(cache)


def test_a_prompt_that_names_a_chunk_twice_gives_back_all_that_it_held() -> None:
    cache, namespace = cache_with_a_prompt(KVGroup(GroupKind.FULL, 64, (4096,)))
    kept = cache.lookup(READER, namespace, PROMPT[:1], 64)
    twice = cache.lookup(READER, namespace, [PROMPT[0], PROMPT[0], PROMPT[1]], 3 * 64)
    assert kept
    assert twice

    cache.drop(READER, twice.id)
    check_invariants(cache)
    assert cache.pins[READER].cells == 1
    cache.drop(READER, kept.id)

    assert cache.pins == {}
    assert [namespace.nodes[chunk].pins for chunk in PROMPT] == [0] * 8
