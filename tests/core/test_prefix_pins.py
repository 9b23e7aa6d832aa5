"""Which part of a prompt a pin holds: what a lookup would be served now, no more and no less."""

import attrs
import pytest

from lmcache.core.cache import Cache
from lmcache.core.cells import CellAllocator
from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.index import Namespace
from lmcache.core.invariants import check_invariants
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.eviction.lru import LRU

CHUNK = 16
FULL = KVGroup(GroupKind.FULL, CHUNK, (4096,))
STATE = KVGroup(GroupKind.RECURRENT, CHUNK, (4096,))
WINDOW = KVGroup(GroupKind.SLIDING_WINDOW, CHUNK, (4096,), window=CHUNK)
PROMPT = [ChainHash(f"{chunk:016}".encode()) for chunk in range(6)]


@attrs.define
class Shelf:
    cache: Cache
    space: Namespace

    def store(self, group: int, chunks: range, hints: Hints = NO_HINTS) -> None:
        """These chunks' objects of one group; each chunk is a reservation of its own."""
        for chunk in chunks:
            parent = PROMPT[chunk - 1] if chunk else b""
            placed = self.cache.reserve(1, self.space, "", parent, [PROMPT[chunk]], group, 0, hints)
            self.cache.commit(1, placed.reservation)

    def pinned(self) -> int:
        """Chunks that a pin of the whole prompt holds."""
        pin = self.cache.pin(self.space, PROMPT, 60.0)
        check_invariants(self.cache)
        return pin.tokens // CHUNK if pin else 0


def shelf(*groups: KVGroup) -> Shelf:
    cache = Cache(CellAllocator(64), LRU())
    cache.allocator.back(64)
    space = Namespace(NamespaceDigest(b"n" * 16), {}, Geometry(groups), CHUNK, 4096)
    cache.namespaces[space.digest] = space
    return Shelf(cache, space)


def test_states_that_the_engine_never_had_shorten_no_pin() -> None:
    shelves = shelf(FULL, STATE)
    shelves.store(0, range(6))
    shelves.store(1, range(3, 5))  # an engine keeps snapshots at few places

    assert shelves.pinned() == 5
    shelves.cache.residents.make_room(60, 1, shelves.cache.residents.accounts.of(""))
    ticket = shelves.cache.lookup(1, shelves.space, PROMPT, 99 * CHUNK)
    assert ticket is not None
    assert ticket.hit.tokens == 5 * CHUNK


def test_a_window_that_is_there_at_the_end_only_is_enough() -> None:
    shelves = shelf(FULL, WINDOW)
    shelves.store(0, range(6))
    shelves.store(1, range(3, 4))

    assert shelves.pinned() == 4


def test_nothing_is_pinned_of_a_prompt_that_no_lookup_would_hit() -> None:
    shelves = shelf(FULL, STATE)
    shelves.store(0, range(6))

    assert shelves.pinned() == 0
    assert not shelves.cache.prefix_pins.all


@pytest.mark.parametrize("held", [False, True])
def test_what_has_expired_is_not_brought_back_by_a_pin(*, held: bool) -> None:
    shelves = shelf(FULL)
    shelves.store(0, range(6), Hints(ttl_s=5.0))
    if held:  # expired chunks in use stay a while, though nobody is served them
        assert shelves.cache.lookup(1, shelves.space, PROMPT, 99 * CHUNK, hints=Hints(ttl_s=1.0))
    shelves.cache.advance(6.0)

    assert shelves.pinned() == 0
    assert len(shelves.space.nodes) == (6 if held else 0)
