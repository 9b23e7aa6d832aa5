"""Which way the pages of an engine cross: what the environment says, or what is fastest on this machine. Imports torch.

The measurement runs once for each page shape, when an engine registers its pages: nothing is in them yet, no request
waits, and no CUDA graph is being captured.
"""

import functools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import torch

from lmcache.engines.copy import Bytes
from lmcache.engines.copying import MakeCopier, PageView, load_objects, store_objects
from lmcache.engines.cuda import check_device
from lmcache.engines.pinning import Everywhere
from lmcache.engines.staging import SETTING, StagedCopier, StagedPages, Way, chosen_way
from lmcache.geometry.groups import GroupKind, KVGroup
from lmcache.geometry.layout import ObjectLayout, object_layout

log = logging.getLogger(__name__)

CELL_BYTES = 1 << 20
"""Of the measurement: what servers have unless they are told otherwise."""

SAMPLE_BYTES = 16 << 20
"""Of pages in one object of the measurement, at most, unless a single block has more."""

ROUNDS = 5
"""Stores and loads of two objects, for each way, after one that is not counted: it compiles and allocates."""

BUDGET_S = 2.0
"""Of what is counted. Once it is spent, no other way is begun, and what has been measured decides."""

WORTH = 0.05
"""Part of the time that a way has to save to be taken before a simpler one: less is noise."""

Clock = Callable[[], float]
"""Seconds."""


def staged_maker(tensors: Sequence[torch.Tensor], views: Sequence[PageView], blocks: int) -> MakeCopier:
    """What makes the copiers of a group of pages on a device. Raises ConfigError as `StagedPages` does.

    Called when pages are registered and hold nothing yet: they may be read, and written with what they hold.
    """
    way = chosen_way()
    if way is None:
        way = Chooser.of_process().way_for(tensors, views, blocks)
    return functools.partial(StagedCopier, StagedPages(tensors, views, blocks, way=way))


def fastest(seconds: Mapping[Way, float]) -> Way:
    """The simplest of those that take hardly longer than the shortest; GATHER where none was measured."""
    best = min(seconds.values(), default=0.0)
    return next((way for way in Way if way in seconds and seconds[way] * (1 - WORTH) <= best), Way.GATHER)


@attrs.define
class Chooser:
    """Measures each page shape once, and remembers."""

    clock: Clock = time.perf_counter
    _chosen: dict[tuple[object, ...], Way] = attrs.field(factory=dict)

    @staticmethod
    @functools.cache
    def of_process() -> "Chooser":
        """The one of this process."""
        return Chooser()

    def way_for(self, tensors: Sequence[torch.Tensor], views: Sequence[PageView], blocks: int) -> Way:
        """The way for such pages. Raises ConfigError for a device that lmcache has not been tried on."""
        shape = (tensors[0].device, *((view.stride, view.page_bytes) for view in views))
        if shape not in self._chosen:
            check_device(tensors[0].device)
            trial = Trial.of(tensors, views, blocks)
            seconds = trial.run(self.clock)
            self._chosen[shape] = fastest(seconds)
            self._tell(trial, seconds, self._chosen[shape])
        return self._chosen[shape]

    def _tell(self, trial: "Trial", seconds: Mapping[Way, float], way: Way) -> None:
        figures = ", ".join(f"{each.value} {1000 * taken:.2f} ms" for each, taken in seconds.items())
        log.info(
            "lmcache: pages of %d layers cross by %s. %.3g MiB of them, there and back: %s. %s chooses another way",
            *(len(trial.views), way.value, trial.layout.payload_bytes / (1 << 20), figures or "none works", SETTING),
        )


@attrs.frozen
class Trial:
    """Two objects of an engine's first blocks, to locked memory and back to where they were."""

    tensors: Sequence[torch.Tensor]
    views: Sequence[PageView]
    blocks: int
    layout: ObjectLayout

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], views: Sequence[PageView], blocks: int) -> "Trial":
        """As large as the engine has blocks for, and no larger than shows the speed."""
        block_bytes = sum(view.page_bytes for view in views)
        taken = max(1, min(blocks // 2, SAMPLE_BYTES // block_bytes))
        group = KVGroup(GroupKind.FULL, 1, tuple(view.page_bytes for view in views))
        return cls(tensors, views, blocks, object_layout(group, taken, CELL_BYTES))

    def run(self, clock: Clock) -> dict[Way, float]:
        """Seconds of storing and loading one object, in each way that works here. Pages hold what they held."""
        cuda = self.tensors[0].device.type != "cpu"
        size = 2 * self.layout.cells * CELL_BYTES
        arena: Bytes = np.asarray(torch.zeros(size, dtype=torch.uint8, pin_memory=cuda).numpy())
        found: dict[Way, float] = {}
        proved: tuple[StagedCopier, Bytes] | None = None
        left = BUDGET_S
        for way in Way:
            if left <= 0:
                break
            arena[:] = 0
            try:
                copier = self._copier(way)
                times = self._times(copier, arena, clock, left)
            except Exception as error:  # noqa: BLE001 - a compiler's, a driver's: there is another way
                log.info("lmcache: pages do not cross by %s here: %s", way.value, error)
                continue
            if proved is None:
                proved = copier, arena.copy()
            elif not np.array_equal(arena, proved[1]):
                log.warning("lmcache: pages that cross by %s arrive changed, which is a bug: it is not used", way.value)
                arena[:] = proved[1]
                self._load(proved[0], arena)
                break
            found[way] = statistics.median(times)
            left -= sum(times) * len(self._objects)
        return found

    def _copier(self, way: Way) -> StagedCopier:
        pages = StagedPages(self.tensors, self.views, self.blocks, way=way, reach=Everywhere())
        return StagedCopier(pages, self.layout, CELL_BYTES)

    def _times(self, copier: StagedCopier, arena: Bytes, clock: Clock, limit: float) -> list[float]:
        times: list[float] = []
        for number in range(1 + ROUNDS):
            began = clock()
            store_objects(copier, arena, self._objects)
            self._load(copier, arena)
            if number:  # the first compiles and allocates
                times.append((clock() - began) / len(self._objects))
            if sum(times) * len(self._objects) >= limit:
                break
        return times

    def _load(self, copier: StagedCopier, arena: Bytes) -> None:
        load_objects(arena, [(copier, cells, ids, 0) for cells, ids in self._objects])

    @property
    def _objects(self) -> list[tuple[list[int], list[int]]]:
        """Cells and blocks."""
        cells, blocks = self.layout.cells, self.layout.blocks
        second = min(blocks, self.blocks - blocks)  # where the engine has no others, the same blocks twice
        return [
            (list(range(cells)), list(range(blocks))),
            (list(range(cells, 2 * cells)), list(range(second, second + blocks))),
        ]
