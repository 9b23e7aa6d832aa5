"""A model's KV groups before anybody starts it, as vLLM's own code sorts them, in a process of its own.

    python -m lmcache.engines.vllm.model_groups CONFIG_JSON RANKS KV_DTYPE BLOCK_SIZE

prints one JSON object: vLLM's version, the geometry that the connector would register, and the layers of each group.
The layers come from our table of architectures; from there on everything is vLLM's and the connector's: spec objects,
groups, the placement of pages, and views of memory that is never there (torch's device `meta`).
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec

from lmcache.engines.models.layers import CacheLayer, Heads, Latent, Layers, Ring, State
from lmcache.engines.models.running import Running
from lmcache.engines.models.source import read_config
from lmcache.engines.models.table import layers_of
from lmcache.errors import ConfigError
from lmcache.geometry.groups import Geometry

PATIENCE = 300.0
"""Seconds: importing vLLM takes up to 90 on a busy machine."""

BLOCKS = 3
"""Of the cache whose views are looked at; any number would do."""


@attrs.frozen
class Grouped:
    """vLLM's answer."""

    version: str
    geometry: Geometry
    layers: tuple[tuple[str, ...], ...]
    """Names, for each group, scratch included."""


def vllm_is_installed() -> bool:
    """Whether there is one to ask; found out without importing it."""
    return importlib.util.find_spec("vllm") is not None


def ask_vllm(path: Path, running: Running) -> Grouped:
    """Start this module beside the caller, who never imports vLLM. Raises ConfigError when vLLM does not know."""
    words = [str(path), str(running.ranks), running.kv_dtype, str(running.block_size)]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            check=False,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"vLLM did not answer within {PATIENCE:g} s", remedy=_OTHER_WAY) from None
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"the vLLM that is installed could not sort the layers of {path}: {last}", remedy=_OTHER_WAY)
    return msgspec.json.decode(done.stdout, type=Grouped)


_OTHER_WAY = "use --via table, which needs no vLLM"


def group_with_vllm(layers: Layers, ranks: int) -> Grouped:
    """Have vLLM sort a model's layers. Imports vLLM, which takes many seconds."""
    import vllm
    from vllm.config import VllmConfig
    from vllm.v1.core import kv_cache_utils as utils

    from lmcache.engines.vllm.adapter import lmcache_classify_kv_spec
    from lmcache.engines.vllm.describe import build_geometry, page_view, spec_groups

    specs = {layer.name: vllm_spec(layer) for layer in layers.layers}
    config = VllmConfig()
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.kv_cache_layout = "BLHNC" if layers.blocks_outermost else "LBNHC"
    groups = utils.get_kv_cache_groups(config, dict(specs))
    memory = BLOCKS * utils._pool_bytes_per_block(config, groups)  # noqa: SLF001 - what one block takes, by its own count
    cache = utils.get_kv_cache_config_from_groups(config, groups, memory)
    views = {name: page_view(name, tensor, cache.num_blocks) for name, tensor in _views(cache, config).items()}
    geometry = build_geometry(spec_groups(cache, ranks, lmcache_classify_kv_spec), views, ranks, 0)
    return Grouped(vllm.__version__, geometry, tuple(tuple(group.layer_names) for group in groups))


def _views(cache: Any, config: Any) -> Mapping[str, Any]:
    """Tensors as workers make them, by layer."""
    import torch
    from vllm.v1 import kv_cache_interface as kv

    specs = {
        name: getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        for group in cache.kv_cache_groups
        for name in group.layer_names
    }
    layout = config.cache_config.get_resolved_kv_cache_layout()
    views: dict[str, Any] = {}
    for place in cache.kv_cache_tensors:
        raw = torch.empty(place.size, dtype=torch.int8, device="meta")
        made = kv.create_kv_cache_views(raw, specs[place.layers[0]], cache.num_blocks, layout, place)
        views |= dict(zip(place.layers, made, strict=True))
    return views


def vllm_spec(layer: CacheLayer) -> Any:
    """The spec object that says of a layer what ours says."""
    match layer.spec:
        case Heads():
            return _heads(layer.spec)
        case Latent():
            return _latent(layer.spec)
        case State():
            return _state(layer.spec)
        case Ring():
            return _ring(layer.spec)


def _heads(spec: Heads) -> Any:
    from vllm.v1 import kv_cache_interface as kv

    common = {
        "block_size": spec.block_size,
        "num_kv_heads": spec.heads,
        "head_size": spec.size,
        "dtype": _dtype(spec.dtype),
    }
    if spec.span:
        return kv.ChunkedLocalAttentionSpec(**common, attention_chunk_size=spec.span)
    if spec.window:
        return kv.SlidingWindowSpec(**common, sliding_window=spec.window)
    return kv.FullAttentionSpec(**common)


def _latent(spec: Latent) -> Any:
    from vllm.v1 import kv_cache_interface as kv

    common = {
        "block_size": spec.block_size,
        "num_kv_heads": 1,
        "head_size": spec.size,
        "dtype": _dtype(spec.dtype),
        "tokens_per_state": spec.tokens_per_state,
        "state_content_bytes": spec.state_bytes or None,
        "cache_dtype_str": spec.cache_dtype or None,
        "kv_quant_mode": kv.get_kv_quant_mode(spec.cache_dtype),
        "alignment": spec.alignment if spec.alignment > 1 else None,
        "model_version": spec.version or None,
        "max_tp_shards": 1 if spec.replicated else None,
    }
    if spec.window:
        return kv.SlidingWindowMLASpec(**common, sliding_window=spec.window, bounded_replay=spec.replayed)
    role = kv.SparseCacheRole.INDEXER if spec.indexer else kv.SparseCacheRole.SPARSE
    return kv.MLAAttentionSpec(**common, cache_role=role, is_index_group_leader=spec.leader)


def _state(spec: State) -> Any:
    from vllm.v1 import kv_cache_interface as kv

    return kv.MambaSpec(
        block_size=spec.block_size,
        shapes=spec.shapes,
        dtypes=tuple(_dtype(each) for each in spec.dtypes),
        page_size_padded=spec.padded or None,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=spec.checkpoints,
        prefill_checkpoint_alignment=spec.checkpoint_alignment or None,
    )


def _ring(spec: Ring) -> Any:
    from vllm.v1 import kv_cache_interface as kv

    return kv.CircularBufferSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.heads,
        head_size=spec.size,
        head_size_v=0,
        dtype=_dtype(spec.dtype),
        dcp_sharded=spec.sharded,
    )


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def main(arguments: Sequence[str]) -> None:
    """Answer on standard output; what vLLM prints goes to standard error."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        path, ranks, kv_dtype, block_size = arguments
        running = Running(int(ranks), kv_dtype, int(block_size))
        answers.write(msgspec.json.encode(group_with_vllm(layers_of(read_config(path), running), running.ranks)))


if __name__ == "__main__":
    main(sys.argv[1:])
