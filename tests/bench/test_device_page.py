"""The page of a device's bench: what it says of made-up figures, and what becomes of a run in which ways fail."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache.bench.device_page import as_markdown
from lmcache.bench.figures import Figure
from lmcache.bench.machine import Machine

H200 = Machine(
    *("AMD EPYC", 16, "32 MiB", 128 << 30, 100 << 30, "anonymous madvise, shared never", 0.1, "3.12.3", "6.18.44"),
    device="NVIDIA H200; NVRM version: 580.159; torch 2.11.0, CUDA 13.0",
)


def copies(shape: str, way: str, store: float, load: float) -> list[Figure]:
    return [
        Figure(
            *(
                10,
                what,
                f"{shape}: 3 × 8 KiB a chunk, {way}",
                share,
                "× one pinned copy",
                share - 0.01,
                share + 0.01,
                15,
            ),
            beside={"GiB/s": 50 * share, "one pinned copy, GiB/s": 50.0},
        )
        for what, share in (("store", store), ("load", load))
    ]


def test_the_page_has_all_that_a_reader_without_the_machine_needs() -> None:
    figures = [
        *copies("GLM-5.3", "gather", 0.91, 0.7),
        *copies("GLM-5.3", "reach", 0.95, 0.93),
        *copies("gpt-oss", "gather", 0.99, 0.89),
        Figure(
            *(10, "a matrix product is slowed by", "GLM-5.3: 3 × 8 KiB a chunk, reach", 3.2, "%", 2.9, 3.5, 9),
            counts={"objects_moved_meanwhile": 64},
        ),
    ]
    page = as_markdown(H200, figures, ["batch: FAILED"], quick=False)
    assert page.startswith("# NVIDIA H200, 20")
    for line in (
        "| device | NVIDIA H200; NVRM version: 580.159; torch 2.11.0, CUDA 13.0 |",
        "| host | AMD EPYC, 16 cores, 128 GiB |",
        (
            "| GLM-5.3: 3 × 8 KiB a chunk | reach | 47.5 (0.95) | 46.5 (0.93) | 50.0 and 50.0 "
            "| 0.94 to 0.96, 0.92 to 0.94 |"
        ),
        "- GLM-5.3: 3 × 8 KiB a chunk: best is `reach`, 0.93 of the ceiling in its slower direction",
        "- gpt-oss: 3 × 8 KiB a chunk: best is `gather`, 0.89 of the ceiling in its slower direction",
        "- target: at least 0.9 both ways for 4 of 5 shapes; reached for 1 of 2",
        "| reach | 3.2 % | 2.9 to 3.5 % | 64 |",
        "- batch: FAILED",
    ):
        assert line in page.splitlines()
    assert "quick run" not in page


def test_a_run_that_ended_after_a_store_still_makes_a_page() -> None:
    page = as_markdown(H200, copies("GLM-5.3", "gather", 0.9, 0.9)[:1], [], quick=True)
    assert "| GLM-5.3: 3 × 8 KiB a chunk | gather | 45.0 (0.90) | – | 50.0 | 0.89 to 0.91 |" in page
    assert "**A quick run" in page
    assert as_markdown(H200, [], [], quick=False)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch moves the pages, and is not installed")
class TestARun:
    """On the CPU, in a device's place."""

    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        import torch

        from lmcache.bench import device

        shapes = device.device_shapes()[3:]
        monkeypatch.setattr(device, "device_shapes", lambda: shapes)
        self.told: list[int] = []
        cpu = torch.device("cpu")
        return device.DeviceRun(cpu, True, lambda _: None, lambda run: self.told.append(len(run.figures)))

    def test_a_way_that_fails_is_noted_and_the_others_go_on(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from lmcache.bench import device

        real = device._Bench.load

        def load(bench: Any) -> None:
            if bench._way.value == "gather":
                raise RuntimeError("CUDA error: an illegal\n  address")
            real(bench)

        monkeypatch.setattr(device._Bench, "load", load)
        run.measure()
        assert {figure.subject.rpartition(", ")[2] for figure in run.figures} == {"batch"}
        failed = [note for note in run.notes if "FAILED" in note]
        assert len(failed) == 3
        assert failed[0].startswith("gpt-oss-120b: 288 × 32 KiB a chunk, gather: FAILED after ")
        assert failed[0].endswith("RuntimeError: CUDA error: an illegal address")
        assert self.told == [0, 2, 2, 4, 4, 5], "the page was written each time"

    def test_what_would_begin_after_the_budget_is_left_out(self, run: Any) -> None:
        times: Iterator[float] = iter([0.0, 1.0, 1.0, *[1e6] * 99])
        run.clock = lambda: next(times)
        run.measure()
        assert {figure.subject.rpartition(", ")[2] for figure in run.figures} == {"gather"}
        assert "gpt-oss-120b: 288 × 32 KiB a chunk, batch: left out, 240 s were over" in run.notes
