"""The table of architectures: which layers a model has, from its `config.json` alone."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lmcache.engines.models import attention, latent, recurrent
from lmcache.engines.models.layers import Layers
from lmcache.engines.models.running import Running
from lmcache.engines.models.source import ModelConfig
from lmcache.errors import ConfigError

Builder = Callable[[ModelConfig, Running], Layers]

ARCHITECTURES: Mapping[str, Builder] = MappingProxyType(
    {
        "LlamaForCausalLM": attention.uniform,
        "MistralForCausalLM": attention.uniform,
        "MixtralForCausalLM": attention.uniform,
        "Qwen2ForCausalLM": attention.qwen,
        "Qwen2MoeForCausalLM": attention.qwen,
        "Qwen3ForCausalLM": attention.qwen,
        "Qwen3MoeForCausalLM": attention.qwen,
        "Gemma2ForCausalLM": attention.gemma2,
        "Gemma3ForCausalLM": attention.gemma3,
        "Gemma3ForConditionalGeneration": attention.gemma3,
        "GptOssForCausalLM": attention.gpt_oss,
        "Llama4ForCausalLM": attention.llama4,
        "Llama4ForConditionalGeneration": attention.llama4,
        "DeepseekV2ForCausalLM": latent.mla,
        "DeepseekV3ForCausalLM": latent.mla,
        "DeepseekV32ForCausalLM": latent.sparse,
        "GlmMoeDsaForCausalLM": latent.sparse,
        "DeepseekV4ForCausalLM": latent.deepseek_v4,
        "DeepseekV41ForCausalLM": latent.deepseek_v41,
        "Glm5NextForCausalLM": recurrent.glm_flash,
        "Glm5NextForConditionalGeneration": recurrent.glm_flash,
        "KimiLinearForCausalLM": recurrent.kimi_linear,
        "Qwen3NextForCausalLM": recurrent.gated_delta,
        "Qwen3_5ForCausalLM": recurrent.gated_delta,
        "Qwen3_5MoeForCausalLM": recurrent.gated_delta,
        "Qwen3_5ForConditionalGeneration": recurrent.gated_delta,
        "Qwen3_5MoeForConditionalGeneration": recurrent.gated_delta,
        "GraniteMoeHybridForCausalLM": recurrent.granite,
        "NemotronHForCausalLM": recurrent.nemotron_h,
    }
)
"""By the name that a `config.json` gives."""


def layers_of(config: ModelConfig, running: Running) -> Layers:
    """What the model keeps, layer by layer, on one rank. Raises ConfigError for a model that is not in the table."""
    builder = ARCHITECTURES.get(config.architecture)
    if builder is None:
        raise ConfigError(
            f"{config.architecture} of {config.path} is not among the architectures that are known: "
            f"{', '.join(ARCHITECTURES)}",
            remedy="start the engine with the connector and ask the server about it: lmcache geometry --server",
        )
    return builder(config, running)
