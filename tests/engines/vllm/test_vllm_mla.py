"""DeepSeek-V3's attention (MLA) on a real vLLM.

On CPU, vLLM reads a cached context with other numerics than those of a cold prefill, so a cold answer is no yardstick.
A correct hit is deterministic, though: it must equal what a plain copy of the same blocks gives, made in the engine's
own process, and the bytes of its pages must be those that were stored.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_stand import EngineProcess, Stand, prompt

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def stand(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(
        tmp_path_factory.mktemp("dsv3"), models / "dsv3", clients=2, dtype="bfloat16", max_num_batched_tokens=1000
    )
    try:
        stand.serve("--chunk-size", "256")
        stand.start_engine()
        stand.await_engine()
        stand.engine.run(RECORDER)
        yield stand
    finally:
        stand.close()


@pytest.fixture
def engine(stand: Stand) -> Iterator[EngineProcess]:
    stand.engine.run("recorder.mode = 'record'; recorder.kept.clear(); recorder.different.clear()")
    yield stand.engine
    stand.server.quiet()


RECORDER = """
class Recorder:
    # Reads and writes the tensors that the layers attend to, by torch alone.
    def __init__(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        worker = get_kv_transfer_group()._worker
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        caches = [layer.kv_cache for name, layer in sorted(layers.items()) if hasattr(layer, 'kv_cache')]
        self.tensors = [c[0] if isinstance(c, (list, tuple)) else c for c in caches]
        self.kept, self.different, self.mode = {}, [], 'record'
        self.storer, self.loader = worker._storer, worker._loader
        self.copy_out, self.copy_in, self.load_all = self.storer._copy_out, self.loader._copy_in, self.loader._load
        self.storer._copy_out, self.loader._copy_in, self.loader._load = self.store, self.copy, self.load

    def store(self, link, stored, group, chunks, packed):
        self.copy_out(link, stored, group, chunks, packed)
        per_chunk = link.chunk_size // 16
        for chunk in chunks:
            for position in range(chunk * per_chunk, (chunk + 1) * per_chunk):
                block = stored.blocks[group][position]
                self.kept[position] = [tensor[block].clone() for tensor in self.tensors]

    def copy(self, *arguments):
        if self.mode != 'plain':
            self.copy_in(*arguments)

    def load(self, order):
        loaded = self.load_all(order)
        for position in range(order.computed // 16, order.hit // 16):
            block = order.blocks[0][position]
            for tensor, kept in zip(self.tensors, self.kept[position]):
                if self.mode == 'plain':
                    tensor[block].copy_(kept)
                elif not bool((tensor[block].view(dtype=torch.int16) == kept.view(dtype=torch.int16)).all()):
                    self.different.append(position)
        return loaded

import torch
names = globals()
driver.names['recorder'] = recorder = Recorder()
result = [list(tensor.shape[1:]) for tensor in recorder.tensors]
"""


@pytest.mark.parametrize(("length", "hit"), [(1535, 1280), (1536, 1520), (1537, 1536), (2600, 2560)])
def test_a_hit_has_the_bytes_that_were_stored_and_the_answer_of_a_plain_copy(
    stand: Stand, engine: EngineProcess, length: int, hit: int
) -> None:
    ids = prompt(length, length)
    [cold] = engine.generate(ids)
    stand.server.settle()
    [warm] = engine.generate(ids)
    assert (cold["cached"], warm["cached"]) == (0, hit)
    # the last of the eight sampled tokens is never computed
    assert engine.run("result = [len(recorder.kept), recorder.different]") == [(length + 7) // 256 * 16, []]
    engine.run("recorder.mode = 'plain'")
    [plain] = engine.generate(ids)
    assert plain["cached"] == hit
    assert (warm["tokens"], warm["logprobs"]) == (plain["tokens"], plain["logprobs"])


def test_a_wrong_page_would_show(stand: Stand, engine: EngineProcess) -> None:
    ids = prompt(1, 700)
    engine.generate(ids)
    stand.server.settle()
    [warm] = engine.generate(ids)
    engine.run("recorder.mode = 'plain'\nrecorder.kept[0] = recorder.kept[1]\n")
    [wrong] = engine.generate(ids)
    assert warm["logprobs"] != wrong["logprobs"]


def test_the_log_shows_the_blocks(stand: Stand) -> None:
    assert "group_tokens_per_block=[16], scheduler_block_size=16" in stand.engine.log.read_text()
