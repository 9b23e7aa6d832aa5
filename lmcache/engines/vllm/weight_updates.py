"""Every way in which vLLM itself exchanges the weights of a model that runs, watched in its workers' processes."""

import functools

import vllm
from vllm.v1.worker.gpu_worker import Worker

from lmcache.engines.versions import check_interface
from lmcache.engines.vllm.adapter import VllmAdapter
from lmcache.engines.weight_updates import Updates

UPDATES = ("reload_weights", "reset_weights", "start_weight_update", "update_weights", "finish_weight_update")
"""Of vLLM's `Worker`, which that of the CPU derives from. Weights that code of the user's own puts into the model, by a
worker extension, pass none of them: nobody is told of those."""


@functools.cache
def watched_updates() -> Updates:
    """The updates of this process, counted from the first call on. Raises ConfigError where vLLM has other ones."""
    updates = Updates()
    check_interface(VllmAdapter, vllm.__version__, updates.watch(Worker, UPDATES))
    return updates
