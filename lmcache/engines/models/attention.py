"""Models whose layers keep keys and values: full, in sliding windows, or in chunked-local spans."""

from collections.abc import Sequence

from lmcache.engines.models.layers import CacheLayer, Heads, Layers
from lmcache.engines.models.running import Running
from lmcache.engines.models.source import ModelConfig
from lmcache.errors import ConfigError

SLIDING = "sliding_attention"
FULL = "full_attention"
CHUNKED = "chunked_attention"


def uniform(config: ModelConfig, running: Running) -> Layers:
    """All layers alike: full attention, or one sliding window where the config has one (Llama, Mistral, Mixtral)."""
    types = config.strings("layer_types")
    window = config.optional("sliding_window")
    if types is None:
        types = [SLIDING if window else FULL] * config.layers
    return attention_layers(config, running, types, window=window)


def qwen(config: ModelConfig, running: Running) -> Layers:
    """Full attention. A window counts only if it is switched on, and then vLLM takes it for all layers or none."""
    if not config.flag("use_sliding_window"):
        return attention_layers(config, running, [FULL] * config.layers)
    first = 0 if config.values.get("max_window_layers") == 0 else config.integer("max_window_layers", default=28)
    if 0 < first < config.layers:
        raise ConfigError(
            f"{config.path} has sliding windows from layer {first} on, which vLLM refuses for {config.architecture}",
            remedy="set use_sliding_window to false",
        )
    kind = FULL if first else SLIDING
    return attention_layers(config, running, [kind] * config.layers, window=config.integer("sliding_window"))


def gemma2(config: ModelConfig, running: Running) -> Layers:
    """A sliding window in every other layer, from the first on."""
    return _every(config, running, 2)


def gemma3(config: ModelConfig, running: Running) -> Layers:
    """A sliding window in all but every sixth layer."""
    return _every(config, running, config.integer("sliding_window_pattern", default=6))


def gpt_oss(config: ModelConfig, running: Running) -> Layers:
    """A sliding window in every other layer, from the first on, whatever `layer_types` says."""
    types = [FULL if number % 2 else SLIDING for number in range(config.layers)]
    return attention_layers(config, running, types, window=config.integer("sliding_window"), part="attn.attn")


def llama4(config: ModelConfig, running: Running) -> Layers:
    """Chunked-local attention in layers with rotary positions; full attention in those without, every fourth."""
    interval = config.integer("no_rope_layer_interval", default=4)
    rotary = config.integers("no_rope_layers") or [(n + 1) % interval for n in range(config.layers)]
    span = config.optional("attention_chunk_size")
    types = [CHUNKED if span and each else FULL for each in config.each_layer("no_rope_layers", rotary)]
    return attention_layers(config, running, types, span=span)


def _every(config: ModelConfig, running: Running, step: int) -> Layers:
    """Full attention in every `step`-th layer, unless the config says it layer by layer."""
    types = config.strings("layer_types") or [SLIDING if (n + 1) % step else FULL for n in range(config.layers)]
    return attention_layers(config, running, types, window=config.integer("sliding_window"))


def attention_layers(
    config: ModelConfig,
    running: Running,
    types: Sequence[str],
    window: int = 0,
    span: int = 0,
    part: str = "self_attn.attn",
) -> Layers:
    """One layer for each word of `types`. Raises ConfigError for a word that is none of theirs."""
    known = {FULL: heads(config, running)}
    if window:
        known[SLIDING] = heads(config, running, window=window)
    if span:
        known[CHUNKED] = heads(config, running, span=span)
    unknown = set(types) - known.keys()
    if unknown:
        raise ConfigError(
            f"{config.path} has layers of the type {unknown.pop()!r}, which {config.architecture} does not",
            remedy="start the engine and ask it with --server",
        )
    return Layers(tuple(CacheLayer(f"model.layers.{n}.{part}", known[kind]) for n, kind in enumerate(types)))


def heads(config: ModelConfig, running: Running, window: int = 0, span: int = 0, block_size: int = 0) -> Heads:
    """What a layer keeps of each head. `block_size` overrides what `running` says."""
    size = config.optional("head_dim") or config.integer("hidden_size") // config.integer("num_attention_heads")
    return Heads(
        block_size or running.block(), running.kv_heads(config), size, running.element(config), window=window, span=span
    )
