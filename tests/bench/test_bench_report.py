"""What people and programs get to read of a bench."""

import json

import attrs
import pytest

from lmcache.bench.figures import Figure, at_least, at_most, figure, percentile, quartiles
from lmcache.bench.machine import Machine
from lmcache.bench.report import as_dict, as_text

MACHINE = Machine(
    cpu="AMD EPYC",
    cores=2,
    last_level_cache="32768K",
    memory_bytes=24 << 30,
    available_bytes=20 << 30,
    huge_pages="anonymous madvise, shared never",
    load=0.5,
    python="3.11.7",
    kernel="6.18.44",
)

SPEED = figure(1, "store", "Llama-8B", [0.88, 0.94, 0.92], "× memcpy", target=at_least(0.9), counts={"bytes_moved": 3})
SLOW = figure(2, "server work", "512 chunks", [1.5], "ms", target=at_most(1), beside={"p99": 2.25})
LIMIT = figure(0, "memcpy a page", "Llama-8B", [5.0, 5.5], "GiB/s")


def test_text_shows_value_noise_target_and_verdict_row_by_row() -> None:
    assert as_text(MACHINE, [SPEED, SLOW, LIMIT], quick=False).splitlines() == [
        "AMD EPYC, 2 cores, last-level cache 32768K, 24.0 GB of memory, 20.0 GB available",
        "huge pages: anonymous madvise, shared never; Linux 6.18.44, Python 3.11.7; load 0.5",
        "",
        "the machine's own limits",
        "   memcpy a page  Llama-8B  5.25 GiB/s  (5.12–5.38, 2)",
        "",
        "1  store and load of pages, engine memory ↔ arena, against a memcpy a page of the same bytes on the same core",
        "   store  Llama-8B  0.92 × memcpy  (0.9–0.93, 3)  ≥ 0.9  met",
        "",
        "2  lookup",
        "   server work  512 chunks  1.5 ms  (1.5–1.5, 1)  ≤ 1  missed  p99 2.25",
        "",
        "1 of 2 targets met. In brackets: the middle half of the samples, and how many.",
    ]


def test_a_quick_run_is_not_judged() -> None:
    lines = as_text(MACHINE, [SPEED, SLOW], quick=True).splitlines()
    assert [line for line in lines if "met" in line or "missed" in line] == []
    assert "   store  Llama-8B  0.92 × memcpy  (0.9–0.93, 3)  ≥ 0.9" in lines
    assert lines[-1].startswith("Quick: too few samples to judge the targets by.")


def test_a_busy_machine_is_named_as_such() -> None:
    assert "others are busy here" in as_text(attrs.evolve(MACHINE, load=1.5), [SPEED], quick=False)
    assert "others are busy here" not in as_text(MACHINE, [SPEED], quick=False)


def test_json_holds_everything_that_was_measured() -> None:
    report = json.loads(json.dumps(as_dict(MACHINE, [SPEED, LIMIT], quick=False)))

    assert report["machine"] == attrs.asdict(MACHINE)
    assert report["figures"][0] == {
        "row": 1,
        "what": "store",
        "subject": "Llama-8B",
        "value": 0.92,
        "unit": "× memcpy",
        "low": pytest.approx(0.9),
        "high": pytest.approx(0.93),
        "samples": 3,
        "beside": {},
        "counts": {"bytes_moved": 3},
        "target": {"direction": "at_least", "limit": 0.9},
        "met": True,
    }
    assert (report["figures"][1]["target"], report["figures"][1]["met"]) == (None, None)


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [(0.9, at_least(0.9), True), (0.89, at_least(0.9), False), (1.0, at_most(1.0), True), (1.01, at_most(1.0), False)],
)
def test_a_figure_at_its_limit_meets_it(value: float, target: object, met: bool) -> None:
    assert Figure(1, "", "", value, "", value, value, 1, target).met is met  # type: ignore[arg-type]


def test_percentiles_are_samples() -> None:
    samples = [float(number) for number in range(100, 0, -1)]

    assert percentile(samples, 99) == 100.0
    assert percentile(samples, 50) == 51.0
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
