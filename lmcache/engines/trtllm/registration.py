"""What a worker finds out when TensorRT-LLM registers its KV cache. Imports torch where a cache is registered."""

import functools
from collections.abc import Sequence
from typing import Any

import attrs

from lmcache.engines.copy import Copier, Pages
from lmcache.engines.copying import Kernels, MakeCopier, NoKernels, page_array
from lmcache.engines.trtllm.checks import check_flat
from lmcache.engines.trtllm.describe import PageGroup, Shape, flat_group, layout_groups, page_facts, shape_of
from lmcache.engines.trtllm.identity import namespace_facts
from lmcache.engines.trtllm.settings import Settings
from lmcache.errors import ConfigError


@attrs.frozen
class Registration:
    """What a worker knows once it has seen its KV cache."""

    facts: dict[str, str]
    """Of the namespace, in clear."""
    shape: Shape
    makers: dict[int, MakeCopier]
    """For each KV group, by its number, what makes its copiers."""
    kernels: Kernels


def register_flat(tensor: Any, llm_args: Any, version: str, ranks: int, settings: Settings) -> Registration:
    """A KV cache of one tensor. Raises GeometryError or ConfigError for what cannot be served."""
    check_flat(f"{getattr(llm_args.kv_cache_config, 'dtype', '')} {tensor.dtype}")
    tokens = int(llm_args.kv_cache_config.tokens_per_block)
    return _register([flat_group(tensor)], tokens, llm_args, version, ranks, settings)


def register_layout(layout: Any, llm_args: Any, version: str, ranks: int, settings: Settings) -> Registration:
    """A KV cache of pools, described for each layer group. Raises GeometryError or ConfigError, as above."""
    import torch

    groups = layout_groups(layout, torch.uint8)
    return _register(groups, int(layout.tokens_per_block), llm_args, version, ranks, settings)


def _register(
    groups: Sequence[PageGroup], tokens_per_block: int, llm_args: Any, version: str, ranks: int, settings: Settings
) -> Registration:
    from lmcache.engines.staging import Device

    device = _device(groups)
    staged = settings.staging or device.type != "cpu"
    facts = namespace_facts(llm_args, version, settings.weights_id, ranks) | page_facts(groups)
    return Registration(
        facts | {"device": device.type},
        shape_of(groups, tokens_per_block, ranks),
        {number: (_staged if staged else _direct)(group) for number, group in enumerate(groups)},
        Device(device) if staged else NoKernels(),
    )


def _device(groups: Sequence[PageGroup]) -> Any:
    devices = {tensor.device for group in groups for tensor in group.tensors}
    if len(devices) > 1:
        raise ConfigError(
            f"the KV cache of this worker is spread over {sorted(map(str, devices))}",
            remedy="run without the connector",
        )
    return devices.pop()


def _direct(group: PageGroup) -> MakeCopier:
    """Pages in memory that the CPU reaches: straight between them and the arena."""
    from lmcache.engines.storage_bytes import StorageBytes

    storages = StorageBytes()
    pages = [
        page_array(storages.of(tensor), view, group.blocks)
        for tensor, view in zip(group.tensors, group.views, strict=True)
    ]
    return functools.partial(Copier, Pages(pages))


def _staged(group: PageGroup) -> MakeCopier:
    """Pages on an accelerator."""
    from lmcache.engines.way_choice import staged_maker

    return staged_maker(group.tensors, group.views, group.blocks)
