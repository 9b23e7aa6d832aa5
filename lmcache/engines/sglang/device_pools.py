"""The pools that SGLang's attention reads, as pools of ours: for the linker. Imports torch, never SGLang."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from lmcache.engines.copy import Copier, Pages
from lmcache.engines.copying import Kernels, MakeCopier, NoKernels, PageView, page_array
from lmcache.engines.sglang.pools import Pool
from lmcache.engines.staging import Device
from lmcache.engines.storage_bytes import StorageBytes
from lmcache.engines.way_choice import staged_maker
from lmcache.errors import ConfigError, GeometryError

MHA = frozenset({"MHATokenToKVPool"})
LATENT = frozenset({"MLATokenToKVPool", "DSATokenToKVPool"})
SCALES = ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "native_v_scale_buffer", "kv_scale_buffer")

KNOWN = "plain MHA, MLA and DSA pools, SWAKVPool of those, and HybridLinearKVPool with its states"


def device_pools(kvcache: Any, states: Any, page_size: int, *, staging: bool) -> list[Pool]:
    """Describe SGLang's KV cache, and the states beside it (`mamba_pool`, or None) of a model that has some.

    By exact class: SGLang derives pools that keep scales, shards or other index spaces beside their tensors from plain
    ones. Raises ConfigError for what is not known.
    """
    describe = functools.partial(_attention_pool, page_size=page_size, staging=staging)
    kind = type(kvcache).__name__
    if kind == "SWAKVPool":
        return [describe("kv", kvcache.full_kv_pool), describe("swa", kvcache.swa_kv_pool)]
    if kind == "HybridLinearKVPool":
        if states is None:
            raise ConfigError(f"SGLang keeps no states beside {kind}", remedy="report it, with the model's name")
        return [describe("kv", kvcache.full_kv_pool), _state_pool(states, staging=staging)]
    if states is not None:
        raise ConfigError(f"SGLang keeps states beside {kind}", remedy=f"known are {KNOWN}")
    return [describe("kv", kvcache)]


def kernels_of(kvcache: Any, *, staging: bool) -> Kernels:
    """How to wait for what SGLang has submitted to the device of its KV cache."""
    device = torch.device(getattr(kvcache, "device", "cpu"))
    return Device(device) if staging or device.type != "cpu" else NoKernels()


def _attention_pool(name: str, pool: Any, *, page_size: int, staging: bool) -> Pool:
    kind = type(pool).__name__
    scaled = [attribute for attribute in SCALES if getattr(pool, attribute, None) is not None]
    if kind not in MHA | LATENT or scaled:
        raise ConfigError(
            f"SGLang keeps its {name} pool in {kind}{f' with {scaled[0]}' if scaled else ''}, unknown to the linker",
            remedy=f"use HiCache storage instead (see docs/engines/sglang.md); the linker knows {KNOWN}",
        )
    tensors = list(pool.kv_buffer) if kind in LATENT else [*pool.k_buffer, *pool.v_buffer]
    # the index keys of sparse attention live at the same slots, one row a page
    tensors += getattr(pool, "index_k_with_scale_buffer", None) or []
    slots = int(pool.size) + int(pool.page_size)
    views = [_page_view(name, tensor, slots, page_size) for tensor in tensors]
    blocks = slots // page_size
    layout = getattr(pool, "kv_cache_layout", "")
    return Pool(
        name,
        tuple(view.page_bytes for view in views),
        _maker(tensors, views, blocks, staging=staging),
        kind in LATENT,
        f"{kind} on the device {layout} {_shapes(tensors)}",
    )


def _page_view(name: str, tensor: torch.Tensor, slots: int, page_size: int) -> PageView:
    """Where the pages of a tensor lie, whose rows are slots of a token or whole pages."""
    rows, size = tensor.shape[0], tensor.element_size()
    row_bytes = tensor[0].numel() * size
    per_page = next((each for each in (page_size, 1) if rows == slots // page_size * each), 0)
    if not per_page or not tensor[0].is_contiguous() or (per_page > 1 and tensor.stride(0) * size != row_bytes):
        raise GeometryError(
            f"SGLang's {name} pool has a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} for "
            f"{slots} slots in pages of {page_size}",
            remedy="report it: this SGLang lays out its KV cache in a way that lmcache does not know",
        )
    stride = tensor.stride(0) * size * per_page
    return PageView(tensor.storage_offset() * size, stride, row_bytes * per_page)


def _state_pool(pool: Any, *, staging: bool) -> Pool:
    """States of recurrent layers: one slot is one snapshot, of all layers."""
    cache = pool.mamba_cache
    tensors = [layer for state in (cache.temporal, *cache.conv) if state.numel() for layer in state]
    views = [
        PageView(t.storage_offset() * t.element_size(), t.stride(0) * t.element_size(), t[0].numel() * t.element_size())
        for t in tensors
    ]
    return Pool(
        "mamba",
        tuple(view.page_bytes for view in views),
        _maker(tensors, views, min(len(t) for t in tensors), staging=staging),
        replicated=False,
        facts=f"{type(pool).__name__} on the device {_shapes(tensors)}",
    )


def _maker(tensors: Sequence[torch.Tensor], views: Sequence[PageView], blocks: int, *, staging: bool) -> MakeCopier:
    if staging or tensors[0].device.type != "cpu":
        return staged_maker(tensors, views, blocks)
    storages = StorageBytes()
    arrays = [page_array(storages.of(tensor), view, blocks) for tensor, view in zip(tensors, views, strict=True)]
    return functools.partial(Copier, Pages(arrays))


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(dict.fromkeys(f"{t.dtype} {list(t.shape[1:])} {list(t.stride()[1:])}" for t in tensors))
