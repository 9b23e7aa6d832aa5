"""Tiny models with random weights, so that a real vLLM can prove the cache on any machine.

    python -m lmcache.engines.vllm.tiny_models FOLDER [llama] [dsv3] [gemma3] [gptoss] [qwen3next]

The weights are large enough that answers depend on the whole prompt: with vLLM's `load_format="dummy"` an answer says
next to nothing about the KV it was computed from. There is no tokenizer; prompts are token ids from 3 to 1023.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 1024

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

_HEADS: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 32}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_HEADS,
    },
    "dsv3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        # vLLM's MLA kernels take these sizes only
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "q_lora_rank": 256,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 512,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        **_HEADS,
    },
    "gptoss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "rope_theta": 10000.0,
        },
        **_HEADS,
    },
    "qwen3next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        **_HEADS,
    },
}
"""By name, and what their KV groups are in vLLM:

`llama`      one, full attention
`dsv3`       one, of one latent vector a token (MLA)
`gemma3`     two of a sliding window of 512 tokens, one full; two layers each
`gptoss`     one of a sliding window of 128 tokens, one full; two layers each
`qwen3next`  three recurrent (gated delta net), one full; one layer each
"""


def make_model(folder: Path, name: str, seed: int = 0) -> Path:
    """Write the model `name` below `folder`, unless it is there; returns its folder. Needs torch and transformers."""
    target = folder / name
    if (target / "model.safetensors").exists():
        return target
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    target.mkdir(parents=True, exist_ok=True)
    config = target / "config.json"
    text = json.dumps(_COMMON | MODELS[name], indent=1)
    config.write_text(text)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target), dtype=torch.bfloat16)
    model.save_pretrained(target)
    config.write_text(text)  # saving rewrote it in the words of whatever transformers is installed
    return target


def main(arguments: Sequence[str]) -> None:
    """Make the models that the command line names, or all."""
    folder, *names = arguments
    for name in names or MODELS:
        print(make_model(Path(folder), name))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
