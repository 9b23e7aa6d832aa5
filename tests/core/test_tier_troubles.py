"""Tiers that do one thing and not the other, or too slowly, and L1 that is short of memory: hits and stores go on.

Tiering with real threads, without a server: what a tier does is set from one line to the next.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from core_stand import wait_until
from dict_tier import DictTier

from lmcache.core import tiering as tiering_module
from lmcache.core.accounts import Limits
from lmcache.core.arena import Mapping
from lmcache.core.blob import BlobStore
from lmcache.core.cache import Cache
from lmcache.core.cells import CellAllocator
from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.index import Namespace
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.core.l1_only import Asked
from lmcache.core.tier import TierLocation
from lmcache.core.tier_in_use import BELIEVED_S
from lmcache.core.tier_threads import PATIENT_TURN, TierThreads
from lmcache.core.tier_url import StorePolicy, TierSettings
from lmcache.core.tiering import Tiering
from lmcache.errors import TierError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.plugins.eviction.lru import LRU

CHUNK, CELL = 4, 64
ONE = Geometry((KVGroup(GroupKind.FULL, CHUNK, (CELL,)),))
THROUGH, ON_EVICT = StorePolicy.WRITE_THROUGH, StorePolicy.ON_EVICT


class FickleTier(DictTier):
    """Fails in what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[str] = set()

    def store(self, key: str, parts: Sequence[Any], deadline: float) -> None:
        self._fail("store")
        super().store(key, parts, deadline)

    def load(self, key: str, into: Sequence[memoryview], deadline: float) -> int:
        self._fail("load")
        return super().load(key, into, deadline)

    def _fail(self, what: str) -> None:
        if what in self.failing:
            raise TierError(f"this tier does not {what}")


def prompt(name: object, chunks: int = 1) -> list[ChainHash]:
    return [ChainHash(hashlib.sha256(f"{name} {chunk}".encode()).digest()[:16]) for chunk in range(chunks)]


class World:
    """L1 and tiers, with nobody in between."""

    def __init__(
        self,
        *tiers: tuple[DictTier, StorePolicy],
        cells: int = 40,
        backed: int | None = None,
        quotas: dict[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = Cache(CellAllocator(cells), LRU(), limits=Limits(quotas=quotas or {}), pin_share=1.0)
        self.cache.allocator.back(cells if backed is None else backed)
        self.space = Namespace(NamespaceDigest(b"n" * 16), {}, ONE, CHUNK, CELL)
        self.cache.namespaces[self.space.digest] = self.space
        arena = SimpleNamespace(memory=memoryview(bytearray(cells * CELL)))
        self.tiering = Tiering(
            self.cache,
            [
                (BlobStore(tier), TierSettings(TierLocation(f"t{number}"), policy, 2, 30.0))
                for number, (tier, policy) in enumerate(tiers)
            ],
            lambda cells, length: Mapping.pieces(arena, CELL, cells, length),
            clock=clock,
        )

    def store(self, hashes: Sequence[ChainHash], tenant: str = "", hints: Hints = NO_HINTS) -> int:
        """How many of the chunks there was room for."""
        done = self.cache.reserve(1, self.space, tenant, b"", hashes, 0, 0, hints)
        if done.reservation:
            self.cache.commit(1, done.reservation)
        return len(done.placed)

    def settle(self) -> None:
        def settled() -> bool:
            self.tiering.advance()
            return not self.tiering.busy

        wait_until(settled)
        self.tiering.advance()

    def go_on(self) -> None:
        """A moment, in which what waits may go on waiting."""
        for _ in range(20):
            self.tiering.advance()
            time.sleep(0.001)

    def hit(self, hashes: Sequence[ChainHash]) -> int:
        """Chunks of the hit, once it is final."""
        answer = self.tiering.lookup(Asked(1, self.space, hashes, len(hashes) * CHUNK, "", NO_HINTS))
        number = answer.ticket
        while not answer.final:
            self.tiering.advance()
            answer = self.tiering.poll(1, number)
        if answer.ticket:
            self.cache.drop(1, answer.ticket)
        self.settle()
        return answer.tokens // CHUNK

    def empty_l1(self) -> None:
        while leaves := [node for node in self.space.nodes.values() if not node.first_child]:
            for leaf in leaves:
                self.cache.residents.evict(leaf)

    def close(self) -> None:
        self.tiering.close()


@pytest.fixture
def tier() -> FickleTier:
    return FickleTier()


@pytest.mark.parametrize("backed", [40, 36])
def test_what_leaves_l1_is_written_though_l1_gets_less_memory_than_it_could_have(tier: FickleTier, backed: int) -> None:
    world = World((tier, ON_EVICT), backed=backed)
    for number in range(120):
        assert world.store(prompt(number)) == 1
        world.settle()
    assert len(tier.blobs) >= 120 - backed
    assert [world.hit(prompt(number)) for number in range(120)] == [1] * 120
    world.close()


def test_a_tenant_at_its_quota_stores_on_as_its_own_chunks_are_written(tier: FickleTier) -> None:
    world = World((tier, ON_EVICT), cells=200, quotas={"a": 10})
    placed = 0
    for number in range(100):
        placed += world.store(prompt(f"a {number}"), "a")
        world.store(prompt(f"b {number}"), "b")
        world.settle()
    assert placed >= 99  # until it has been short once, nothing of its own is made ready
    assert sum(world.hit(prompt(f"a {number}")) for number in range(100)) == placed
    world.close()


def test_a_tier_that_takes_nothing_gives_what_it_has(tier: FickleTier) -> None:
    world = World((tier, THROUGH))
    old = [prompt(f"old {number}", 2) for number in range(5)]
    for hashes in old:
        world.store(hashes)
    world.settle()
    world.empty_l1()
    tier.failing = {"store"}
    for number in range(6):
        world.store(prompt(f"new {number}"))
        world.go_on()
    [report] = world.tiering.report()
    assert (report["usable"], report["writable"]) == (True, False)
    world.cache.on_committed = None
    assert [world.hit(hashes) for hashes in old] == [2] * 5
    tier.failing = set()
    world.close()


def test_a_tier_that_gives_nothing_takes_on_and_the_next_one_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    first, second = FickleTier(), FickleTier()
    world = World((first, THROUGH), (second, THROUGH))
    prompts = [prompt(number, 2) for number in range(8)]
    for hashes in prompts:
        world.store(hashes)
    world.settle()
    world.empty_l1()
    first.failing = {"load"}
    hits = []
    for hashes in prompts:
        hits.append(world.hit(hashes))
        world.empty_l1()
    # three failures, of which a promotion that reads two shards at once has two
    assert hits[3:] == [2] * 5
    [report, _] = world.tiering.report()
    assert (report["usable"], report["writable"]) == (False, True)
    assert caplog.text.count("this tier does not load") == 1
    world.store(prompt("more"))
    world.settle()
    assert len(first.blobs) == 17
    world.close()


def test_what_a_tier_was_known_to_hold_is_asked_again_before_the_last_copy_goes(tier: FickleTier) -> None:
    later = [0.0]
    world = World((tier, ON_EVICT), cells=20, clock=lambda: time.monotonic() + later[0])
    for number in range(20):
        world.store(prompt(number))
        world.settle()
    saved = len(tier.blobs)
    assert saved
    # somebody empties it, and for a while nobody finds out
    tier.blobs.clear()
    later[0] += BELIEVED_S + 1
    placed = [1] * 20
    for number in range(20, 60):
        placed.append(world.store(prompt(number)))
        world.settle()
    assert sum(placed) >= 59  # nothing that was ready is, for the first of them
    assert [world.hit(prompt(number)) for number in range(60)] == placed
    world.close()


def test_a_chunk_that_is_not_to_expire_after_all_is_written(tier: FickleTier) -> None:
    world = World((tier, THROUGH))
    hashes = prompt("short of time", 2)
    world.store(hashes, hints=Hints(ttl_s=60))
    world.settle()
    assert not tier.blobs
    world.store(hashes)
    world.settle()
    assert len(tier.blobs) == 2
    world.close()


def test_lookups_that_wait_for_room_look_for_it_when_something_has_happened_only(tier: FickleTier) -> None:
    now = [0.0]
    world = World((tier, ON_EVICT), cells=8, clock=lambda: now[0])
    first = prompt("first", 4)
    world.store(first)
    world.settle()
    for node in list(world.space.nodes.values()):
        if not node.tiers:
            world.tiering.tiers[0].save(node, 0, lambda: None)
    world.settle()
    world.empty_l1()
    # all that is there is being written, and does not come to an end
    going, go_on = threading.Event(), threading.Event()
    store = tier.store

    def hang(key: str, parts: Sequence[Any], deadline: float) -> None:
        going.set()
        go_on.wait(60)
        store(key, parts, deadline)

    tier.store = hang  # type: ignore[method-assign]
    world.store(prompt("second", 8))
    world.tiering.advance()
    going.wait(60)
    answers = [world.tiering.lookup(Asked(owner, world.space, first, 4 * CHUNK, "", NO_HINTS)) for owner in range(1, 4)]
    wait_until(lambda: world.tiering.advance() or all(each._decided for each in world.tiering._promotions.values()))
    fetches, fetch = [], world.cache.fetch

    def counted(*arguments: Any) -> Any:
        fetches.append(arguments)
        return fetch(*arguments)

    world.cache.fetch = counted  # type: ignore[method-assign]
    world.tiering.advance()
    fetches.clear()
    for _ in range(100):
        world.tiering.advance()
    assert not any(answer.final for answer in answers)
    assert not fetches
    go_on.set()
    wait_until(lambda: world.tiering.advance() or fetches)
    tier.store = store  # type: ignore[method-assign]
    wait_until(lambda: world.tiering.advance() or all(each.over for each in world.tiering._promotions.values()))
    world.close()


def test_calls_that_nobody_waits_for_have_a_turn_among_those_that_somebody_does() -> None:
    threads = TierThreads("t", 1, 60.0, lambda: None)
    order: list[str] = []
    begun, go_on = threading.Event(), threading.Event()
    threads.submit(lambda _: (begun.set(), go_on.wait(60)), lambda _: None, urgent=True)
    begun.wait(60)
    for number in range(2 * PATIENT_TURN):
        threads.submit(lambda _, number=number: order.append(f"urgent {number}"), lambda _: None, urgent=True)
    for number in range(2):
        threads.submit(lambda _, number=number: order.append(f"patient {number}"), lambda _: None, urgent=False)
    go_on.set()
    wait_until(lambda: not threads.busy)
    threads.close(1.0)
    assert [order.index(f"patient {number}") for number in range(2)] == [PATIENT_TURN - 2, 2 * PATIENT_TURN - 2]


def test_a_tier_that_does_not_close_keeps_neither_the_others_nor_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiering_module, "CLOSE_SECONDS", 0.1)
    go_on, closed = threading.Event(), []
    hanging, raising, good = FickleTier(), FickleTier(), FickleTier()
    hanging.close = lambda: go_on.wait(60)  # type: ignore[method-assign]
    raising.close = lambda: 1 / 0  # type: ignore[method-assign]
    good.close = lambda: closed.append(True)  # type: ignore[method-assign]
    world = World((hanging, THROUGH), (raising, THROUGH), (good, THROUGH))
    world.close()
    assert closed == [True]
    assert "the tier t0:// does not close; the server ends without it" in caplog.text
    assert "the tier t1:// did not close well" in caplog.text
    go_on.set()


def test_what_fails_anew_after_it_has_worked_is_said_anew(tier: FickleTier, caplog: pytest.LogCaptureFixture) -> None:
    later = [0.0]
    world = World((tier, THROUGH), clock=lambda: time.monotonic() + later[0])
    with caplog.at_level(logging.INFO):
        for round_number in range(2):
            tier.failing = {"store"}
            for number in range(4):
                world.store(prompt(f"{round_number} {number}"))
                world.go_on()
            assert not world.tiering.tiers[0].writable()
            tier.failing = set()
            later[0] += 60
            world.store(prompt(f"{round_number} works"))
            world.settle()
    assert caplog.text.count("this tier does not store") == 2
    assert caplog.text.count("the tier t0:// works again") == 2
    world.close()


def test_a_tier_that_is_written_wakes_nobody_who_has_nothing_to_do(tier: FickleTier) -> None:
    world = World((tier, THROUGH))
    going, go_on = threading.Event(), threading.Event()
    tier.store = lambda *_: (going.set(), go_on.wait(60))  # type: ignore[method-assign]
    world.store(prompt("slow"))
    world.tiering.advance()
    going.wait(60)
    assert world.tiering.pause > 20  # until the call is overdue
    go_on.set()
    world.settle()
    world.close()
