"""The end of a session, when its last request finds everything stored."""

from lmcache.core.cache import Cache
from lmcache.core.cells import CellAllocator
from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.index import Namespace
from lmcache.core.invariants import check_invariants
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.eviction.lru import LRU

CHUNK = 16
END = Hints(ends_session=True)


def cache_and_space() -> tuple[Cache, Namespace]:
    cache = Cache(CellAllocator(10), LRU())
    cache.allocator.back(10)
    geometry = Geometry((KVGroup(GroupKind.FULL, CHUNK, (4096,)),))
    space = Namespace(NamespaceDigest(b"n" * 16), {}, geometry, CHUNK, 4096)
    cache.namespaces[space.digest] = space
    return cache, space


def prompt(name: str, chunks: int) -> list[ChainHash]:
    return [ChainHash(f"{name:>12}{chunk:04}".encode()) for chunk in range(chunks)]


def store(cache: Cache, space: Namespace, hashes: list[ChainHash]) -> None:
    placed = cache.reserve(1, space, "", b"", hashes, 0, 0)
    cache.commit(1, placed.reservation)
    check_invariants(cache)


def hit(cache: Cache, space: Namespace, hashes: list[ChainHash], hints: Hints = NO_HINTS) -> int:
    ticket = cache.lookup(1, space, hashes, 99 * CHUNK, hints=hints)
    check_invariants(cache)
    if ticket is None:
        return 0
    assert cache.confirm(ticket.id, space, 0)
    return ticket.hit.tokens // CHUNK


def test_a_lookup_that_ends_its_session_makes_what_it_hits_go_next_though_it_was_used_last() -> None:
    cache, space = cache_and_space()
    older, ended = prompt("older", 5), prompt("ended", 5)
    store(cache, space, older)
    store(cache, space, ended)

    assert hit(cache, space, ended, END) == 5
    store(cache, space, prompt("new", 4))
    assert (hit(cache, space, older), hit(cache, space, ended)) == (5, 1)


def test_what_others_go_on_from_is_not_ended() -> None:
    cache, space = cache_and_space()
    shared = prompt("system", 3)
    store(cache, space, [*shared, *prompt("a", 2)])
    store(cache, space, [*shared, *prompt("b", 2)])

    assert hit(cache, space, [*shared, *prompt("a", 2)], END) == 5
    assert hit(cache, space, shared, END) == 3  # others have gone on from its end
    store(cache, space, prompt("new", 5))
    assert [hit(cache, space, [*shared, *prompt(end, 2)]) for end in "ab"] == [3, 5]
