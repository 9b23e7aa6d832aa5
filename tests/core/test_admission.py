"""Admission and retention: several voices on one decision, those that fail, and that no veto makes a store fail."""

import logging
from collections.abc import Hashable

import pytest

from lmcache.core.admission import AdmissionPolicy, Offer, RetentionPolicy
from lmcache.core.cache import Cache, Placement
from lmcache.core.cells import CellAllocator
from lmcache.core.hints import NO_HINTS, Hints, Priority
from lmcache.core.index import Namespace
from lmcache.core.invariants import check_invariants
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.core.protocol import Placed
from lmcache.core.voices import REFUSED_SECONDS, Speakers
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.admission.second_use import SecondUse
from lmcache.plugins.eviction.lru import LRU

CHUNK, CELL, OWNER = 16, 4096, 1
GRANTED, PRESENT, REFUSED = Placed.GRANTED, Placed.PRESENT, Placed.REFUSED
TWO_GROUPS = Geometry((KVGroup(GroupKind.FULL, 16, (CELL,)), KVGroup(GroupKind.SLIDING_WINDOW, 16, (CELL,), window=16)))


class UpTo(AdmissionPolicy):
    """Admits the first so many chunks of a prompt."""

    name = "up-to"

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.offers: list[Offer] = []

    def admit(self, offer: Offer) -> int:
        self.offers.append(offer)
        return max(0, min(len(offer.keys), self.depth - offer.depth))


class Broken(AdmissionPolicy):
    name = "broken"

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def admit(self, offer: Offer) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


class Says(RetentionPolicy):
    name = "says"

    def __init__(self, hints: Hints) -> None:
        self.hints = hints
        self.offers: list[Offer] = []

    def advise(self, offer: Offer) -> Hints:
        self.offers.append(offer)
        return self.hints


class Shelf:
    def __init__(self, *speakers: AdmissionPolicy | RetentionPolicy, cells: int = 40, geometry: Geometry = TWO_GROUPS):
        chosen = Speakers(
            tuple(each for each in speakers if isinstance(each, AdmissionPolicy)),
            tuple(each for each in speakers if isinstance(each, RetentionPolicy)),
        )
        self.cache = Cache(CellAllocator(cells), LRU(), speakers=chosen)
        self.cache.allocator.back(cells)
        digest = NamespaceDigest(b"n" * 16)
        self.space = Namespace(digest, {"model": "tiny"}, geometry, CHUNK, CELL)
        self.cache.namespaces[digest] = self.space

    def offer(
        self, chunks: list[ChainHash], group: int = 0, *, parent: bytes = b"", hints: Hints = NO_HINTS
    ) -> list[Placed]:
        placement = self.cache.reserve(OWNER, self.space, "tenant", parent, chunks, group, 0, hints)
        self._commit(placement)
        return [Placed(each) for each in placement.placed]

    def _commit(self, placement: Placement) -> None:
        if placement.reservation:
            self.cache.commit(OWNER, placement.reservation)
        check_invariants(self.cache)

    def look_up(self, chunks: list[ChainHash], hints: Hints = NO_HINTS) -> int:
        ticket = self.cache.lookup(OWNER, self.space, chunks, len(chunks) * CHUNK, "tenant", hints)
        if ticket:
            self.cache.drop(OWNER, ticket.id)
        return ticket.hit.tokens // CHUNK if ticket else 0


def prompt(name: str, chunks: int) -> list[ChainHash]:
    return [ChainHash(f"{name:>12}{chunk:04}".encode()) for chunk in range(chunks)]


def test_the_shortest_admission_counts_and_the_rest_is_refused() -> None:
    first, second = UpTo(5), UpTo(3)
    shelf = Shelf(first, second)

    assert shelf.offer(prompt("p", 6)) == [GRANTED] * 3 + [REFUSED] * 3
    assert len(shelf.space.nodes) == 3
    assert shelf.cache.counters.chunks_refused == 3


def test_an_offer_tells_what_it_is_about() -> None:
    doorkeeper = UpTo(9)
    shelf = Shelf(doorkeeper)
    p = prompt("p", 5)
    shelf.offer(p[:2])
    shelf.offer(p[1:], parent=p[0], hints=Hints(ttl_s=5.0))

    keys: list[list[Hashable]] = [[b"n" * 16 + each for each in part] for part in (p[:2], p[2:])]
    assert doorkeeper.offers == [
        Offer(keys[0], 0, "tenant", "tiny", CHUNK, 2 * CELL, NO_HINTS),
        Offer(keys[1], 2, "tenant", "tiny", CHUNK, 2 * CELL, Hints(ttl_s=5.0)),  # p[1] is there: nobody is asked
    ]


def test_an_answer_holds_for_all_groups_of_a_request_and_what_is_there_needs_none() -> None:
    shelf = Shelf(SecondUse())
    p = prompt("p", 4)

    assert shelf.offer(p, 0) == [REFUSED] * 4
    assert shelf.offer(p, 1) == [REFUSED] * 4, "the second group took the first one's offer for another request"
    assert shelf.look_up(p) == 0
    assert (shelf.offer(p, 0), shelf.offer(p, 1)) == ([GRANTED] * 4, [GRANTED] * 4)
    assert (shelf.offer(p, 0), shelf.look_up(p)) == ([PRESENT] * 4, 4)


def test_second_use_stores_what_two_prompts_share_and_not_what_is_theirs_alone() -> None:
    shelf = Shelf(SecondUse())
    shared = prompt("system", 2)
    for name in ("a", "b", "c"):
        shelf.look_up([*shared, *prompt(name, 2)])
        shelf.offer([*shared, *prompt(name, 2)])

    assert shelf.space.nodes.keys() == set(shared)


def test_a_refusal_is_forgotten_after_a_minute_for_engines_that_never_look_anything_up() -> None:
    shelf = Shelf(SecondUse())
    p = prompt("p", 2)
    shelf.offer(p)
    shelf.cache.advance(REFUSED_SECONDS - 1)
    assert shelf.offer(p) == [REFUSED] * 2

    shelf.cache.advance(REFUSED_SECONDS + 1)
    assert shelf.offer(p) == [GRANTED] * 2


@pytest.mark.parametrize("answer", [RuntimeError("a bug"), None, "all", -1, 7, 2.5])
def test_an_admission_policy_that_fails_has_not_spoken_and_is_named(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(Broken(answer), UpTo(4))
    with caplog.at_level(logging.ERROR):
        assert shelf.offer(prompt("p", 6)) == [GRANTED] * 4 + [REFUSED] * 2
        shelf.offer(prompt("q", 6))

    assert shelf.cache.counters.policy_errors == 2
    [record] = caplog.records
    assert "the admission policy broken (" in record.getMessage()
    assert "Broken)" in record.getMessage()


def test_a_veto_never_keeps_others_from_being_stored_or_evicted() -> None:
    shelf = Shelf(UpTo(2), cells=4, geometry=Geometry((KVGroup(GroupKind.FULL, 16, (CELL,)),)))
    for name in "abcdef":
        assert shelf.offer(prompt(name, 4)) == [GRANTED] * 2 + [REFUSED] * 2

    assert (shelf.cache.allocator.free, shelf.cache.counters.chunks_evicted) == (0, 8)


def test_retention_policies_and_the_request_are_heard_as_the_strictest() -> None:
    minutes, low = Says(Hints(ttl_s=60.0)), Says(Hints(priority=Priority.LOW))
    shelf = Shelf(minutes, low)
    p = prompt("p", 2)
    shelf.offer(p, hints=Hints(ttl_s=90.0, priority=Priority.HIGH))
    node = shelf.space.nodes[p[0]]

    assert (node.expires, node.priority) == (60.0, Priority.LOW)
    assert [offer.hints for offer in low.offers] == [Hints(ttl_s=90.0, priority=Priority.HIGH)]


def test_advice_holds_on_every_use_so_that_a_silent_hit_does_not_undo_it() -> None:
    shelf = Shelf(Says(Hints(ttl_s=60.0)))
    p = prompt("p", 2)
    shelf.offer(p, 0)
    shelf.offer(p, 1)
    shelf.cache.advance(30.0)
    assert shelf.look_up(p) == 2

    assert [node.expires for node in shelf.space.nodes.values()] == [90.0, 90.0]


@pytest.mark.parametrize("answer", [None, "long", 5])
def test_a_retention_policy_that_answers_nonsense_has_not_spoken(answer: object) -> None:
    shelf = Shelf(Says(answer))  # type: ignore[arg-type]
    assert shelf.offer(prompt("p", 2), hints=Hints(ttl_s=9.0)) == [GRANTED] * 2

    assert shelf.cache.counters.policy_errors == 1
    assert {node.expires for node in shelf.space.nodes.values()} == {9.0}
