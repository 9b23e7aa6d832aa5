"""The facts of a TensorRT-LLM engine that decide whether its bytes may be shared: its namespace, in clear.

Whatever gives the same tokens other bytes must be in here. What only changes how many blocks there are must not, or a
restart with another memory size would find nothing.
"""

import logging
import secrets
from pathlib import Path
from typing import Any

from lmcache.engines.unchanged import process_beginning
from lmcache.engines.weights import BESIDE_MODEL, folder_identity
from lmcache.errors import ConfigError

log = logging.getLogger(__name__)

LAYOUT = "trtllm 1"
"""Raised when pages come to be cut into objects in another way."""

BESIDE = (*BESIDE_MODEL, "config.json", "hf_quant_config.json")
"""What decides, besides the weights, what a model computes. Hashed as a whole."""


def namespace_facts(llm_args: Any, version: str, weights_id: str, ranks: int) -> dict[str, str]:
    """Everything but the pages themselves. Raises ConfigError where several ranks could not agree on the weights."""
    cache = getattr(llm_args, "kv_cache_config", None)
    return {
        "engine": "trtllm",
        "engine.version": version,
        "layout": LAYOUT,
        "model": weights_id or str(llm_args.model),
        "model.weights": weights_identity(llm_args, weights_id, ranks),
        "model.dtype": str(getattr(llm_args, "dtype", None)),
        "model.quantization": str(getattr(llm_args, "quant_config", None)),
        "model.load_format": _load_format(llm_args),
        # some rotary embeddings scale with the longest prompt that the engine was started for
        "model.max_len": str(getattr(llm_args, "max_seq_len", None)),
        "kv.dtype": str(getattr(cache, "dtype", None)),
        "attention.backend": str(getattr(llm_args, "attn_backend", None)),
        "parallel.tensor": str(getattr(llm_args, "tensor_parallel_size", 1)),
        "parallel.attention_dp": str(bool(getattr(llm_args, "enable_attention_dp", False))),
    }


def weights_identity(llm_args: Any, weights_id: str, ranks: int) -> str:
    """What tells these weights from any others, given by the user or read from the files.

    Where neither is to be had, something that was never used before: then its entries are shared with no other engine.
    Several ranks have no way to agree on that, so there it is a ConfigError.
    """
    if weights_id:
        return f"user {weights_id}"
    load_format = _load_format(llm_args)
    why = "they are made up at random" if load_format == "dummy" else f"load format {load_format} may read others"
    if load_format == "auto":
        folder = str(getattr(llm_args, "model", ""))
        why = f"{folder} is no folder"
        if Path(folder).is_dir():
            found, why = folder_identity(folder, BESIDE, process_beginning())
            if found:
                return found
    if ranks > 1:
        raise ConfigError(
            f"nothing identifies the weights of {getattr(llm_args, 'model', None)}: {why}",
            remedy="set LMCACHE_WEIGHTS_ID to a word that no other weights have",
        )
    log.warning(
        "lmcache: nothing identifies the weights of %s (%s), so this engine shares its cache with no other, nor with "
        "itself after a restart; set LMCACHE_WEIGHTS_ID to change that",
        getattr(llm_args, "model", None),
        why,
    )
    return f"engine {secrets.token_hex(16)}"


def _load_format(llm_args: Any) -> str:
    load_format = getattr(llm_args, "load_format", "auto")
    # the values of TensorRT-LLM's own enum are numbers
    return str(getattr(load_format, "name", load_format)).lower()
