"""Geometries of models that run on no CPU, as vLLM groups them and we have to describe them; and engines of them.

The models are built from vLLM's own spec classes in `tests/engines/vllm/spec_models.py`; what is expected of them is
written out here, without vLLM.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache.geometry.chunking import default_chunk_size, kept_blocks
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.geometry.hits import load_spans

DRIVER = Path(__file__).parents[1] / "engines" / "vllm" / "spec_driver.py"

DECODER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
"""The configuration of any decoder: vLLM wants one, and takes nothing from it that matters here."""


def _full(tokens: int, pages: tuple[int, ...], shards: int = 1) -> KVGroup:
    return KVGroup(GroupKind.FULL, tokens, pages, shards=shards)


def _window(tokens: int, pages: tuple[int, ...], window: int) -> KVGroup:
    return KVGroup(GroupKind.SLIDING_WINDOW, tokens, pages, window=window)


def _recurrent(tokens: int, pages: tuple[int, ...]) -> KVGroup:
    return KVGroup(GroupKind.RECURRENT, tokens, pages)


SCRATCH = KVGroup(GroupKind.SCRATCH, 0, ())

# of 78 layers, those with an indexer where four share one
_SHARED = [page for layer in range(78) for page in ((41984, 8448) if max(layer - 1, 0) % 4 == 0 else (41984,))]

GEOMETRIES = {
    "glm_5_3": Geometry((_full(64, (73728, 8448) * 78),), ranks=8, hit_alignment=64),
    "glm_5_3_in_kernel_blocks": Geometry((_full(128, (147456, 16896) * 78),), hit_alignment=128),
    "glm_5_3_flash": Geometry(
        (
            _recurrent(1024, (542720,) * 9),
            _recurrent(1024, (542720,) * 9),
            _recurrent(1024, (542720,) * 8),
            _recurrent(1024, (542720,) * 8),
            _full(1024, (1048576, 8448) * 11),
            SCRATCH,
        ),
        hit_alignment=1024,
    ),
    "glm_5_2_fp8": Geometry((_full(64, tuple(_SHARED)),), hit_alignment=64),
    "glm_5_2_fp8_apart": Geometry((_full(64, (41984,) * 78), _full(256, (33792,) * 21)), hit_alignment=256),
    "deepseek_v4": Geometry(
        (
            _window(64, (37376,) * 22, 128),
            _window(64, (37376,) * 21, 128),
            _full(256, (1168,) * 3 + (37376, 8448, 1168) * 20),
            _window(8, (32768,) * 23, 128),
            _window(4, (32768, 8192) * 20, 8),
        ),
        hit_alignment=256,
    ),
    "deepseek_v4_1": Geometry((_full(256, (135168, 33792, 67584, 16896) * 5), *(SCRATCH,) * 9), hit_alignment=256),
    "gpt_oss_120b": Geometry((_window(16, (32768,) * 18, 128), _full(16, (32768,) * 18)), hit_alignment=16),
    "gemma_3_27b": Geometry(
        (
            *(_window(16, (16384,) * 9, 1024),) * 4,
            *(_window(16, (16384,) * 8, 1024),) * 2,
            _full(16, (16384,) * 10),
        ),
        hit_alignment=16,
    ),
    "qwen3_next_80b": Geometry(
        (*(_recurrent(544, (548864,) * 12),) * 3, _full(544, (557056,) * 12)), hit_alignment=544
    ),
    "hybrid_with_all_states": Geometry(
        (*(_recurrent(544, (548864,) * 12),) * 3, _full(544, (557056,) * 12)), hit_alignment=544
    ),
    "llama_4_in_short_spans": Geometry(
        (*(KVGroup(GroupKind.CHUNKED_LOCAL, 16, (8192,) * 12, window=512),) * 3, _full(16, (8192,) * 12)),
        hit_alignment=16,
    ),
    "llama_70b": Geometry((_full(16, (8192,) * 80, shards=8),), ranks=8, hit_alignment=16),
}


def stored_bytes(geometry: Geometry, chunk_size: int) -> int:
    """What one chunk stores, on all ranks together."""
    return sum(
        kept_blocks(group, chunk_size) * group.block_bytes * group.shards for group in geometry.groups if group.cached
    )


def loaded_bytes(geometry: Geometry, chunk_size: int, hit: int) -> int:
    """What a hit reads that ends at `hit` and finds nothing in the engine, each shard once."""
    return sum(
        sum(len(span.blocks) for span in load_spans(group, chunk_size, hit, 0)) * group.block_bytes * group.shards
        for group in geometry.groups
    )


def full_bytes(geometry: Geometry, tokens: int) -> int:
    """What `tokens` take if every layer is full: windows kept whole, the largest full page in place of a state."""
    largest = max(
        max(group.page_bytes) // group.tokens_per_block for group in geometry.groups if group.kind is GroupKind.FULL
    )
    return sum(
        (
            largest * tokens * len(group.page_bytes)
            if group.kind is GroupKind.RECURRENT
            else tokens // group.tokens_per_block * group.block_bytes
        )
        * group.shards
        for group in geometry.groups
        if group.cached
    )


def default_chunk(name: str) -> int:
    """Tokens per chunk on a server that was not told."""
    return default_chunk_size(GEOMETRIES[name])


class SpecProcess:
    """A process with vLLM in it, which has one made-up engine after another."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(DECODER))
        self._log = folder / "driver.log"
        with self._log.open("w") as stream:
            self._process = subprocess.Popen(
                [sys.executable, str(DRIVER), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def call(self, do: str, **arguments: Any) -> Any:
        """Ask the driver to do something; fails with its stack if it cannot."""
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(f"the driver ended with {self._process.wait()}:\n{self._log.read_text()[-6000:]}")
        reply = json.loads(line)
        assert "error" not in reply, f"{reply['error']}\n{self._log.read_text()[-3000:]}"
        return reply["result"]

    def close(self) -> None:
        """End it at once: it has nothing that needs an end of its own, and vLLM takes its time for one."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
