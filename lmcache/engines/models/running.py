"""How an engine would be started: what its command line says about the KV, and what follows for one rank."""

import attrs

from lmcache.engines.models.source import ModelConfig
from lmcache.errors import ConfigError
from lmcache.geometry.groups import MAX_RANKS

PLAIN = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
"""Types of one element, by what a config calls them."""

FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")

KV_DTYPES = ("auto", "bfloat16", "float16", "float32", *FP8)
"""What may be asked for. Packed formats are what `fp8` means to a model that has one."""

DEFAULT_BLOCK = 16
"""Tokens of vLLM's blocks where the attention kernels take them."""

MAX_BLOCK = 1 << 16


@attrs.frozen
class Running:
    """The part of an engine's command line that its KV depends on."""

    ranks: int = 1
    """`--tensor-parallel-size`."""
    kv_dtype: str = "auto"
    """`--kv-cache-dtype`; `float32` stands for a model that runs in float32."""
    block_size: int = 0
    """`--block-size`, in tokens; 0 leaves it to the engine."""

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ConfigError(f"--tensor-parallel-size {self.ranks} is no number of ranks", remedy=f"1 to {MAX_RANKS}")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"--kv-dtype {self.kv_dtype} is unknown", remedy=f"use {', '.join(KV_DTYPES)}")
        if not 0 <= self.block_size <= MAX_BLOCK:
            raise ConfigError(f"--block-size {self.block_size} is no block size", remedy="use 16, 32, 64…")

    @property
    def packed(self) -> bool:
        """Whether FP8 was asked for."""
        return self.kv_dtype in FP8

    def block(self, step: int = DEFAULT_BLOCK) -> int:
        """Tokens of a block, for kernels that take multiples of `step`. Raises ConfigError for any other."""
        if self.block_size % step:
            raise ConfigError(
                f"--block-size {self.block_size} is not a multiple of {step}, which the model's attention kernels take",
                remedy=f"use {step}, {2 * step}, {3 * step}…, or leave it to the engine",
            )
        return self.block_size or max(step, DEFAULT_BLOCK)

    def element(self, config: ModelConfig) -> str:
        """The type of plain keys, values and latents."""
        if self.kv_dtype == "auto":
            return "uint8" if _checkpoint_says_fp8(config) else model_dtype(config)
        return "uint8" if self.packed else self.kv_dtype

    def share(self, config: ModelConfig, heads: int, what: str = "attention heads") -> int:
        """`heads` of the model that fall to one rank. Raises ConfigError where they cannot be split evenly."""
        if heads % self.ranks:
            even = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ConfigError(
                f"--tensor-parallel-size {self.ranks} does not divide the {heads} {what} of {config.name}",
                remedy=f"use {even}",
            )
        return heads // self.ranks

    def kv_heads(self, config: ModelConfig) -> int:
        """KV heads on one rank: with more ranks than heads, several ranks hold the same one."""
        heads = config.integer("num_attention_heads")
        self.share(config, heads)
        kept = config.integer("num_key_value_heads", default=heads)
        if kept % self.ranks and self.ranks % kept:
            raise ConfigError(
                f"--tensor-parallel-size {self.ranks} neither divides the {kept} KV heads of {config.name}, nor is it "
                "a multiple of them",
                remedy="use " + ", ".join(str(n) for n in range(1, heads + 1) if not heads % n and _fits(kept, n)),
            )
        return max(1, kept // self.ranks)


def _fits(heads: int, ranks: int) -> bool:
    return heads % ranks == 0 or ranks % heads == 0


def model_dtype(config: ModelConfig) -> str:
    """What the model computes in: vLLM takes bfloat16 for models that say float32, or nothing."""
    told = PLAIN.get(config.text("dtype", config.text("torch_dtype", "bfloat16")), "bfloat16")
    return "bfloat16" if told == "float32" else told


def _checkpoint_says_fp8(config: ModelConfig) -> bool:
    """Whether the checkpoint brings scales for an FP8 KV cache, which vLLM then uses unasked."""
    quantization = config.part("quantization_config")
    for part in (quantization, quantization.part("quantization")):
        scheme = part.values.get("kv_cache_scheme")
        if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
            return True
        if part.text("kv_cache_quant_algo", "").upper() == "FP8":
            return True
    return False
