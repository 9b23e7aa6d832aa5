"""What is refused before anything is served: SGLang versions and ways of running it that a door cannot serve."""

from collections.abc import Collection
from typing import Any

from lmcache.engines.sglang.adapter import SglangAdapter
from lmcache.engines.versions import check_interface
from lmcache.errors import ConfigError

LINKER_NEEDED = (
    "lookup",
    "load",
    "start_layer_wise_loading",
    "cancel_queued_load",
    "offload",
    "num_completed_offloads",
    "pop_completed_offload",
)
"""Calls without which pages would never be stored or loaded. Older releases lack others, which are then not made."""

STORAGE_NEEDED = ("batch_exists", "batch_get_v1", "batch_set_v1", "register_mem_pool_host")


def check_door(version: str, base: type, needed: Collection[str], door: type) -> None:
    """Refuse an SGLang whose interface lacks what we need, or asks for what we do not have. Raises ConfigError.

    `base` is SGLang's class, `door` ours. SGLang refuses the latter itself, but cannot say which version would do.
    """
    check_interface(SglangAdapter, version, [name for name in needed if not hasattr(base, name)])
    asked = sorted(getattr(door, "__abstractmethods__", ()))
    if asked:
        raise ConfigError(
            f"sglang {version} asks for {', '.join(asked)}, which this lmcache does not have",
            remedy=f"use sglang {SglangAdapter.supported}, or a newer lmcache",
        )


def check_parallelism(**sizes: Any) -> None:
    """Refuse splits of the model whose ranks hold other tokens or layers. `sizes` are named as SGLang names them."""
    for name, size in sizes.items():
        if int(size or 1) > 1:
            raise ConfigError(
                f"{name} is {size}, and its ranks hold different tokens or layers of a page",
                remedy=f"set {name} to 1; tensor parallelism is served",
            )
