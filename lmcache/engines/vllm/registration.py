"""What a worker finds out when vLLM registers its KV caches. Imports torch."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import vllm

from lmcache.engines.copy import Copier, Pages
from lmcache.engines.copying import Kernels, MakeCopier, NoKernels, PageView, page_array
from lmcache.engines.staging import Device
from lmcache.engines.storage_bytes import StorageBytes
from lmcache.engines.vllm.describe import (
    SpecGroup,
    build_geometry,
    cached_layers,
    page_view,
    spec_facts,
)
from lmcache.engines.vllm.identity import device_facts, namespace_facts, page_facts
from lmcache.engines.vllm.settings import Settings
from lmcache.engines.way_choice import staged_maker
from lmcache.errors import ConfigError
from lmcache.geometry.groups import Geometry


@attrs.frozen
class Registration:
    """What a worker knows once it has seen its KV caches."""

    facts: dict[str, str]
    """Of the namespace, in clear."""
    geometry: Geometry
    makers: dict[int, MakeCopier]
    """For each cached group, by its number, what makes its copiers."""
    kernels: Kernels


def register_pages(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[SpecGroup],
    kv_caches: Mapping[str, torch.Tensor],
    ranks: int,
    settings: Settings,
) -> Registration:
    """Describe the KV caches, prepare to copy them. Raises GeometryError or ConfigError for what cannot be copied."""
    blocks = kv_cache_config.num_blocks
    groups = [without_borrowers(group, kv_caches) for group in groups]
    names = cached_layers(groups, kv_caches)
    views = {name: page_view(name, kv_caches[name], blocks) for name in names}
    geometry = build_geometry(groups, views, ranks, kv_cache_config.cache_hit_alignment_tokens or 0)
    devices = {kv_caches[name].device for name in names}
    if len(devices) > 1:
        raise ConfigError(
            f"the KV caches of this worker are spread over {sorted(map(str, devices))}",
            remedy="run without the connector",
        )
    device = devices.pop()
    facts = (
        namespace_facts(vllm_config, vllm.__version__, settings.weights_id, _backends(vllm_config, names))
        | page_facts([views[name] for name in names], [kv_caches[name] for name in names])
        | spec_facts(groups)
        | device_facts(device.type, _cpu_features())
    )
    staged = settings.staging or device.type != "cpu"
    prepare = staged_maker if staged else _direct
    makers = {
        number: prepare(
            [kv_caches[name] for name in groups[number].layers], [views[name] for name in groups[number].layers], blocks
        )
        for number in geometry.cached_groups
    }
    return Registration(facts, geometry, makers, Device(device) if staged else NoKernels())


def without_borrowers(group: SpecGroup, kv_caches: Mapping[str, torch.Tensor]) -> SpecGroup:
    """Leave out layers that read another one's pages: vLLM adds them to its groups once it has made the tensors."""
    owners: dict[tuple[int, int], str] = {}
    for name in group.layers:
        if name in kv_caches:
            owners.setdefault((kv_caches[name].data_ptr(), kv_caches[name].stride(0)), name)
    own = [name for name in group.layers if name not in kv_caches or name in owners.values()]
    return attrs.evolve(group, layers=tuple(own))


def _direct(tensors: Sequence[torch.Tensor], views: Sequence[PageView], blocks: int) -> MakeCopier:
    """Pages in memory that the CPU reaches: straight between them and the arena."""
    storages = StorageBytes()
    arrays = [page_array(storages.of(tensor), view, blocks) for tensor, view in zip(tensors, views, strict=True)]
    return functools.partial(Copier, Pages(arrays))


def _backends(vllm_config: Any, names: Sequence[str]) -> dict[str, str]:
    """The attention backend of each layer; layers that vLLM does not list share another one's cache."""
    modules = vllm_config.compilation_config.static_forward_context
    return {name: modules[name].get_attn_backend().get_name() if name in modules else "shared" for name in names}


def _cpu_features() -> str:
    # the same question that vLLM's CPU attention asks before it chooses how to pack a page
    amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return f"{torch.backends.cpu.get_cpu_capability()} amx={amx}"
