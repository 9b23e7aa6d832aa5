"""LoRAs that change a tiny Llama's answers."""

import array
import json
import random
import struct
from pathlib import Path

RANK = 8
LAYERS = 4
MODULES = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (256, 128), "self_attn.v_proj": (256, 128)}
"""By name: how many numbers go in and out."""
SCALE = 0.4
"""Of the weights: large enough that no answer is the model's own."""


def make_lora(folder: Path, seed: int) -> Path:
    """Write a LoRA of `lmcache.engines.vllm.tiny_models`' llama, with weights from `seed`, over what is in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    header: dict[str, object] = {}
    body = bytearray()
    for layer in range(LAYERS):
        for module, (ins, outs) in MODULES.items():
            for side, shape in (("A", (RANK, ins)), ("B", (outs, RANK))):
                start = len(body)
                body += array.array("f", [generator.gauss(0, SCALE) for _ in range(shape[0] * shape[1])]).tobytes()
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(body)]}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": [module.rpartition(".")[2] for module in MODULES],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
