"""The table of architectures against vLLM itself. Runs in a process of its own, because importing vLLM takes its time.

    python models_probe.py CONFIGS

prints one JSON object about the folder of configs:

    groups    for each config and way to run it: how vLLM groups the layers that our table gives it
    layers    for each config: what the layers of vLLM's own model class say that they keep, and what ours say
"""

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}

import msgspec
import torch

from lmcache.engines.models.running import Running
from lmcache.engines.models.source import read_config
from lmcache.engines.models.table import layers_of
from lmcache.engines.vllm.model_groups import group_with_vllm, vllm_spec
from lmcache.errors import ConfigError

RUNNINGS = (Running(), Running(8), Running(1, "fp8"), Running(2, "auto", 256))

FILLING = {
    "vocab_size": 1024,
    "pad_token_id": 0,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_shared_experts": 1,
    "n_activated_experts": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "qk_nope_head_dim": 448,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
}
"""What model classes want to know beside what the KV depends on; the configs of the tests leave it out."""


def groups(configs: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for folder in sorted(configs.iterdir()):
        for number, running in enumerate(RUNNINGS):
            config = read_config(folder)
            with contextlib.suppress(ConfigError):  # not every model runs in every way; the test asks for the same
                layers = layers_of(config, running)
                found[f"{folder.name} {number}"] = msgspec.to_builtins(group_with_vllm(layers, running.ranks))
    return found


# ------------------------------------------------------------------------------------------- vLLM's own model classes


def layers(configs: Path) -> dict[str, Any]:
    pretend_to_have_a_gpu()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for folder in sorted(configs.iterdir()):
            try:
                block_size, specs = specs_of_model(folder, Path(scratch))
                theirs = {name: facts(spec) for name, spec in specs.items()}
                ours = {
                    layer.name: facts(vllm_spec(layer)) for layer in layers_of(read_config(folder), Running()).layers
                }
                found[folder.name] = {
                    "theirs": list(theirs.items()),
                    "ours": list(ours.items()),
                    "block_size": block_size,
                }
            except Exception:  # noqa: BLE001 - the test is told
                found[folder.name] = {"failed": traceback.format_exc(limit=-6)}
    return found


def pretend_to_have_a_gpu() -> None:
    """Let model classes be made, on memory that is never there, that would not be on a CPU."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models import registry
    from vllm.models.deepseek_v4.nvidia.ops import o_proj
    from vllm.platforms import current_platform
    from vllm.v1.worker.workspace import init_workspace_manager

    kind: Any = type(current_platform)
    select = kind.get_attn_backend_cls

    def sparse_too(cls: Any, *arguments: Any, **named: Any) -> str:
        if any(getattr(each, "use_sparse", False) for each in (*arguments, *named.values())):
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        return str(select(*arguments, **named))

    kind.get_attn_backend_cls = classmethod(sparse_too)
    torch.cuda.Event = torch.cuda.Stream = MagicMock  # type: ignore[assignment,misc]
    torch.accelerator.empty_cache = lambda: None
    # where a CPU computes in bfloat16, vLLM keeps states in float32: a rule of CPUs
    torch.cpu._is_avx512_bf16_supported = lambda: False
    o_proj.compute_fp8_einsum_recipe = lambda *_, **__: ((1, 1, 1), False)
    registry._run_in_subprocess = lambda inspect: inspect()
    init_workspace_manager(torch.device("cpu"))
    sys.meta_path.append(Pretended())
    with free_address() as address:
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, address, 0, "gloo")
            initialize_model_parallel(1, 1)


class Pretended(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that model classes import and that what they keep does not depend on."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in {"torchvision", "cutlass", "cuda"}:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


@contextlib.contextmanager
def free_address() -> Iterator[str]:
    with tempfile.NamedTemporaryFile() as file:
        yield f"file://{file.name}"


def specs_of_model(folder: Path, scratch: Path) -> tuple[int, dict[str, Any]]:
    """What each layer says, and the block size that the platform, here a CPU, then takes."""
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = EngineArgs(
        model=str(filled(folder, scratch)),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        load_format="dummy",
        dtype="bfloat16",
        enable_prefix_caching=False,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
        initialize_model(config)
        found = get_layers_from_vllm_config(config, AttentionLayerBase)  # type: ignore[type-abstract]
        specs = {name: module.get_kv_cache_spec(config) for name, module in found.items()}
        if config.model_config.is_hybrid and not config.model_config.use_mla:
            current_platform.update_block_size_for_backend(config)
    return config.cache_config.block_size, {name: spec for name, spec in specs.items() if spec is not None}


def filled(folder: Path, scratch: Path) -> Path:
    """The config as a text model's, with all that its class wants to know."""
    values = json.loads((folder / "config.json").read_text())
    values |= values.pop("text_config", {})
    values.pop("quantization_config", None)
    values = FILLING | values
    values["architectures"] = [values["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")]
    if values["architectures"] == ["DeepseekV41ForCausalLM"]:
        values = {key: values[key] for key in ("architectures", "vocab_size")} | {
            "model_type": "deepseek_v41",
            "text_config": values,
        }
    if values["architectures"] == ["Glm5NextForCausalLM"]:
        values |= {"mhc": False, "mla_use_nope": True, "indexer_rope_interleave": True}
    target = scratch / folder.name
    target.mkdir()
    (target / "config.json").write_text(json.dumps(values))
    return target


def facts(spec: Any) -> dict[str, str]:
    """What a page holds and how it is shared. Not its block size, which the platform decides, and here is a CPU's."""
    if type(spec).__name__ == "MambaSpec":
        return {"spec": "MambaSpec", "shapes": str(list(map(list, spec.shapes))), "dtypes": str(spec.dtypes)}
    shown = ("tokens_per_state", "sliding_window", "attention_chunk_size", "max_tp_shards", "alignment", "dtype")
    shown += ("model_version", "cache_role", "is_index_group_leader", "dcp_sharded")
    return {
        "spec": type(spec).__name__,
        "state": str(spec.num_heads * spec.state_content_size_bytes),
        **{name: str(getattr(spec, name, "")) for name in shown},
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    configs = Path(sys.argv[1])
    # groups first: for the layers, vLLM is then made to believe in a GPU
    print(json.dumps({"groups": groups(configs), "layers": layers(configs)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
