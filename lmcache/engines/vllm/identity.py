"""The facts of a vLLM engine that decide whether its bytes may be shared: its namespace, in clear. Worker process.

Whatever gives the same tokens other bytes must be in here. What only changes how many blocks there are must not, or a
restart with another memory size would find nothing.
"""

import hashlib
import json
import logging
import os
import platform
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcache.engines.vllm.describe import PageView

log = logging.getLogger(__name__)

SAMPLE_BYTES = 256
"""Read from the middle of every tensor of a safetensors file: any training step changes nearly all of them."""
SAMPLES = 64
"""Places looked at in a weights file of another format."""
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")

_HEADER = struct.Struct("<Q")


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
        "model.config": _config_digest(model.hf_config),
        "model.dtype": str(model.dtype),
        "model.quantization": str(model.quantization),
        # some rotary embeddings scale with the longest prompt that the engine was started for
        "model.max_len": str(model.max_model_len),
        "kv.dtype": str(cache.cache_dtype),
        "kv.layout": str(getattr(cache, "kv_cache_layout", None)),
        "attention.backends": ", ".join(sorted(set(layers.values()))),
        "attention.layers": _digest(f"{position} {name}" for position, name in enumerate(layers.values())),
        "parallel.tensor": str(vllm_config.parallel_config.tensor_parallel_size),
    }
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None:
        facts["draft.model"] = str(draft.model)
        facts["draft.weights"] = weights_identity(vllm_config, draft, "")
        facts["draft.config"] = _config_digest(draft.hf_config)
    return facts


def page_facts(views: Sequence[PageView], tensors: Sequence[Any]) -> dict[str, str]:
    """What the bytes inside a page are, as far as a tensor tells: element type, shape, order of axes, kernel blocks."""
    shapes = (
        f"{tensor.dtype} {list(tensor.shape[1:])} {list(tensor.stride()[1:])} {view.page_bytes} {view.kernel_blocks}"
        for view, tensor in zip(views, tensors, strict=True)
    )
    return {
        "kv.pages": _digest(shapes),
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
    if vllm_config.load_config.load_format != "dummy":
        if Path(model.model).is_dir():
            digest = digest_files(Path(model.model))
            if digest:
                return f"files {digest}"
        commit = getattr(model.hf_config, "_commit_hash", None)
        if commit:
            return f"hub {commit}"
    log.warning(
        "lmcache: nothing identifies the weights of %s, so this engine shares its cache with no other, nor with itself "
        "after a restart; set lmcache.weights_id in kv_connector_extra_config to change that",
        model.model,
    )
    return f"engine {vllm_config.kv_transfer_config.engine_id}"


def digest_files(folder: Path) -> str:
    """Digest of all weights in `folder`: sizes, headers and samples of every tensor. Empty when there are none."""
    files = sorted(file for pattern in WEIGHT_FILES for file in folder.glob(pattern))
    if not files:
        return ""
    state = hashlib.sha256()
    for file in files:
        state.update(f"{file.name} {file.stat().st_size}\n".encode())
        for sample in _tensor_samples(file) if file.suffix == ".safetensors" else _even_samples(file):
            state.update(sample)
    return state.hexdigest()[:32]


def _tensor_samples(file: Path) -> Iterable[bytes]:
    with file.open("rb") as stream:
        (length,) = _HEADER.unpack(stream.read(_HEADER.size))
        header = stream.read(length)
        yield header
        descriptor, start = stream.fileno(), _HEADER.size + length
        for name, tensor in sorted(json.loads(header).items()):
            if name != "__metadata__":
                first, last = tensor["data_offsets"]
                middle = max(first, (first + last - SAMPLE_BYTES) // 2)
                yield os.pread(descriptor, min(SAMPLE_BYTES, last - middle), start + middle)


def _even_samples(file: Path) -> Iterable[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        for number in range(SAMPLES):
            yield os.pread(stream.fileno(), SAMPLE_BYTES, number * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))


def _config_digest(config: Any) -> str:
    """Digest of a model's configuration, less what only tells where it was read and by which library."""
    content = {
        key: value
        for key, value in config.to_dict().items()
        if key not in ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")
    }
    return _digest([json.dumps(content, sort_keys=True, default=_plain)])


def _plain(value: object) -> str:
    """What JSON does not know, as text; never an address in memory, which differs from process to process."""
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _digest(parts: Iterable[str]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part.encode())
    return state.hexdigest()[:32]
