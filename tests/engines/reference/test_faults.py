"""A short run of faults; the long one is `python tests/_plugins/fault_rounds.py --rounds 600`."""

import json
import time
import typing
from collections.abc import Iterator

import pytest
from fault_points import FAIL, GO, POINTS
from fault_rounds import Bench, Fault, all_faults, plan, run

from lmcache.core.protocol import AskAgain, Peek, Pin, Ping, Read, Request, Status, Take, Unpin, Write

ROUNDS = 30


@pytest.mark.timeout(400)
def test_whoever_dies_or_stops_wherever_answers_stay_right_and_nothing_is_held_or_left_behind() -> None:
    said: list[str] = []
    counts = run(plan(ROUNDS, seed=2026), 2026, said.append)
    assert counts["rounds"] == ROUNDS
    assert counts["points reached"] >= ROUNDS - 2, said
    assert counts["hit tokens"] > 0
    assert counts["engines started"] > 0
    assert counts["servers started"] > 0


def test_every_request_of_the_protocol_has_its_points_on_both_sides() -> None:
    # commands are nobody's rights, a lookup is asked for again only where there are tiers (test_tiering_model.py), and
    # what is for the bulk channel only has tests of its own (test_other_host.py, test_peer.py)
    others = {Ping, Status, Pin, Unpin, AskAgain, Peek, Take, Read, Write}
    steps = {message.__name__ for message in set(typing.get_args(Request)) - others}
    for step in steps:
        assert {f"server:{moment}:{step}" for moment in ("before", "after", "sent")} <= set(POINTS)
        if step != "Hello":  # the client's side of it is a socket of its own, closed whatever happens
            clients = [p for p in POINTS if p.endswith(f":{step}") and not p.startswith("server:")]
            assert {point.split(":")[1] for point in clients} == {"before", "after"}


def test_every_point_is_met_with_every_victim_and_action_before_any_comes_twice() -> None:
    faults = plan(len(all_faults()), seed=1)
    assert set(faults) == set(all_faults())
    assert len(faults) == len(POINTS) * 3 * 2
    assert Fault("worker:before:Commit", "rank", "kill") in faults


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    running = Bench(1, tmp_path_factory.mktemp("faults"), deadline=5.0)
    yield running
    running.close()


def test_a_wrong_answer_does_not_go_unnoticed(bench: Bench) -> None:
    bench.ask([1])
    line = bench.engine.line()
    assert bench.check_answer([1], line)
    with pytest.raises(AssertionError, match="WRONG ANSWER"):
        bench.check_answer([2], line)


@pytest.mark.parametrize("point", ["worker:before:copy-out", "worker:before:Confirm"])
def test_a_rank_that_loads_later_than_the_other_is_waited_for(bench: Bench, point: str) -> None:
    bench.ask([2])
    assert bench.check_answer([2], bench.engine.line())
    bench.trigger.arm(point, 1)
    bench.ask([2])
    with bench.paused(point) as (sock, _):
        time.sleep(0.5)  # the other rank is done long before, and the engine makes steps all the while
        sock.sendall(GO)
    answer = bench.engine.line()
    assert bench.check_answer([2], answer)
    assert json.loads(answer)["hits"][0] >= 128
    bench.settle()


@pytest.mark.parametrize("point", ["worker:before:copy-out", "worker:after:copy-out", "worker:before:Confirm"])
def test_a_load_that_fails_on_one_rank_counts_on_none(bench: Bench, point: str) -> None:
    bench.ask([3])
    assert bench.check_answer([3], bench.engine.line())
    bench.trigger.arm(point, 1)
    bench.ask([3])
    with bench.paused(point) as (sock, _):
        sock.sendall(FAIL)
    answer = bench.engine.line()
    assert bench.check_answer([3], answer)
    assert (json.loads(answer)["hits"], json.loads(answer)["failures"]) == ([0], [1])
    bench.settle()


@pytest.mark.parametrize("step", ["Reserve", "Commit"])
def test_a_store_that_fails_on_one_rank_is_a_miss(bench: Bench, step: str) -> None:
    point, number = f"worker:before:{step}", {"Reserve": 4, "Commit": 5}[step]
    bench.trigger.arm(point, 1)
    bench.ask([number])
    with bench.paused(point) as (sock, _):
        sock.sendall(FAIL)
    assert bench.check_answer([number], bench.engine.line())
    bench.ask([number])
    assert bench.check_answer([number], bench.engine.line())
