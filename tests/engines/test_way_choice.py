"""Which way pages cross: measured when they are registered, on CPU tensors, with a clock that says what a way takes."""

import importlib.util
import logging
import os
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch moves pages between an accelerator and the arena, and is not installed")

import numpy as np
import torch
from device_stand import BLOCKS, STORAGES, storages_of

from lmcache.engines import way_choice
from lmcache.engines.staging import StagedCopier, Way
from lmcache.engines.way_choice import Chooser, fastest, staged_maker
from lmcache.errors import ConfigError

GATHER, KERNEL, REACH, BATCH = Way

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Clock:
    """Stands still but for what each way takes to store an object, in seconds."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = {Way(name): taken for name, taken in seconds.items()}
        self.now = 100.0
        self.stores: list[Way] = []

    def __call__(self) -> float:
        return self.now

    def stored(self, way: Way) -> None:
        self.stores.append(way)
        self.now += self.seconds[way]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """All four ways, whatever this machine has: they gather with torch, and take what the clock says."""
    made = Clock(gather=0.004, kernel=0.003, reach=0.002, batch=0.005)
    real_movers, real_store = way_choice.StagedPages.__init__, StagedCopier.begin_store

    def begin_store(copier: Any, *arguments: Any) -> None:
        real_store(copier, *arguments)
        made.stored(copier._pages.said)

    def init(pages: Any, *arguments: Any, way: Way, **options: Any) -> None:
        real_movers(pages, *arguments, way=GATHER, **options)
        pages.said = way

    monkeypatch.setattr(StagedCopier, "begin_store", begin_store)
    monkeypatch.setattr(way_choice.StagedPages, "__init__", init)
    return made


def pages(number: int = 2, sizes: Sequence[int] = (1152,) * 3) -> Any:
    tensors, views = STORAGES[number]("cpu", sizes)
    return tensors, views, BLOCKS


# ------------------------------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("seconds", "way"),
    [
        ({GATHER: 2.0, KERNEL: 1.0, REACH: 3.0, BATCH: 4.0}, KERNEL),
        ({GATHER: 2.0, KERNEL: 1.0, REACH: 0.5, BATCH: 0.4}, BATCH),
        ({GATHER: 1.04, KERNEL: 1.0, REACH: 1.0, BATCH: 1.0}, GATHER),  # 4 % are noise: the simplest does
        ({GATHER: 1.06, KERNEL: 1.04, REACH: 1.0, BATCH: 1.0}, KERNEL),
        ({REACH: 1.0}, REACH),
        ({}, GATHER),
    ],
)
def test_the_simplest_way_that_is_hardly_slower_than_the_fastest_is_taken(seconds: dict[Way, float], way: Way) -> None:
    assert fastest(seconds) is way


def test_the_fastest_is_found_and_told_of_once_with_all_figures(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    chooser = Chooser(clock)
    with caplog.at_level(logging.INFO, "lmcache"):
        assert chooser.way_for(*pages()) is REACH
        measured = len(clock.stores)
        assert chooser.way_for(*pages()) is REACH, "the same shape, in other memory"
    assert len(clock.stores) == measured
    [line] = [record.getMessage() for record in caplog.records]
    assert line == (
        "lmcache: pages of 3 layers cross by reach. 0.0396 MiB of them, there and back: gather 4.00 ms, kernel 3.00 "
        "ms, reach 2.00 ms, batch 5.00 ms. LMCACHE_DEVICE_COPY chooses another way"
    )


def test_another_shape_is_measured_by_itself(clock: Clock) -> None:
    chooser = Chooser(clock)
    assert chooser.way_for(*pages()) is REACH
    clock.seconds[BATCH] = 0.001
    assert chooser.way_for(*pages(sizes=(1152,) * 4)) is BATCH
    assert chooser.way_for(*pages()) is REACH


def test_measuring_ends_with_its_budget_and_what_was_measured_decides(clock: Clock) -> None:
    clock.seconds |= {GATHER: 0.5, KERNEL: 0.6}
    assert Chooser(clock).way_for(*pages()) is GATHER
    # twice two stores that count, 2 s, and two before them that do not
    assert clock.stores == [GATHER] * 6
    clock.seconds[GATHER] = 0.1
    assert Chooser(clock).way_for(*pages()) is GATHER
    assert clock.stores[6:] == [GATHER] * 12 + [KERNEL] * 4


@pytest.mark.parametrize("number", range(len(STORAGES)), ids=[storage.__name__ for storage in STORAGES])
def test_pages_hold_what_they_held(clock: Clock, number: int) -> None:
    tensors, views, blocks = pages(number)
    before = {at: whole.clone() for at, whole in storages_of(tensors).items()}
    Chooser(clock).way_for(tensors, views, blocks)
    assert all(torch.equal(whole, before[at]) for at, whole in storages_of(tensors).items())


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_an_engine_of_few_blocks_is_measured_too(clock: Clock, blocks: int) -> None:
    tensors, views, _ = pages()
    assert Chooser(clock).way_for(tensors, views, blocks) is REACH


# ------------------------------------------------------------------------------------------- ways that do not work


def test_a_way_that_fails_is_left_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StagedCopier.begin_load

    def failing(copier: Any, *arguments: Any) -> None:
        if copier._pages.said is REACH:
            raise RuntimeError("the driver refuses")
        real(copier, *arguments)

    monkeypatch.setattr(StagedCopier, "begin_load", failing)
    assert Chooser(clock).way_for(*pages()) is KERNEL


def test_a_way_that_changes_bytes_is_left_out_aloud(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counted = StagedCopier.begin_store

    def wrong(copier: Any, arena: Any, *arguments: Any) -> None:
        counted(copier, arena, *arguments)
        if copier._pages.said is REACH:
            arena[7] = changed

    monkeypatch.setattr(StagedCopier, "begin_store", wrong)
    tensors, views, blocks = pages()
    before = [tensor.clone() for tensor in tensors]
    changed = int(tensors[0][7]) ^ 1
    assert Chooser(clock).way_for(tensors, views, blocks) is KERNEL
    assert "pages that cross by reach arrive changed" in caplog.text
    assert all(map(torch.equal, tensors, before)), "the pages were set right"


def test_where_none_works_there_is_the_simplest(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError("nothing works")

    monkeypatch.setattr(StagedCopier, "begin_store", failing)
    assert Chooser(clock).way_for(*pages()) is GATHER


# --------------------------------------------------------------------------------------------------- what engines call


def test_nothing_is_measured_unless_the_environment_asks_for_it(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chooser, "of_process", lambda: Chooser(clock))
    for word, measured in (("", False), ("batch", False), ("measure", True)):
        monkeypatch.setenv("LMCACHE_DEVICE_COPY", word)
        clock.stores.clear()
        maker = staged_maker(*pages())
        assert bool(clock.stores) is measured
        assert maker.args[0].said is {"": GATHER, "batch": BATCH, "measure": REACH}[word]  # type: ignore[attr-defined]


def test_what_really_works_here_is_measured_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_DEVICE_COPY", "measure")
    monkeypatch.setattr(way_choice, "BUDGET_S", 1e9)  # Triton's interpreter has all the time
    monkeypatch.setattr(way_choice, "ROUNDS", 1)
    found: list[dict[Way, float]] = []
    monkeypatch.setattr(way_choice, "fastest", lambda seconds: (found.append(dict(seconds)), fastest(seconds))[1])
    monkeypatch.setattr(Chooser, "of_process", Chooser)
    tensors, views, blocks = pages(sizes=[4096] * 2)
    before = [tensor.clone() for tensor in tensors]
    maker = staged_maker(tensors, views, blocks)
    kernels = INTERPRETED and importlib.util.find_spec("triton") is not None
    assert set(found[0]) == (set(Way) if kernels else {GATHER, BATCH})
    assert all(map(torch.equal, tensors, before))
    layout = way_choice.Trial.of(tensors, views, blocks).layout
    arena = np.zeros(layout.cells << 20, np.uint8)
    maker(layout, 1 << 20).store(arena, list(range(layout.cells)), list(range(layout.blocks)))
    assert arena[: layout.blocks * 4096].tobytes() == tensors[0].numpy()[: layout.blocks * 4096].tobytes()


def test_a_device_that_nobody_has_tried_is_refused_before_anything_is_measured(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMCACHE_DEVICE_COPY", "measure")
    tensors = [torch.empty(64, dtype=torch.uint8, device="meta")]
    with pytest.raises(ConfigError, match="on meta, a kind of device that lmcache has not been tried on"):
        staged_maker(tensors, pages()[1][:1], 4)
    assert clock.stores == []
