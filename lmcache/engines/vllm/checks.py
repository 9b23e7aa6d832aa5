"""What is refused before anything is served: vLLM versions and ways of running it that this connector cannot serve."""

from collections.abc import Iterable
from typing import Any

from lmcache.engines.versions import check_interface
from lmcache.engines.vllm.adapter import VllmAdapter
from lmcache.errors import ConfigError

NEEDED = ("on_new_request", "get_transfer_results", "set_xfer_handshake_metadata_pp_aware", "has_pending_push_work")
"""Calls that vLLM makes from 0.32 on, and without which requests would hang or fail."""


def check_connector(version: str, bases: Iterable[type]) -> None:
    """Refuse a vLLM whose connector interface lacks what we need. Raises ConfigError.

    `bases` are the connector's classes; vLLM's own are those of its modules.
    """
    offered = {name for base in bases if base.__module__.startswith("vllm.") for name in vars(base)}
    check_interface(VllmAdapter, version, [name for name in NEEDED if name not in offered])


def check_parallelism(parallel: Any) -> int:
    """How many ranks share each block, or ConfigError for a split of the model that is not served."""
    for name, what in (
        ("pipeline_parallel_size", "its stages hold different layers"),
        ("decode_context_parallel_size", "its ranks hold different tokens of one block"),
        ("prefill_context_parallel_size", "its ranks hold different tokens of one block"),
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(f"{name} is {size}, and {what}", remedy=f"set {name} to 1; tensor parallelism is served")
    return int(parallel.tensor_parallel_size)
