"""vLLM's own spec objects for models that no CPU runs, at their real numbers of layers, heads and sizes.

Each function builds what the model's layers answer to `get_kv_cache_spec`, layer by layer in the order in which they
are registered; the class that answers is named beside it. Only vLLM decides how they are grouped. Sizes are those of
one rank; where the parallel layout matters to them, it is in the name. Imports vLLM.
"""

from collections.abc import Callable, Iterable

import attrs
import torch
from vllm.v1 import kv_cache_interface as kv

BF16, FP32, BYTES = torch.bfloat16, torch.float32, torch.uint8

LAYERS_OUTSIDE, BLOCKS_OUTSIDE = "LBNHC", "BLHNC"
"""vLLM's default layout; and the one that backends ask for which pack pages of several sizes into a block."""


@attrs.frozen
class Model:
    """What vLLM's engine core knows of a model when it groups its layers."""

    specs: dict[str, kv.KVCacheSpec]
    """For each layer, in order."""
    block_size: int
    """`--block-size`, or what the platform makes of it."""
    ranks: int = 1
    """Tensor parallel size."""
    layout: str = LAYERS_OUTSIDE
    kernel_block: int = 0
    """Tokens of the blocks that attention kernels take, where those are smaller; 0 where they are not."""
    recurrent_mode: str = "align"
    """`--mamba-cache-mode`."""


def full(heads: int, head_size: int, block: int, dtype: torch.dtype = BF16) -> kv.FullAttentionSpec:
    """`Attention` in model_executor/layers/attention/attention.py."""
    return kv.FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=head_size, dtype=dtype)


def window(heads: int, head_size: int, block: int, tokens: int) -> kv.SlidingWindowSpec:
    """The same class, of a layer with a sliding window."""
    return kv.SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=head_size, dtype=BF16, sliding_window=tokens
    )


def latent(block: int, size: int = 576, *, leader: bool = False) -> kv.MLAAttentionSpec:
    """`MLAAttention` in model_executor/layers/attention/mla_attention.py, KV in bfloat16."""
    return kv.MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=size,
        dtype=BF16,
        cache_dtype_str="auto",
        is_index_group_leader=leader,
    )


def fp8_latent(block: int, *, leader: bool = False) -> kv.MLAAttentionSpec:
    """The same, KV in `fp8_ds_mla`: 656 opaque bytes a token."""
    return kv.MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=576,
        dtype=BYTES,
        cache_dtype_str="fp8_ds_mla",
        kv_quant_mode=kv.get_kv_quant_mode("fp8_ds_mla"),
        state_content_bytes=656,
        is_index_group_leader=leader,
    )


def indexer(block: int, tokens_per_state: int = 1) -> kv.MLAAttentionSpec:
    """`DeepseekV32IndexerCache` in model_executor/models/deepseek_v2.py: 128 FP8 values and a scale a state.

    With more tokens per state it is `Glm5NextIndexerCache` in models/glm5next/common/attention.py.
    """
    return kv.MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=132,
        dtype=BYTES,
        cache_role=kv.SparseCacheRole.INDEXER,
        tokens_per_state=tokens_per_state,
    )


def recurrent(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], block: int, padded: int, mode: str = "align"
) -> kv.MambaSpec:
    """`MambaBase` in model_executor/layers/mamba/abstract.py, its page padded to that of the attention layers."""
    return kv.MambaSpec(block_size=block, shapes=shapes, dtypes=dtypes, page_size_padded=padded, mamba_cache_mode=mode)


def sparse_layers(
    layers: int, indexers: Iterable[int], main: Callable[..., kv.KVCacheSpec], block: int, index_block: int
) -> dict[str, kv.KVCacheSpec]:
    """`DeepseekV32Attention` in models/deepseek_v32/attention.py: a latent page each, an indexer page in some."""
    leaders = set(indexers)
    specs: dict[str, kv.KVCacheSpec] = {}
    for number in range(layers):
        name = f"model.layers.{number}.self_attn"
        specs[f"{name}.attn"] = main(block, leader=number in leaders)
        if number in leaders:
            specs[f"{name}.indexer.k_cache"] = indexer(index_block)
    return specs


def glm_5_3() -> Model:
    """`GlmMoeDsaForCausalLM`: 78 layers, each with an indexer of its own; `index_topk_freq` is 1 by default."""
    return Model(sparse_layers(78, range(78), latent, 64, 64), block_size=64, ranks=8)


def glm_5_3_in_kernel_blocks() -> Model:
    """The same with `--block-size 128`: the indexer's kernels take 64 tokens, so each block is two of theirs."""
    return attrs.evolve(
        glm_5_3(), specs=sparse_layers(78, range(78), latent, 128, 128), block_size=128, ranks=1, kernel_block=64
    )


SHARED_INDEXERS = [layer for layer in range(78) if max(layer - 1, 0) % 4 == 0]
"""Layers that run an indexer where four share one (`index_topk_freq` 4, `index_skip_topk_offset` 2)."""


def glm_5_2_fp8() -> Model:
    """The same architecture with FP8 pages and an indexer for every four layers; vLLM 0.32 makes one group of it."""
    return Model(sparse_layers(78, SHARED_INDEXERS, fp8_latent, 64, 64), block_size=64)


def glm_5_2_fp8_apart() -> Model:
    """As it looks where the indexer has pages in blocks of its own: two full groups of different block sizes."""
    specs = sparse_layers(78, SHARED_INDEXERS, fp8_latent, 64, 256)
    return Model(specs, block_size=64, layout=BLOCKS_OUTSIDE)


def glm_5_3_flash() -> Model:
    """`Glm5NextForCausalLM` in models/glm5next, one rank of TP 8: 34 of 45 layers are linear, 11 sparse with key pools.

    `Glm5NextLinearAttention` has 64 heads of 128 and a convolution over 4 tokens (`kda_state_shape` in
    layers/mamba/mamba_utils.py). The platform makes the block 1,024 tokens (platforms/interface.py): the smallest
    multiple of 512, the indexer's smallest kernel block, whose page takes a state.
    """
    block = 1024
    state = ((64 * 128 * 3 // 8, 3), (64 // 8, 128, 128))
    specs: dict[str, kv.KVCacheSpec] = {}
    for number in range(45):
        name = f"model.layers.{number}.self_attn"
        if number % 4 != 3:
            specs[name] = recurrent(state, (BF16, FP32), block, latent(block, 512).page_size_bytes)
            continue
        specs[f"{name}.attn"] = latent(block, 512, leader=True)
        specs[f"{name}.indexer.k_cache"] = indexer(block, tokens_per_state=16)
        # `Glm5NextTailCache`: the keys and gates of the pool that is not full yet
        specs[f"{name}.indexer.tail_cache"] = kv.CircularBufferSpec(
            block_size=16, num_kv_heads=2, head_size=128, head_size_v=0, dtype=BF16, dcp_sharded=False
        )
    return Model(specs, block_size=block, layout=BLOCKS_OUTSIDE)


def deepseek_v4() -> Model:
    """`DeepseekV4ForCausalLM` in models/deepseek_v4: 43 layers, compressed 128 times or 4 times by turns, KV in FP8.

    Every layer has a window (`DeepseekV4SWACache`); compressed ones have a cache (`DeepseekV4Attention`), a compressor
    state (`CompressorStateCache`) and, where it is 4 times, an indexer with a compressor state too.
    """
    specs: dict[str, kv.KVCacheSpec] = {}
    for number in range(43):
        name = f"model.layers.{number}.attn"
        ratio = 128 if number < 2 or number % 2 == 0 else 4
        specs[f"{name}.swa_cache"] = _packed_window(64, 584, 576)
        specs[name] = _compressed(256, ratio, 584, 576)
        specs[f"{name}.compressor.state_cache"] = _compressor_state(ratio, 512)
        if ratio == 4:
            specs[f"{name}.indexer.k_cache"] = _packed_indexer(256, ratio, 576)
            specs[f"{name}.indexer.compressor.state_cache"] = _compressor_state(ratio, 128)
    return Model(specs, block_size=256, layout=BLOCKS_OUTSIDE)


def deepseek_v4_1() -> Model:
    """As `DeepseekV41ForCausalLM` in models/deepseek_v41: few layers own a compressed cache, windows are replayed.

    Its configuration names the owners; here it is every fourth of 40 layers, compressed once and twice by turns. The
    owner of a twice compressed cache has a ring (`CompressorStateCache`).
    """
    specs: dict[str, kv.KVCacheSpec] = {}
    for number in range(40):
        name = f"model.layers.{number}.attn"
        ratio = 1 + number % 8 // 4
        if number % 4 == 0:
            specs[name] = _compressed(256, ratio, 528, 512, shards=None)
            specs[f"{name}.indexer.k_cache"] = _packed_indexer(256, ratio, 512)
            if ratio > 1:
                specs[f"{name}.compressor.state_cache"] = kv.CircularBufferSpec(
                    block_size=8, num_kv_heads=1, head_size=2 * 512, head_size_v=0, dtype=FP32
                )
        specs[f"{name}.swa_cache"] = _packed_window(32, 528, 512, bounded_replay=True)
    return Model(specs, block_size=256, layout=BLOCKS_OUTSIDE)


def _compressed(block: int, ratio: int, state: int, alignment: int, shards: int | None = 1) -> kv.MLAAttentionSpec:
    return kv.MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        max_tp_shards=shards,
        head_size=512,
        dtype=BYTES,
        tokens_per_state=ratio,
        cache_dtype_str="fp8_ds_mla",
        alignment=alignment,
        model_version="deepseek_v4",
        kv_quant_mode=kv.get_kv_quant_mode("fp8_ds_mla"),
        state_content_bytes=state,
    )


def _packed_indexer(block: int, ratio: int, alignment: int) -> kv.MLAAttentionSpec:
    return kv.MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=132,
        dtype=BYTES,
        tokens_per_state=ratio,
        alignment=alignment,
    )


def _packed_window(block: int, state: int, alignment: int, *, bounded_replay: bool = False) -> kv.SlidingWindowMLASpec:
    return kv.SlidingWindowMLASpec(
        block_size=block,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=512,
        dtype=BYTES,
        sliding_window=128,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=state,
        alignment=alignment,
        model_version="deepseek_v4",
        kv_quant_mode=kv.get_kv_quant_mode("fp8_ds_mla"),
        bounded_replay=bounded_replay,
    )


def _compressor_state(ratio: int, head: int) -> kv.SlidingWindowMLASpec:
    twice = 1 + (ratio == 4)
    return kv.SlidingWindowMLASpec(
        block_size={4: 4, 128: 8}[ratio],
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=2 * twice * head,
        dtype=FP32,
        sliding_window=twice * ratio,
        alignment=576,
    )


def gpt_oss_120b() -> Model:
    """`GptOssForCausalLM`: 36 layers of 8 KV heads of 64, every other one with a window of 128 tokens."""
    return Model(
        {
            f"model.layers.{number}.attn": full(8, 64, 16) if number % 2 else window(8, 64, 16, 128)
            for number in range(36)
        },
        block_size=16,
    )


def gemma_3_27b() -> Model:
    """`Gemma3ForCausalLM`, one rank of TP 8: 62 layers, 2 of 16 KV heads of 128, five in six with a window of 1,024."""
    return Model(
        {
            f"model.layers.{number}.self_attn.attn": full(2, 128, 16) if number % 6 == 5 else window(2, 128, 16, 1024)
            for number in range(62)
        },
        block_size=16,
    )


def qwen3_next_80b(mode: str = "align") -> Model:
    """`Qwen3NextForCausalLM`, one rank of TP 2: 36 of 48 layers are gated delta nets, 12 have a KV head of 256.

    Their state (`gated_delta_net_state_shape` in layers/mamba/mamba_utils.py: 16 key and 32 value heads of 128) in
    bfloat16 makes blocks of 544 tokens.
    """
    block = 544
    state = (((16 * 2 + 32) * 128 // 2, 3), (32 // 2, 128, 128))
    return Model(
        {
            f"model.layers.{number}": full(1, 256, block)
            if number % 4 == 3
            else recurrent(state, (BF16, BF16), block, full(1, 256, block).page_size_bytes, mode)
            for number in range(48)
        },
        block_size=block,
        recurrent_mode=mode,
    )


def hybrid_with_all_states() -> Model:
    """Its sizes for a model whose kernels leave a state at the end of every block, as Mamba2 models' do."""
    return qwen3_next_80b("all")


def llama_4_in_short_spans() -> Model:
    """`Llama4ForCausalLM` on TP 8: 48 layers, one of 8 KV heads of 128, three in four chunked local.

    Its spans have 8,192 tokens. Here they have 512, so that a short prompt has several.
    """
    span = kv.ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=128, dtype=BF16, attention_chunk_size=512
    )
    return Model(
        {f"model.layers.{n}.self_attn.attn": full(1, 128, 16) if n % 4 == 3 else span for n in range(48)},
        block_size=16,
    )


def llama_70b() -> Model:
    """`LlamaForCausalLM` on TP 8: 80 layers, one of 8 KV heads of 128 on each rank."""
    return Model({f"model.layers.{n}.self_attn.attn": full(1, 128, 16) for n in range(80)}, block_size=16, ranks=8)


MODELS: dict[str, Callable[[], Model]] = {
    made.__name__: made
    for made in (
        glm_5_3,
        glm_5_3_in_kernel_blocks,
        glm_5_3_flash,
        glm_5_2_fp8,
        glm_5_2_fp8_apart,
        deepseek_v4,
        deepseek_v4_1,
        gpt_oss_120b,
        gemma_3_27b,
        qwen3_next_80b,
        hybrid_with_all_states,
        llama_4_in_short_spans,
        llama_70b,
    )
}
