"""Models whose layers keep one latent vector a token (MLA), with an indexer or without, compressed or not."""

from collections.abc import Iterator

import attrs

from lmcache.engines.models.layers import CacheLayer, Latent, Layers, Ring
from lmcache.engines.models.running import Running
from lmcache.engines.models.source import ModelConfig
from lmcache.errors import ConfigError

MLA_BLOCK = 64
"""Tokens a block that the FlashMLA kernels take."""

PACKED_LATENT = 656
"""Bytes of a 576-element latent in `fp8_ds_mla`: 512 in FP8 with 16 bytes of scales, 64 rotary ones in bfloat16."""

INDEX_SCALE_BLOCK = 128
"""Elements of an index key that share a scale of 4 bytes."""

# DeepSeek V4: https://huggingface.co/deepseek-ai, as vLLM lays its caches out for FlashMLA on Hopper
V4_BLOCK = 256
V4_WINDOW_BLOCK = 64
V41_WINDOW_BLOCK = 32
V4_PACKED = 584
"""Bytes of a 512-element latent: 448 in FP8, 64 rotary ones in bfloat16, 8 bytes of scales."""
V4_ALIGNMENT = 576
V4_STATE_BLOCKS = {4: 4, 128: 8}
"""Tokens a block of compressor states, by how many tokens they compress."""
V41_RING = 8


def mla(config: ModelConfig, running: Running) -> Layers:
    """Multi-head latent attention in every layer (DeepSeek V2, V3)."""
    running.share(config, config.integer("num_attention_heads"))
    spec = latent(config, running, running.block(MLA_BLOCK))
    return Layers(tuple(CacheLayer(f"model.layers.{n}.self_attn.attn", spec) for n in range(config.layers)))


def latent(config: ModelConfig, running: Running, block_size: int) -> Latent:
    """The vector that MLA keeps of each token: compressed keys and values, and a key with the position."""
    size = config.integer("kv_lora_rank") + config.optional("qk_rope_head_dim")
    return Latent(block_size, size, running.element(config))


def sparse(config: ModelConfig, running: Running) -> Layers:
    """Latent attention to the tokens that an indexer picks (DeepSeek V3.2, GLM-5.x). Some layers reuse a pick."""
    running.share(config, config.integer("num_attention_heads"))
    block = running.block(MLA_BLOCK)
    vectors, keys = sparse_latent(config, running, block), index_keys(config, block)
    layers = []
    for number, leads in enumerate(leading_layers(config)):
        name = f"model.layers.{number}.self_attn"
        if leads:
            layers.append(CacheLayer(f"{name}.indexer.k_cache", keys))
        layers.append(CacheLayer(f"{name}.attn", attrs.evolve(vectors, leader=leads)))
    return Layers(tuple(layers))


def sparse_latent(config: ModelConfig, running: Running, block_size: int) -> Latent:
    """The vector as sparse kernels read it: FP8 means a packed format of theirs."""
    plain = latent(config, running, block_size)
    if plain.dtype != "uint8":
        return plain
    return attrs.evolve(plain, state_bytes=PACKED_LATENT, cache_dtype="fp8_ds_mla")


def index_keys(config: ModelConfig, block_size: int) -> Latent:
    """The keys that an indexer compares: FP8 with scales, in every KV dtype."""
    size = config.integer("index_head_dim")
    return Latent(
        block_size, size + size // INDEX_SCALE_BLOCK * 4, "uint8", what="index keys in FP8 with scales", indexer=True
    )


def leading_layers(config: ModelConfig) -> list[bool]:
    """Whether each layer has an indexer of its own; the others attend to what the last one picked."""
    pattern = config.values.get("index_topk_pattern")
    if isinstance(pattern, str):
        return [letter != "S" for letter in pattern.ljust(config.layers, "F")[: config.layers]]
    types = config.strings("indexer_types")
    if types is not None:
        return [each != "shared" for each in types]
    step, offset = config.integer("index_topk_freq", default=1), config.integer("index_skip_topk_offset", default=2)
    return [max(number - offset + 1, 0) % step == 0 for number in range(config.layers)]


# ---------------------------------------------------------------------------------------------------------- DeepSeek V4


def deepseek_v4(config: ModelConfig, running: Running) -> Layers:
    """A window of latents in every layer; most also keep latents of 4 or of 128 tokens, and what compresses them."""
    _only_packed(config, running)
    block = running.block(V4_BLOCK)
    ratios = _ratios(config, (0, 1, 4, 128))
    layers = [layer for number, ratio in enumerate(ratios) for layer in _v4_layer(config, number, ratio, block)]
    return Layers(tuple(layers), blocks_outermost=True)


def _v4_layer(config: ModelConfig, number: int, ratio: int, block: int) -> Iterator[CacheLayer]:
    """In the order in which vLLM makes them."""
    name = f"model.layers.{number}.attn"
    if ratio == 4:
        keys = attrs.evolve(index_keys(config, block), tokens_per_state=ratio, alignment=V4_ALIGNMENT, indexer=False)
        yield CacheLayer(f"{name}.indexer.k_cache", keys)
        states = _compressor_states(config.integer("index_head_dim"), ratio)
        yield CacheLayer(f"{name}.indexer.compressor.state_cache", states)
    window = _packed_latent(config, V4_WINDOW_BLOCK, window=config.integer("sliding_window"))
    yield CacheLayer(f"{name}.swa_cache", window)
    if ratio > 1:
        yield CacheLayer(name, _packed_latent(config, block, tokens_per_state=ratio))
        yield CacheLayer(f"{name}.compressor.state_cache", _compressor_states(config.integer("head_dim"), ratio))


def _packed_latent(config: ModelConfig, block: int, tokens_per_state: int = 1, window: int = 0) -> Latent:
    return Latent(
        block,
        config.integer("head_dim"),
        "uint8",
        tokens_per_state=tokens_per_state,
        state_bytes=V4_PACKED,
        alignment=V4_ALIGNMENT,
        window=window,
        version="deepseek_v4",
        cache_dtype="fp8_ds_mla",
    )


def _compressor_states(size: int, ratio: int) -> Latent:
    """What the next compressed latent will be made of: values and weights of the tokens since the last one."""
    overlap = 2 if ratio == 4 else 1
    return Latent(
        V4_STATE_BLOCKS[ratio],
        2 * overlap * size,
        "float32",
        what="compressor states",
        alignment=V4_ALIGNMENT,
        window=overlap * ratio,
    )


def deepseek_v41(config: ModelConfig, running: Running) -> Layers:
    """A window of latents that vLLM replays, in every layer; a few layers keep latents that others read, too."""
    _only_packed(config, running)
    block = running.block(MLA_BLOCK)
    sources, indexed = config.integers("kv_source_layer_ids") or [], config.integers("index_source_layer_ids") or []
    layers: list[CacheLayer] = []
    for number, ratio in enumerate(_ratios(config, (0, 1, 2))):
        keeps, indexes = number in sources, number in sources and number in indexed
        layers += _v41_layer(config, number, ratio, block, keeps=keeps, indexes=indexes)
    return Layers(tuple(layers), blocks_outermost=True)


def _v41_layer(
    config: ModelConfig, number: int, ratio: int, block: int, *, keeps: bool, indexes: bool
) -> Iterator[CacheLayer]:
    name = f"language_model.model.layers.{number}.attn"
    if keeps:
        kept = _packed_latent(config, block, tokens_per_state=ratio)
        yield CacheLayer(name, attrs.evolve(kept, replicated=False))
    if indexes:
        keys = attrs.evolve(index_keys(config, block), tokens_per_state=ratio, alignment=V4_ALIGNMENT)
        yield CacheLayer(f"{name}.indexer.k_cache", attrs.evolve(keys, replicated=False, indexer=False))
    window = _packed_latent(config, V41_WINDOW_BLOCK, window=config.integer("sliding_window"))
    yield CacheLayer(f"{name}.swa_cache", attrs.evolve(window, replayed=True))
    if keeps and ratio > 1:
        ring = Ring(V41_RING, 1, 2 * config.integer("head_dim"), "float32", "compressor states of the newest tokens")
        yield CacheLayer(f"{name}.compressor.state_cache", ring)


def _ratios(config: ModelConfig, allowed: tuple[int, ...]) -> list[int]:
    """Tokens that each layer compresses into one. Raises ConfigError."""
    ratios = config.integers("compress_ratios")
    if ratios is None:
        raise ConfigError(f"{config.path} does not say compress_ratios", remedy="give the file that vLLM loads")
    ratios = config.each_layer("compress_ratios", ratios)
    strange = next((ratio for ratio in ratios if ratio not in allowed), None)
    if strange is not None:
        raise ConfigError(
            f"{config.path} has a layer that compresses {strange} tokens into one, which {config.architecture} cannot",
            remedy=f"vLLM takes {', '.join(map(str, allowed))}",
        )
    return ratios


def _only_packed(config: ModelConfig, running: Running) -> None:
    running.share(config, config.integer("num_attention_heads"))
    if running.kv_dtype != "auto" and not running.packed:
        raise ConfigError(
            f"--kv-dtype {running.kv_dtype}: on Hopper GPUs vLLM keeps the KV of {config.architecture} in FP8 only",
            remedy="use auto or fp8",
        )
