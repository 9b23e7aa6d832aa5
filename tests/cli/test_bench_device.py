"""`lmcache bench --device`: with the CPU in a device's place it goes all the way; without a GPU it says so."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TORCH = importlib.util.find_spec("torch") is not None


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lmcache", "bench", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(not TORCH, reason="torch moves pages between a device and the arena, and is not installed")
@pytest.mark.timeout(400)
def test_every_shape_is_stored_and_loaded_in_every_way_that_the_cpu_has(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = run("--device", "cpu", "--quick", "--json", "--markdown", str(page))
    assert done.returncode == 0, done.stderr
    assert page.read_text().startswith("# cpu in a device's place")
    assert page.read_text().count(" a chunk | batch | ") == 5
    assert "kernel: left out, it takes Triton, and a GPU" in page.read_text()
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["machine"]["device"].startswith("cpu in a device's place, torch ")
    copies = [f for f in report["figures"] if f["what"] in {"store", "load"}]
    assert {f["subject"].partition(":")[0] for f in copies} == {
        "GLM-5.3",
        "GLM-5.2-FP8",
        "Llama-70B, TP 8",
        "gpt-oss-120b",
        "Qwen3-Next, TP 2",
    }
    assert [f["what"] for f in copies] == ["store", "load"] * (5 * 2)
    # the way that is used has targets, those beside it have none
    assert {f["subject"].rpartition(", ")[2]: bool(f["target"]) for f in copies} == {"gather": True, "batch": False}
    assert all(f["counts"]["bytes_moved"] == f["samples"] * 2 * f["counts"]["object_bytes"] for f in copies[:4])
    slowed = [f for f in report["figures"] if f["what"] == "a matrix product is slowed by"]
    assert len(slowed) == 2
    assert all(f["counts"]["objects_moved_meanwhile"] >= 8 for f in slowed)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_without_a_gpu_the_error_says_what_it_takes() -> None:
    done = run("--device", "cuda", "--quick")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert ("finds no CUDA device here" if TORCH else "--device takes torch") in line


def test_a_page_is_written_of_a_device_alone() -> None:
    done = run("--markdown", "page.md", "--quick")
    assert done.returncode == 2
    assert "--markdown is for a device, and no --device names one; add --device cuda" in done.stderr


def test_a_device_and_a_tier_are_two_benches() -> None:
    done = run("--device", "cpu", "--l2", "disk:///tmp?size_gb=1")
    assert done.returncode == 2
    assert "--l2 and --device are two benches" in done.stderr
