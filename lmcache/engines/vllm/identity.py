"""The facts of a vLLM engine that decide whether its bytes may be shared: its namespace, in clear. Worker process.

Whatever gives the same tokens other bytes must be in here. What only changes how many blocks there are must not, or a
restart with another memory size would find nothing.
"""

import logging
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache.engines.copying import PageView
from lmcache.engines.facts import config_digest, digest
from lmcache.engines.unchanged import process_beginning
from lmcache.engines.weights import BESIDE_MODEL, folder_identity

log = logging.getLogger(__name__)

READ_FROM_MODEL = frozenset(
    {
        *("auto", "hf", "safetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes"),
        *("fastsafetensors", "instanttensor", "runai_streamer", "runai_streamer_sharded", "sharded_state"),
    }
)
"""Load formats of vLLM that read the weights from the model's own folder or repository. Others are told where to."""


def namespace_facts(
    vllm_config: Any, engine_version: str, weights_id: str, layers: Mapping[str, str]
) -> dict[str, str]:
    """Everything but the pages themselves. `layers` maps each cached layer to the name of its attention backend."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "engine": "vllm",
        "engine.version": engine_version,
        "model": weights_id or str(model.model),
        "model.weights": weights_identity(vllm_config, model, weights_id),
        "model.config": config_digest(model.hf_config.to_dict()),
        "model.dtype": str(model.dtype),
        "model.quantization": str(model.quantization),
        "model.load_format": str(vllm_config.load_config.load_format),
        # some rotary embeddings scale with the longest prompt that the engine was started for
        "model.max_len": str(model.max_model_len),
        "kv.dtype": str(cache.cache_dtype),
        "kv.layout": str(getattr(cache, "kv_cache_layout", None)),
        "kv.recurrent": _recurrent_states(cache),
        "kv.indexer_dtype": str(getattr(getattr(vllm_config, "attention_config", None), "indexer_kv_dtype", None)),
        "attention.backends": ", ".join(sorted(set(layers.values()))),
        "attention.layers": digest(f"{position} {name}" for position, name in enumerate(layers.values())),
        "parallel.tensor": str(vllm_config.parallel_config.tensor_parallel_size),
    }
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None:
        facts["draft.model"] = str(draft.model)
        facts["draft.weights"] = weights_identity(vllm_config, draft, "")
        facts["draft.config"] = config_digest(draft.hf_config.to_dict())
    lora = _lora_rules(getattr(vllm_config, "lora_config", None), model)
    if lora:
        facts["lora"] = lora
    return facts


def _recurrent_states(cache: Any) -> str:
    """How the bytes of a state are to be read, which no tensor tells: vLLM allocates states as plain bytes."""
    names = ("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode")
    layout = os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT")
    return " ".join([*(str(getattr(cache, name, None)) for name in names), str(layout)])


def _lora_rules(lora: Any, model: Any) -> str:
    """What makes this engine apply one LoRA in another way than engines do by default; else nothing.

    Nothing by default, so that requests without a LoRA share with engines that serve none.
    """
    if lora is None:
        return ""
    rules = {
        "dtype": "" if lora.lora_dtype == model.dtype else str(lora.lora_dtype),
        "modules": ", ".join(sorted(getattr(lora, "target_modules", None) or ())),
        "tower": str(getattr(lora, "enable_tower_connector_lora", False) or ""),
        "mixed experts": str(getattr(lora, "enable_mixed_moe_lora_format", False) or ""),
        "shared experts": str(getattr(lora, "enable_moe_shared_loras", False) or ""),
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items() if value)


def page_facts(views: Sequence[PageView], tensors: Sequence[Any]) -> dict[str, str]:
    """What the bytes inside a page are, as far as a tensor tells: element type, shape, order of axes, kernel blocks."""
    shapes = (
        f"{tensor.dtype} {list(tensor.shape[1:])} {list(tensor.stride()[1:])} {view.page_bytes} {view.kernel_blocks}"
        for view, tensor in zip(views, tensors, strict=True)
    )
    return {
        "kv.pages": digest(shapes),
        "kv.kernel_blocks": ", ".join(sorted({str(view.kernel_blocks) for view in views})),
    }


def device_facts(device: str, cpu_features: str) -> dict[str, str]:
    """The kind of device; on CPU its instruction set too, for attention packs its pages by it."""
    features = f" {platform.machine()} {cpu_features}" if device == "cpu" else ""
    return {"device": device + features}


def weights_identity(vllm_config: Any, model: Any, weights_id: str) -> str:
    """What tells these weights from any others, given by the user, by the model hub, or read from the files.

    Where none of these is to be had, the engine's own id: then its entries are shared with no other engine.
    """
    if weights_id:
        return f"user {weights_id}"
    found, why = _found_weights(vllm_config.load_config.load_format, model)
    if found:
        return found
    log.warning(
        "lmcache: nothing identifies the weights of %s (%s), so this engine shares its cache with no other, nor with "
        "itself after a restart; set lmcache.weights_id in kv_connector_extra_config to change that",
        model.model,
        why,
    )
    return f"engine {vllm_config.kv_transfer_config.engine_id}"


def _found_weights(load_format: Any, model: Any) -> tuple[str, str]:
    """What is to be seen of the weights; where that is nothing certain, empty, and why."""
    load_format, elsewhere = str(load_format), getattr(model, "model_weights", "")
    if load_format == "dummy":
        return "", "they are made up at random"
    if load_format not in READ_FROM_MODEL or elsewhere:
        return "", f"load format {load_format} reads them from elsewhere{f', {elsewhere}' if elsewhere else ''}"
    if Path(model.model).is_dir():
        return folder_identity(str(model.model), BESIDE_MODEL, process_beginning())
    if getattr(model, "hf_config_path", None) not in (None, model.model):
        return "", "the commit that is known is that of hf_config_path"
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        return f"hub {commit}", ""
    return "", "they are neither in a folder nor of a known commit of the model hub"
