"""Pages of a made-up engine: vLLM's own views of memory, and a pattern in place of KV. Imports vLLM.

Each word of eight bytes is different from every other: it tells rank, layer, block of the sequence and place in a page.
"""

import copy
import zlib
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch
from spec_models import Model
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import CircularBufferSpec, MambaSpec, group_kernel_blocks
from vllm.v1.worker.utils import allocate_kv_cache

from lmcache.engines.vllm.connector import LMCacheMPConnector

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

POISON = 0xA5
POISON_WORD = np.uint64(0xA5A5A5A5A5A5A5A5)
MIXER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so multiplying by it maps 64-bit words one to one."""
RESTORED, UNTOUCHED = "restored", "untouched"
MOST_PAGE_WORDS = 1 << 21
WORDS = np.arange(MOST_PAGE_WORDS, dtype=np.uint64) * MIXER


def pattern(shard: int, layer: int, stamp: int, size: int) -> Bytes:
    """The bytes of one page: each word of eight is different from every other word of every page."""
    page = np.uint64(((shard << 12 | layer) << 20 | stamp) << 21)
    with np.errstate(over="ignore"):
        words = WORDS[: -(-size // 8)] + page * MIXER
    return words.view(np.uint8)[:size]


def all_poison(memory: Bytes) -> bool:
    words = len(memory) // 8 * 8
    return bool((memory[:words].view(np.uint64) == POISON_WORD).all() and (memory[words:] == POISON).all())


@attrs.frozen
class Group:
    """One of vLLM's KV cache groups."""

    number: int
    spec: Any
    """Of any of its layers."""
    layers: dict[str, int]
    """Its layers, and a number for each that no layer of another group has."""
    replicas: int
    """Neighbouring ranks that hold the same bytes."""

    @property
    def recurrent(self) -> bool:
        """Whether a block holds a state."""
        return isinstance(self.spec, MambaSpec)

    def stamps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """What a step that computes tokens `start` to `stop` writes: blocks of the sequence, and their stamps."""
        size = self.spec.block_size
        if self.recurrent:  # the state after the last token, in the block that this token lies in
            if self.spec.mamba_cache_mode == "all":
                yield from ((block, (block + 1) * size) for block in range(start // size, (stop - 1) // size))
            yield (stop - 1) // size, stop
        elif isinstance(self.spec, CircularBufferSpec):
            yield 0, 1
        else:
            for block in range(start // size, -(-stop // size)):
                yield block, block + 1

    def stamp_of(self, block: int) -> int:
        """What a block of a request holds once all its tokens are computed."""
        return (block + 1) * self.spec.block_size if self.recurrent else block + 1


class Rank:
    """One worker: vLLM's views of its memory, and the connector's half."""

    def __init__(self, config: VllmConfig, cache: Any, model: Model, rank: int) -> None:
        sizes = [model.kernel_block] * len(cache.kv_cache_groups) if model.kernel_block else None
        self.tensors = allocate_kv_cache(
            cache, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout(), sizes
        )
        self._blocks = cache.num_blocks
        storage = next(iter(self.tensors.values())).untyped_storage()
        self.memory: Bytes = np.asarray(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
        self._rank = rank
        own = copy.deepcopy(config)
        own.parallel_config.rank = rank
        self.connector = LMCacheMPConnector(own, KVConnectorRole.WORKER, cache)
        self.connector.register_kv_caches(self.tensors)

    def page(self, layer: str, block: int) -> Bytes:
        """The bytes that vLLM's view of a layer has in one block, wherever they lie."""
        tensor = group_kernel_blocks(self.tensors[layer], self._blocks)[block]
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        assert span == tensor.numel(), f"{layer} is not dense"
        start = tensor.storage_offset() * tensor.element_size()
        return self.memory[start : start + span * tensor.element_size()]

    def write(self, groups: list[Group], tables: tuple[list[int], ...], start: int, stop: int) -> None:
        """What a forward pass leaves behind."""
        for group in groups:
            for block, stamp in group.stamps(start, stop):
                number = tables[group.number][block]
                assert number, f"group {group.number} has no block for tokens {start} to {stop}"
                for layer, place in group.layers.items():
                    page = self.page(layer, number)
                    page[:] = pattern(self._rank // group.replicas, place, stamp, len(page))

    def take(self, group: Group, block: int, number: int) -> str:
        """What the pages of a block hold; where it is what the request should find there, they are poison then."""
        return " and ".join(sorted({self._take_page(layer, group, block, number) for layer in group.layers}))

    def _take_page(self, layer: str, group: Group, block: int, number: int) -> str:
        page = self.page(layer, number)
        wanted = pattern(self._rank // group.replicas, group.layers[layer], group.stamp_of(block), len(page))
        if np.array_equal(page, wanted):
            page[:] = POISON
            return RESTORED
        return UNTOUCHED if all_poison(page) else "neither"

    def wipe(self) -> None:
        self.memory[:] = POISON

    def digest(self) -> int:
        """Of all memory, pages or not."""
        return zlib.crc32(self.memory)
