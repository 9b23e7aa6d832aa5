"""Every way in which the weights of a running SGLang are exchanged, watched in the processes of its schedulers."""

import functools

import sglang
from sglang.srt.managers.scheduler_components import weight_updater as manager
from sglang.srt.model_executor.model_runner_components import weight_updater

from lmcache.engines.sglang.adapter import SglangAdapter
from lmcache.engines.versions import check_interface
from lmcache.engines.weight_updates import Updates

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


@functools.cache
def watched_updates() -> Updates:
    """The updates of this process, counted from the first call on. Raises ConfigError where SGLang has other ones."""
    updates = Updates()
    missing = updates.watch(weight_updater.WeightUpdater, UPDATES)
    missing += updates.watch(manager.SchedulerWeightUpdaterManager, [FLUSH])
    check_interface(SglangAdapter, sglang.__version__, missing)
    updates.watch(weight_updater.WeightUpdater, BRACKETS)
    return updates
