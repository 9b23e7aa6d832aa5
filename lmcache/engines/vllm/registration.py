"""What a worker finds out when vLLM registers its KV caches. Imports torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import vllm

from lmcache.engines.copy import Pages
from lmcache.engines.vllm.describe import SpecGroup, build_geometry, cached_layers, page_array, page_view
from lmcache.engines.vllm.identity import device_facts, namespace_facts, page_facts
from lmcache.engines.vllm.views import StorageBytes
from lmcache.geometry.groups import Geometry


def register_pages(
    vllm_config: Any,
    kv_cache_config: Any,
    groups: Sequence[SpecGroup],
    kv_caches: Mapping[str, torch.Tensor],
    ranks: int,
    weights_id: str,
) -> tuple[dict[str, str], Geometry, dict[int, Pages]]:
    """The namespace's facts, the geometry, and the pages of each cached group, by group number.

    Raises GeometryError or ConfigError for KV caches that cannot be copied.
    """
    blocks = kv_cache_config.num_blocks
    names = cached_layers(groups, kv_caches)
    views = {name: page_view(name, kv_caches[name], blocks) for name in names}
    geometry = build_geometry(groups, views, ranks, kv_cache_config.cache_hit_alignment_tokens or 0)
    storages = StorageBytes()
    arrays = {name: page_array(storages.of(name, kv_caches[name]), views[name], blocks) for name in names}
    pages = {number: Pages([arrays[name] for name in groups[number].layers]) for number in geometry.cached_groups}
    facts = (
        namespace_facts(vllm_config, vllm.__version__, weights_id, _backends(vllm_config, names))
        | page_facts([views[name] for name in names], [kv_caches[name] for name in names])
        | device_facts(kv_caches[names[0]].device.type, _cpu_features())
    )
    return facts, geometry, pages


def _backends(vllm_config: Any, names: Sequence[str]) -> dict[str, str]:
    """The attention backend of each layer; layers that vLLM does not list share another one's cache."""
    modules = vllm_config.compilation_config.static_forward_context
    return {name: modules[name].get_attn_backend().get_name() if name in modules else "shared" for name in names}


def _cpu_features() -> str:
    # the same question that vLLM's CPU attention asks before it chooses how to pack a page
    amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return f"{torch.backends.cpu.get_cpu_capability()} amx={amx}"
