"""`lmcache bench --l2` for real, in its short form: what it says it did, it did, and it leaves nothing behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "lmcache-folder-tier" / "src" / "lmcache_folder_tier" / "tier.py"
MIB = 1 << 20


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmcache", "bench", "--quick", "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )


def report_of(*arguments: str) -> list[dict[str, Any]]:
    done = run_bench(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    figures: list[dict[str, Any]] = json.loads(done.stdout)["figures"]
    return figures


def row(figures: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    return [figure for figure in figures if figure["row"] == number]


def test_a_disk_is_measured_beside_plain_files_and_is_as_it_was_afterwards(tmp_path: Path) -> None:
    (tmp_path / "somebody's").write_text("own")
    figures = report_of("--l2", f"disk://{tmp_path}?size_gb=500&store=on-evict")

    assert [(f["what"], f["unit"]) for f in row(figures, 7)] == [
        ("store", "× plain write"),
        ("store, speed", "GiB/s"),
        ("restore", "× plain read"),
        ("restore, speed", "GiB/s"),
    ] * 2
    assert [f["what"] for f in row(figures, 0)] == ["plain write", "plain read"] * 2
    targets = {f["what"]: f["target"] for f in row(figures, 7)}
    assert [targets["store"], targets["restore"]] == [None, {"direction": "at_least", "limit": 0.9}]
    # 64 MiB in blobs of 2 and of 32; whatever came back was compared, that of the warming up included
    for figure, blobs in zip(row(figures, 7)[::2], (32, 32, 2, 2), strict=True):
        size = 64 * MIB // blobs + 4096
        counts = {"prompts": 1, "blobs": blobs, "blob_bytes": size, "blobs_compared": 2 * blobs}
        # what was read plainly lay where what was restored lies
        assert figure["counts"] == {**counts, "cells_in_the_same_memory": 2 * 64}
    assert all(f["low"] > 0 for f in figures)
    [lookups] = row(figures, 9)
    assert lookups["counts"] == {"lookups": 20, "chunks_hit": 128}
    assert set(lookups["beside"]) == {"p99", "without a tier", "its p99"}
    assert row(figures, 8) == []
    assert [path.name for path in tmp_path.iterdir()] == ["somebody's"]


def test_a_tier_of_a_third_party_with_a_codec_is_measured_beside_its_own_calls_and_left_empty(tmp_path: Path) -> None:
    pytest.importorskip("zstandard", reason="the codec needs the extra zstd")
    figures = report_of("--plugin", str(EXAMPLE), "--l2", f"folder://{tmp_path}?codec=zstd-bf16&threads=2")

    assert all("codec zstd-bf16" in f["subject"] for f in row(figures, 7))
    assert all(f["target"] is None for f in row(figures, 7))
    assert all("calls of the tier itself" in f["subject"] for f in row(figures, 0))
    smaller, *speeds = row(figures, 8)
    assert 1.1 < smaller["value"] < 2
    assert [f["unit"] for f in speeds] == ["GiB/s of CPU"] * 2
    assert {f["counts"]["verified"] for f in row(figures, 8)} == {2}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--l2", "nowhere://host"), "'nowhere'"),
        (("--l2", "disk:///there/is/none?size_gb=1"), "--l2 disk:///there/is/none: there is no such folder"),
        (("--l2", "peer://127.0.0.1:1"), "--l2 peer://127.0.0.1:1 keeps chunks of engines, no blobs"),
        (("--l2", "disk:///tmp?size_gb=1", "--engine", "vllm"), "--engine and --l2 are two benches"),
        (("--plugin", "somebodys.tier"), "--plugin is for tiers, and no --l2 names one"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments: tuple[str, ...], message: str) -> None:
    done = run_bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
