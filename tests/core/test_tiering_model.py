"""Tiers behind the cache, in any order of calls: what a ticket reads is what was stored there, and nothing is leaked.

Long runs: `LMCACHE_MODEL_EXAMPLES=5000 pytest tests/core/test_tiering_model.py`.
"""

import os
import sys
import threading

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from model_prompts import CHUNK, DEPTH, hashes_of
from tiering_model import DEADLINE, Lookup, TieringModel

from lmcache.core.breaker import CircuitBreaker
from lmcache.core.hints import NO_HINTS
from lmcache.core.promotion import Asked
from lmcache.core.tier_threads import TierThreads
from lmcache.core.tier_url import StorePolicy
from lmcache.errors import TierError

EXAMPLES = int(os.environ.get("LMCACHE_MODEL_EXAMPLES", "60"))
STEPS = int(os.environ.get("LMCACHE_MODEL_STEPS", "50"))


def test_no_order_of_calls_makes_a_tier_serve_foreign_bytes_or_leak_a_cell() -> None:
    run_state_machine_as_test(
        TieringModel,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


THROUGH, ON_EVICT = StorePolicy.WRITE_THROUGH, StorePolicy.ON_EVICT
ONLY_A_WINDOW = 4
WHOLE = (0,) * DEPTH
ANOTHER = (1,) * DEPTH


def stage(*tiers: tuple[StorePolicy, int, bool], cells: int = 20, geometry: int = 0) -> TieringModel:
    """The model's world, for a story told step by step. One group, of one cell a chunk."""
    model = TieringModel()
    model.start(cells=cells, pin_share=1.0, spaces={geometry}, tiers=list(tiers))
    return model


def stored(*paths: tuple[int, ...], cells: int = 20, threads: int = 2, geometry: int = 0) -> TieringModel:
    """A tier has these prompts, L1 nothing."""
    model = stage((THROUGH, threads, False), cells=cells, geometry=geometry)
    for path in paths:
        model.only_tiers_have(owner=0, space=0, path=path)
    return model


def check(model: TieringModel) -> None:
    model.cache_is_consistent()
    model.what_is_readable_is_what_was_stored()
    model.cells_that_a_call_may_touch_are_nobody_elses()
    model.whatever_is_held_is_held_by_somebody()


def tokens(model: TieringModel) -> list[int]:
    """Of the hits that there are tickets for."""
    return [model.cache.tickets[number].hit.tokens for number in sorted(model.tickets)]


def test_what_only_the_first_tier_was_told_is_not_held_by_the_second() -> None:
    model = stage((THROUGH, 1, False), (ON_EVICT, 1, False))
    model.store_all(owner=0, space=0, path=(0,))
    model.all_calls_return("works")
    [node] = model.namespaces[0].nodes.values()
    assert [tier.holds(node, 0) for tier in model.tiering.tiers] == [True, False]


def test_a_tier_that_stops_between_the_search_and_the_fetch_costs_a_miss() -> None:
    model = stored(WHOLE, ANOTHER, threads=1)
    model.look_up_all(owner=0, space=0, path=WHOLE)
    model.look_up_all(owner=0, space=0, path=ANOTHER)
    [threads] = model.threads
    threads.give_back(threads.running[0])  # the second search takes the only thread, and stays
    model.later(8.0)
    check(model)
    assert (model.tiering._promotions[min(model.pending)].over, model.fetching) == (True, {})
    model.teardown()


def test_a_fetch_that_fails_below_one_that_works_leaves_a_hole_that_eviction_knows() -> None:
    model = stored((0, 0))
    model.look_up_all(owner=0, space=0, path=(0, 0))
    model.call_returns(tier=0, which=0, outcome="works", told=True)
    first, second = model.threads[0].running
    model.shelves[0].next = "works"
    model.threads[0].give_back(second)
    model.shelves[0].next = "half"
    model.threads[0].give_back(first)
    model.tick()
    check(model)
    trunk, leaf = sorted(model.namespaces[0].nodes.values(), key=lambda node: node.depth)
    assert (trunk.cells, leaf.cells, list(model.cache.residents.orphaned)) == (0, 1, [trunk])
    model.teardown()


def test_what_is_fetched_hangs_below_no_chunk_that_expires_before_it() -> None:
    model = stored((0, 0))
    model.store(owner=0, space=0, path=(0,), lazy=9, ttl=2.0)
    model.look_up_all(owner=0, space=0, path=(0, 0))
    model.call_returns(tier=0, which=0, outcome="works", told=True)
    check(model)
    model.all_calls_return("works")
    assert tokens(model) == [2 * CHUNK]
    model.later(3.0)
    check(model)
    assert len(model.namespaces[0].nodes) == 2


def test_nothing_is_fetched_beyond_a_chunk_that_has_expired_and_is_still_in_use() -> None:
    model = stored((0, 0))
    model.store(owner=0, space=0, path=(0,), lazy=9, ttl=2.0)
    model.look_up(owner=0, space=0, path=(0,), limit=16, ttl=2.0)
    model.later(3.0)
    model.look_up_all(owner=0, space=0, path=(0, 0))
    assert (tokens(model), model.pending, model.tiering.busy) == ([CHUNK], {}, 0)
    check(model)


def test_a_chunk_that_a_client_names_twice_is_in_the_index_once() -> None:
    model = stored((0, 0), geometry=ONLY_A_WINDOW)
    hashes = hashes_of((0, 0))
    lookup = Lookup(1, model.namespaces[0], [*hashes, *hashes], model.now + DEADLINE)
    asked = Asked(1, lookup.namespace, lookup.hashes, 16, "", NO_HINTS)
    model.heard(model.tiering.lookup(asked), lookup)
    model.all_calls_return("works")
    check(model)
    assert len(model.namespaces[0].nodes) == 2


def test_promotions_together_take_no_more_than_their_share_however_many_search_at_once() -> None:
    model = stored(WHOLE, ANOTHER, cells=8)  # half of L1 is for promotions
    model.look_up_all(owner=0, space=0, path=WHOLE)
    model.look_up_all(owner=1, space=0, path=ANOTHER)
    while model.tiering.busy:
        model.call_returns(tier=0, which=0, outcome="works", told=True)
        assert model.cache.allocator.used <= 4
    model.all_calls_return("works")
    assert tokens(model) == [16]


def test_a_hit_waits_for_memory_that_is_on_its_way_and_has_nothing_evicted_for_it() -> None:
    model = stored(WHOLE)
    memory_is_on_its_way, wanted = [True], []
    model.tiering.memory_comes = lambda cells: bool(wanted.append(cells)) or bool(memory_is_on_its_way)
    model.look_up_all(owner=0, space=0, path=WHOLE)
    model.run_all("works")
    model.later(DEADLINE / 2)
    assert (model.fetching, model.cache.allocator.used, set(wanted)) == ({}, 0, {1})
    assert not model.tiering._promotions[min(model.pending)].over

    memory_is_on_its_way.clear()
    model.tick()
    model.all_calls_return("works")
    check(model)
    assert tokens(model) == [16]
    model.teardown()


def test_a_lookup_that_waits_for_room_asks_for_no_more_of_it_each_time() -> None:
    model = stage((ON_EVICT, 1, False), cells=8)
    model.store_all(owner=0, space=0, path=WHOLE)
    model.store_all(owner=0, space=0, path=ANOTHER)
    saving = model.tiering._saving
    targets = []
    for _ in range(5):
        assert saving.makes_room()
        targets.append(saving._on_evict._target)
    assert len(set(targets)) == 1
    assert targets[0] < 8
    model.all_calls_return("works")
    check(model)
    model.teardown()


def test_what_is_in_l1_is_held_for_searches_only_as_far_as_promotions_may_go() -> None:
    model = stored(WHOLE, ANOTHER, cells=8)
    model.store_all(owner=0, space=0, path=WHOLE[:3])
    model.store_all(owner=0, space=0, path=ANOTHER[:3])
    model.tick()
    model.look_up_all(owner=0, space=0, path=WHOLE)
    model.look_up_all(owner=1, space=0, path=ANOTHER)
    assert sum(node.cells for node in model.namespaces[0].nodes.values() if node.held) <= 4
    model.all_calls_return("works")
    assert tokens(model) == [16, 12]


def test_fetches_that_nobody_waits_for_any_more_count_until_they_come_back() -> None:
    model = stored(WHOLE, ANOTHER, cells=8)
    model.look_up_all(owner=0, space=0, path=WHOLE)
    model.call_returns(tier=0, which=0, outcome="works", told=True)
    model.drop(0)
    assert (len(model.fetching), model.tiering._room()) == (4, 0)
    model.look_up_all(owner=1, space=0, path=ANOTHER)
    assert (model.pending, tokens(model)) == ({}, [])  # a miss, at once
    model.all_calls_return("works")
    check(model)
    assert model.tiering._room() == 4
    model.look_up_all(owner=1, space=0, path=WHOLE)
    assert tokens(model) == [16]  # what came is there


def test_what_waits_behind_calls_that_hang_is_not_waited_for() -> None:
    model = stored(WHOLE, ANOTHER, threads=1)
    model.look_up_all(owner=0, space=0, path=WHOLE)
    model.look_up_all(owner=1, space=0, path=ANOTHER)
    model.later(8.0)
    [tier] = model.tiering.tiers
    assert (model.tiering.busy, tier.counters.timeouts, tier.counters.skipped) == (1, 1, 1)
    model.ask_again(1)
    assert list(model.pending) == [min(model.tiering._promotions)]
    model.all_calls_return("works")
    model.teardown()


def test_calls_that_fail_at_once_leave_a_tier_alone_no_longer_than_one_after_another_would() -> None:
    breaker = CircuitBreaker()
    for _ in range(8):
        breaker.failed(100.0)
    assert (breaker.allows(100.9), breaker.allows(101.0)) == (False, True)
    breaker.failed(101.0)
    assert (breaker.open(102.9), breaker.open(103.0)) == (True, False)


def test_threads_give_back_what_waits_and_go_on_with_what_runs() -> None:
    entered, go_on = threading.Event(), threading.Event()
    threads = TierThreads("t", 1, 60.0, lambda: None)
    heard: list[object] = []

    def work(_: float) -> str:
        entered.set()
        go_on.wait(30.0)
        return "done"

    threads.submit(work, heard.append, urgent=True)
    assert entered.wait(30.0)
    threads.submit(lambda _: "never", heard.append, urgent=True)
    threads.submit(lambda _: "never", heard.append, urgent=False)
    assert (len(threads.withdraw()), threads.busy) == (2, 1)
    go_on.set()
    threads.close(30.0)
    assert [call.outcome for call in threads.finished()] == ["done"]


def test_two_lookups_of_one_prompt_share_its_fetches_and_both_have_the_whole_hit() -> None:
    model = stored(WHOLE)
    model.look_up_all(owner=0, space=0, path=WHOLE)
    model.call_returns(tier=0, which=0, outcome="works", told=True)
    assert len(model.fetching) == 4
    model.look_up_all(owner=1, space=0, path=WHOLE)
    model.all_calls_return("works")
    assert (tokens(model), model.tiering.tiers[0].counters.loaded) == ([16, 16], 4)
    for _ in range(2):
        model.load(0)
    check(model)


def test_a_plugin_that_wants_to_end_the_thread_has_failed_like_any_other() -> None:
    threads = TierThreads("t", 1, 60.0, lambda: None)
    heard: list[object] = []
    for work in (lambda _: sys.exit("bye"), lambda _: "done"):
        threads.submit(work, heard.append, urgent=False)
    threads.close(30.0)
    first, second = threads.finished()
    assert (repr(first.outcome), second.outcome) == ("TierError('SystemExit: bye')", "done")


def test_where_no_thread_can_be_started_a_call_fails_and_later_ones_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[None] = []
    threads = TierThreads("t", 1, 60.0, lambda: woken.append(None))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        threads.submit(lambda _: "never", lambda _: None, urgent=True)
    [failed] = threads.finished()
    assert (type(failed.outcome), woken, threads.busy) == (TierError, [None], 0)
    threads.submit(lambda _: "done", lambda _: None, urgent=False)
    threads.close(30.0)
    assert [call.outcome for call in threads.finished()] == ["done"]
