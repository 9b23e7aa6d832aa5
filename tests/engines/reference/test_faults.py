"""A short run of faults; the long one is `python tests/_plugins/fault_rounds.py --rounds 600`."""

import typing
from pathlib import Path

import pytest
from fault_points import POINTS
from fault_rounds import Bench, Fault, all_faults, plan, run

from lmcache.core.protocol import Ping, Request, Status

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
    steps = {message.__name__ for message in typing.get_args(Request)} - {Ping.__name__, Status.__name__}
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


def test_a_wrong_answer_does_not_go_unnoticed(tmp_path: Path) -> None:
    bench = Bench(1, tmp_path)
    try:
        bench._ask([1])
        line = bench.engine.line()
        assert bench._check_answer([1], line)
        with pytest.raises(AssertionError, match="WRONG ANSWER"):
            bench._check_answer([2], line)
    finally:
        bench.close()
