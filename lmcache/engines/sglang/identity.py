"""The facts of an SGLang engine that decide whether its bytes may be shared: its namespace, in clear.

Whatever gives the same tokens other bytes must be in here. What only changes how many pages there are must not, or a
restart with another memory size would find nothing. Imports neither SGLang nor torch.
"""

import functools
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from lmcache.engines.facts import config_digest, digest
from lmcache.engines.sglang.pools import Pool
from lmcache.engines.unchanged import process_beginning
from lmcache.engines.weights import BESIDE_MODEL, folder_identity

log = logging.getLogger(__name__)

OPTIONS = (
    "device",
    "revision",
    "load_format",
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "context_length",
    "json_model_override_args",
    "enable_torch_compile",
    "torchao_config",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
)
"""Of SGLang's arguments, those that may change the KV of a token. Absent ones count as None."""


READ_FROM_MODEL = frozenset(
    {
        *("auto", "safetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes", "layered"),
        *("fastsafetensors", "instanttensor", "runai_streamer", "sharded_state", "presharded"),
    }
)
"""Load formats of SGLang that read the weights from the model's own folder or repository. Others are told where to, or
get them from another process."""


@attrs.frozen
class Model:
    """What a door knows of the model that SGLang serves."""

    path: str
    version: str
    """Of SGLang."""
    options: Mapping[str, str] = attrs.field(factory=dict)
    config: Mapping[str, Any] = attrs.field(factory=dict)
    """The model's configuration, as the model's files have it."""
    commit: str = ""
    """Of the model hub, if that is where it came from."""
    load_format: str = "auto"
    """How its weights are read."""
    lora: bool = False
    """Whether SGLang may serve LoRAs."""
    draft: str = ""
    """Path of the model that drafts, if there is one whose KV is cached, too."""


def read_model(args: Any, version: str, config: Any) -> Model:
    """Read SGLang's `ServerArgs` and the Hugging Face configuration that it loaded."""
    load_format = getattr(args, "load_format", "auto")
    return Model(
        path=str(args.model_path),
        version=version,
        options={name: str(getattr(args, name, None)) for name in OPTIONS},
        config=config.to_dict() if config is not None else {},
        commit=str(getattr(config, "_commit_hash", None) or ""),
        load_format=str(getattr(load_format, "value", load_format)),
        lora=bool(getattr(args, "enable_lora", None) or getattr(args, "lora_paths", None)),
        draft=str(getattr(args, "speculative_draft_model_path", None) or ""),
    )


def namespace_facts(model: Model, pools: Sequence[Pool], layers: str, device: str, weights_id: str) -> dict[str, str]:
    """Everything but geometry. `layers` are the model's layers that this rank holds, `device` the kind of device."""
    facts = {
        "engine": "sglang",
        "engine.version": model.version,
        "model": weights_id or model.path,
        "model.weights": weights_identity(model, weights_id),
        "model.config": config_digest(model.config),
        "model.layers": layers,
        "device": device + (f" {platform.machine()}" if device == "cpu" else ""),
    }
    facts |= {f"option.{name}": value for name, value in model.options.items() if value not in ("None", "")}
    facts |= {f"pool.{pool.name}": pool.facts for pool in pools}
    if model.lora:
        # SGLang names a LoRA by an id that does not follow its weights, and tells its caches nothing else of it
        facts["lora"] = f"of one run, {run_identity()}"
    return facts


def weights_identity(model: Model, weights_id: str) -> str:
    """What tells these weights from any others, given by the user, by the model hub, or read from the files.

    Where none of these is to be had, a name for this run of the engine: then its entries are shared with no other.
    """
    if weights_id:
        return f"user {weights_id}"
    identities = []
    for path in filter(None, (model.path, model.draft)):
        identity, why = _files_or_commit(path, model)
        if not identity:
            log.warning(
                "lmcache: nothing identifies the weights of %s (%s), so this engine shares its cache with no other, "
                "nor with itself after a restart; set lmcache.weights_id to change that",
                path,
                why,
            )
            return f"run {run_identity()}"
        identities.append(identity)
    return "; ".join(identities)


def _files_or_commit(path: str, model: Model) -> tuple[str, str]:
    """What identifies the weights at `path`, or nothing and why."""
    if model.load_format == "dummy":
        return "", "they are made up at random"
    if model.load_format not in READ_FROM_MODEL:
        return "", f"load format {model.load_format} has them from elsewhere"
    if Path(path).is_dir():
        return folder_identity(path, BESIDE_MODEL, process_beginning())
    if model.commit and path == model.path:
        return f"hub {model.commit}", ""
    return "", "they are neither in a folder nor of a known commit of the model hub"


def updated_facts(updates: int, clears: int = 0) -> dict[str, str]:
    """What a namespace gets besides once the weights were exchanged in a running engine: nobody else has these.

    `clears` is how often the engine was told to forget what is stored.
    """
    if not updates and not clears:
        return {}
    return {"changed": f"weights {updates} times, cleared {clears} times, in run {run_identity()}"}


@functools.cache
def run_identity() -> str:
    """A name for this run of the engine that all of its ranks come to: they have one parent, which starts once."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    began = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    return digest([boot, str(os.getppid()), began])
