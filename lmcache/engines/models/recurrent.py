"""Hybrids: models that mix attention with layers that keep one state a sequence.

With prefix caching, vLLM takes snapshots of the states at block ends (mode `align`). It makes the blocks so long that a
block of keys and values weighs at least as much as a state, and pads the states to that.
"""

import math
from collections.abc import Mapping, Sequence

import attrs

from lmcache.engines.models.attention import FULL, heads
from lmcache.engines.models.latent import index_keys, latent, sparse_latent
from lmcache.engines.models.layers import BYTES, CacheLayer, Heads, Latent, Layers, Ring, State
from lmcache.engines.models.running import PLAIN, Running, model_dtype
from lmcache.engines.models.source import ModelConfig
from lmcache.errors import ConfigError

LINEAR = "linear_attention"

MLA_STEP = 128
"""Tokens that vLLM's blocks of latents are a multiple of beside states."""

POOL_PAGE = 32
"""Pooled index keys that the kernels take as a page."""

FLASH_KDA_SIZE = 128
"""Head size that the FlashKDA kernels take; they can take snapshots inside a prefill, at multiples of 16 tokens."""
FLASH_KDA_ALIGNMENT = 16


def gated_delta(config: ModelConfig, running: Running) -> Layers:
    """Gated delta net in three layers of four, full attention in the last (Qwen3-Next, Qwen3.5)."""
    state = State(
        0,
        _delta_shapes(config, running),
        (model_dtype(config), PLAIN.get(config.text("mamba_ssm_dtype", ""), model_dtype(config))),
    )
    step = config.integer("full_attention_interval", default=4)
    types = config.strings("layer_types") or [LINEAR if (n + 1) % step else FULL for n in range(config.layers)]
    keys = heads(config, running)
    block = _block_for(state, keys, running.block())
    names = {LINEAR: "linear_attn", FULL: "self_attn.attn"}
    return Layers(_mixed(config, types, names, {LINEAR: _aligned(state, keys, block), FULL: _of(keys, block)}))


def _delta_shapes(config: ModelConfig, running: Running) -> tuple[tuple[int, ...], ...]:
    key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    key_size, value_size = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    running.share(config, key_heads, "key heads of linear attention")
    channels = 2 * key_size * key_heads + value_size * value_heads
    return (
        (config.integer("linear_conv_kernel_dim") - 1, running.share(config, channels, "convolution channels")),
        (running.share(config, value_heads, "value heads of linear attention"), value_size, key_size),
    )


def glm_flash(config: ModelConfig, running: Running) -> Layers:
    """GLM-5.3-Flash: delta attention (KDA), and every fourth layer latents picked by an indexer of pooled keys.

    The keys of the pool that is still being filled are scratch: a ring for each request.
    """
    running.share(config, config.integer("num_attention_heads"))
    types = config.strings("layer_types") or ["" if n % 4 == 3 else LINEAR for n in range(config.layers)]
    types = [LINEAR if each == LINEAR else FULL for each in types]
    pool = config.integer("index_kpool", default=16)
    vectors = sparse_latent(config, running, 0)
    linear = config.part("linear_attn_config")
    state = kda_state(
        config,
        running,
        config.integer("linear_num_heads", default=linear.integer("num_heads", default=64)),
        config.integer("linear_head_dim", default=linear.integer("head_dim", default=128)),
        config.integer("linear_conv_kernel_dim", default=linear.integer("short_conv_kernel_size", default=4)),
    )
    step = pool * POOL_PAGE
    block = _block_for(state, vectors, math.lcm(running.block_size or step, step))
    state = _aligned(state, vectors, block)
    layers: list[CacheLayer] = []
    for number, kind in enumerate(types):
        name = f"model.layers.{number}.self_attn"
        if kind == LINEAR:
            layers.append(CacheLayer(name, state))
        else:
            layers += _pooled_layer(config, name, attrs.evolve(vectors, block_size=block, leader=True), pool)
    return Layers(tuple(layers), blocks_outermost=True)


def _pooled_layer(config: ModelConfig, name: str, vectors: Latent, pool: int) -> list[CacheLayer]:
    keys = attrs.evolve(index_keys(config, vectors.block_size), tokens_per_state=pool)
    tail = Ring(
        pool,
        2,
        config.integer("index_head_dim"),
        "bfloat16",
        "index keys of the pool that is still being filled (kpool tail)",
        sharded=False,
    )
    return [
        CacheLayer(f"{name}.indexer.k_cache", keys),
        CacheLayer(f"{name}.indexer.tail_cache", tail),
        CacheLayer(f"{name}.attn", vectors),
    ]


def kda_state(config: ModelConfig, running: Running, count: int, size: int, kernel: int) -> State:
    """What Kimi Delta Attention keeps: three short convolutions, and a matrix for each head in float32."""
    own = running.share(config, count, "heads of linear attention")
    fast = size == FLASH_KDA_SIZE and model_dtype(config) == "bfloat16"
    return State(
        0,
        ((kernel - 1, 3 * own * size), (own, size, size)),
        (model_dtype(config), "float32"),
        checkpoints=int(fast),
        checkpoint_alignment=FLASH_KDA_ALIGNMENT if fast else 0,
    )


def granite(config: ModelConfig, running: Running) -> Layers:
    """Mamba 2 in most layers, full attention in a few (Granite 4)."""
    kinds = {"mamba": LINEAR, "attention": FULL, LINEAR: LINEAR, FULL: FULL}
    types = [kinds.get(each, each) for each in config.strings("layer_types") or [LINEAR] * config.layers]
    inner, count = config.integer("mamba_expand") * config.integer("hidden_size"), config.integer("mamba_n_heads")
    size = inner // count if config.values.get("mamba_d_head") == "auto" else config.integer("mamba_d_head")
    state = _mamba2_state(
        config,
        running,
        inner=inner,
        count=count,
        size=size,
        groups=config.integer("mamba_n_groups"),
        states=config.integer("mamba_d_state"),
        kernel=config.integer("mamba_d_conv"),
        dtype=model_dtype(config),
    )
    return _mamba2_layers(config, running, types, {LINEAR: "mixer", FULL: "self_attn.attn"}, state)


def nemotron_h(config: ModelConfig, running: Running) -> Layers:
    """Mamba 2 (`M`), full attention (`*`) and layers without a cache, as one pattern says."""
    pattern = config.text("hybrid_override_pattern", "")
    if not pattern:
        raise ConfigError(f"{config.path} does not say hybrid_override_pattern", remedy="give the file that vLLM loads")
    types = [{"M": LINEAR, "*": FULL}.get(letter, "") for letter in pattern]
    count, size = config.integer("mamba_num_heads"), config.integer("mamba_head_dim")
    state = _mamba2_state(
        config,
        running,
        inner=count * size,
        count=count,
        size=size,
        groups=config.integer("n_groups"),
        states=config.integer("ssm_state_size"),
        kernel=config.integer("conv_kernel"),
        dtype=PLAIN.get(config.text("mamba_ssm_cache_dtype", "float32"), "float32"),
    )
    return _mamba2_layers(config, running, types, {LINEAR: "mixer", FULL: "mixer.attn"}, state)


def _mamba2_state(
    config: ModelConfig,
    running: Running,
    *,
    inner: int,
    count: int,
    size: int,
    groups: int,
    states: int,
    kernel: int,
    dtype: str,
) -> State:
    # groups that do not divide are repeated, so that each rank has what its heads need
    groups += 0 if groups % running.ranks == 0 else running.ranks - groups
    channels = running.share(config, inner + 2 * groups * states, "convolution channels")
    own = running.share(config, count, "Mamba heads")
    return State(0, ((kernel - 1, channels), (own, size, states)), (model_dtype(config), dtype))


def _mamba2_layers(
    config: ModelConfig, running: Running, types: Sequence[str], names: Mapping[str, str], state: State
) -> Layers:
    keys = heads(config, running)
    block = _block_for(state, keys, running.block())
    return Layers(_mixed(config, types, names, {LINEAR: _aligned(state, keys, block), FULL: _of(keys, block)}))


def kimi_linear(config: ModelConfig, running: Running) -> Layers:
    """Kimi Delta Attention in three layers of four, latent attention in the last."""
    running.share(config, config.integer("num_attention_heads"))
    linear = config.part("linear_attn_config")
    numbers = linear.integers("kda_layers") or []
    types = [LINEAR if n + 1 in numbers else FULL for n in range(config.layers)]
    kernel = linear.integer("short_conv_kernel_size")
    state = kda_state(config, running, linear.integer("num_heads"), linear.integer("head_dim"), kernel)
    state = attrs.evolve(state, checkpoints=0, checkpoint_alignment=0)
    vectors = latent(config, running, 0)
    block = _block_for(state, vectors, max(MLA_STEP, running.block(64)))
    names = {LINEAR: "self_attn", FULL: "self_attn"}
    return Layers(_mixed(config, types, names, {LINEAR: _aligned(state, vectors, block), FULL: _of(vectors, block)}))


# --------------------------------------------------------------------------------------------- blocks that hold a state


def _block_for(state: State, attention: Heads | Latent, step: int) -> int:
    """Tokens of a block: the least multiple of `step` at which its keys and values weigh as much as a state."""
    return step * math.ceil(state.content_bytes / (step * _token_bytes(attention)))


def _token_bytes(attention: Heads | Latent) -> int:
    """What vLLM counts for a token here: never a packed format."""
    elements = 2 * attention.heads * attention.size if isinstance(attention, Heads) else attention.size
    return elements * BYTES[attention.dtype]


def _aligned(state: State, attention: Heads | Latent, block: int) -> State:
    """`state` in blocks of that many tokens, padded to the weight of their keys and values."""
    page = block * _token_bytes(attention)
    return attrs.evolve(state, block_size=block, padded=page if page > state.content_bytes else 0)


def _of(attention: Heads | Latent, block: int) -> Heads | Latent:
    return attrs.evolve(attention, block_size=block)


def _mixed(
    config: ModelConfig, types: Sequence[str], names: Mapping[str, str], specs: Mapping[str, Heads | Latent | State]
) -> tuple[CacheLayer, ...]:
    """One layer for each word of `types`; an empty word is a layer that keeps nothing. Raises ConfigError."""
    unknown = set(types) - specs.keys() - {""}
    if unknown:
        raise ConfigError(
            f"{config.path} has layers of the type {unknown.pop()!r}, which {config.architecture} does not",
            remedy="start the engine and ask it with --server",
        )
    return tuple(CacheLayer(f"model.layers.{n}.{names[kind]}", specs[kind]) for n, kind in enumerate(types) if kind)
