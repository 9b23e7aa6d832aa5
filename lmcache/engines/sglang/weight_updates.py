"""Weights that are exchanged while SGLang runs: from then on they are not those that the namespace names.

SGLang tells its caches to flush, as users do, and nothing of the reason. So the calls themselves are watched, in the
process that makes them, which is the doors' own.
"""

import functools
from collections.abc import Callable
from typing import Any

import sglang
from sglang.srt.managers.scheduler_components import weight_updater as manager
from sglang.srt.model_executor.model_runner_components import weight_updater

from lmcache.engines.sglang.adapter import SglangAdapter
from lmcache.engines.versions import check_interface

UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""Every way into a model that runs, of SGLang's `WeightUpdater`."""

BRACKETS = ("begin_weight_update", "end_weight_update")
"""Around several of them, where SGLang has that: both change the weights themselves, too, to load and to serve."""

FLUSH = "flush_cache_after_weight_update"
"""What SGLang's scheduler does then: until it is done, threads of HiCache may hand over pages of the old weights."""


class Updates:
    """A number that changes with the weights of this process. The same on all ranks, for they go in step."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self, updater: Any, manager: Any) -> None:
        """Count from now on, in these two classes of SGLang's. Raises ConfigError where they are other ones."""
        missing = [name for name in UPDATES if not hasattr(updater, name)]
        missing += [FLUSH] if not hasattr(manager, FLUSH) else []
        check_interface(SglangAdapter, sglang.__version__, missing)
        for name in UPDATES:
            # before as well: one that fails half way has changed something, too
            setattr(updater, name, self._counted(getattr(updater, name)))
        for name in BRACKETS:
            if hasattr(updater, name):
                setattr(updater, name, self._counted(getattr(updater, name)))
        setattr(manager, FLUSH, self._counted(getattr(manager, FLUSH)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            try:
                return call(*arguments, **named)
            finally:
                self.count += 1

        return counted


@functools.cache
def watched_updates() -> Updates:
    """The updates of this process, counted from the first call on."""
    updates = Updates()
    updates.watch(weight_updater.WeightUpdater, manager.SchedulerWeightUpdaterManager)
    return updates
