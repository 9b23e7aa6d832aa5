"""Tiny models with random weights for a real SGLang on CPU.

    python tiny_models.py FOLDER [llama] [other_llama]

The weights are large enough that answers depend on the whole prompt: with `load_format=dummy` an answer says next to
nothing about the KV it was computed from. There is no tokenizer; prompts are token ids from 3 to 511.
"""

import json
import sys
from pathlib import Path

VOCABULARY = 512
HIDDEN, INNER, LAYERS, HEAD, HEADS, KV_HEADS = 64, 128, 3, 16, 4, 2

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def llama(folder: Path, seed: int = 0) -> None:
    """Write a Llama of three layers."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float) -> "torch.Tensor":
        return torch.randn(*shape, generator=generator) * scale

    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN, scale=0.3),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            at + "self_attn.q_proj.weight": random(HEADS * HEAD, HIDDEN, scale=0.3),
            at + "self_attn.k_proj.weight": random(KV_HEADS * HEAD, HIDDEN, scale=0.3),
            at + "self_attn.v_proj.weight": random(KV_HEADS * HEAD, HIDDEN, scale=0.3),
            at + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD, scale=0.3),
            at + "mlp.gate_proj.weight": random(INNER, HIDDEN, scale=0.1),
            at + "mlp.up_proj.weight": random(INNER, HIDDEN, scale=0.1),
            at + "mlp.down_proj.weight": random(HIDDEN, INNER, scale=0.1),
            at + "input_layernorm.weight": torch.ones(HIDDEN),
            at + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA, indent=1))
    save_file(weights, folder / "model.safetensors")


def other_llama(folder: Path) -> None:
    """The same model with other weights."""
    llama(folder, seed=1)


MAKERS = {"llama": llama, "other_llama": other_llama}


if __name__ == "__main__":
    for name in sys.argv[2:] or MAKERS:
        MAKERS[name](Path(sys.argv[1]) / name)
