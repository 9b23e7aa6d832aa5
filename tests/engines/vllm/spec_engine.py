"""An engine without a model: vLLM's own grouping, scheduler, block pool and cache views, our connector, made-up pages.

Where a model would compute KV, a pattern is written that tells rank, layer, block and offset apart, every eight bytes
another. Everything else is vLLM's: it decides which block ids a request has in which step, and which become the null
block. One process runs one model after another, because importing vLLM takes its time.
"""

import itertools
import random
import time
from typing import Any

import attrs
import numpy as np
from spec_models import Model
from spec_pages import POISON, RESTORED, UNTOUCHED, Group, Rank, all_poison
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache.engines.vllm.connector import LMCacheMPConnector
from lmcache.geometry.groups import Geometry


@attrs.frozen
class Pool:
    """How large the engine is, and what it keeps."""

    blocks: int
    longest: int
    """Tokens of the longest prompt."""
    budget: int
    """Tokens that fit a step."""
    retention: int = 0
    """`--prefix-cache-retention-interval`: vLLM's default keeps only a prompt's last snapshot."""
    staging: bool = False
    """Whether pages go through buffers, as those of an accelerator do."""


class Engine:
    """A model that is not there."""

    def __init__(self, folder: str, model: Model, port: int, pool: Pool) -> None:
        """Start it. `folder` has the configuration of any decoder; `port` is where our server listens, 0 for none."""
        config = make_config(folder, model, pool)
        config.kv_transfer_config = transfer(port, staging=pool.staging)
        caches, cache = plan(config, model)
        places = itertools.count()
        self.groups = [
            Group(
                number,
                cache.kv_cache_groups[number].kv_cache_spec,  # one of them, where each layer has its own
                {name: next(places) for name in group.layer_names},
                kv_cache_utils.kv_cache_groups_tp_replicas([group], model.ranks),
            )
            for number, group in enumerate(caches[0].kv_cache_groups)
        ]
        self.ranks = [Rank(config, caches[rank], model, rank) for rank in range(model.ranks)]
        sizes = kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), *sizes)
        self._connector = self.scheduler.connector
        self._connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): one.connector.get_handshake_metadata() for rank, one in enumerate(self.ranks)}
        )
        hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hashing)
        self._hasher = kv_cache_utils.get_request_block_hasher(sizes[1], hashing)
        self._aggregator = KVOutputAggregator.from_connector(self._connector, len(self.ranks))
        self._names = map(str, itertools.count())
        self._written: dict[tuple[int, int], int] = {}
        """Id of the block that a group's sequence block was last written to."""

    @property
    def geometry(self) -> Geometry:
        """What our connector has made of it."""
        return self.ranks[0].connector.get_handshake_metadata().geometry

    def close(self) -> None:
        """Give everything back."""
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()

    def prefill(self, tokens: list[int]) -> dict[str, Any]:
        """Run a prompt to its first sampled token, as a request that then ends. Returns the ends of its steps."""
        request = self._submit(tokens)
        steps = [0]
        while request.num_computed_tokens < len(tokens):
            self._compute(request, self.scheduler.schedule())
            if request.num_computed_tokens > steps[-1]:
                steps.append(request.num_computed_tokens)
            else:
                time.sleep(0.001)  # its lookup is not answered yet
        self._end(request)
        return {"steps": steps[1:]}

    def recall(self, tokens: list[int], forget: bool = True) -> dict[str, Any]:
        """Wipe everything, submit a prompt, and look at what a load has put where, before anything is computed.

        vLLM's own prefix cache is emptied first, unless it should not `forget`.
        """
        if forget:
            assert self.scheduler.reset_prefix_cache()
            self._shuffle()
        for rank in self.ranks:
            rank.wipe()
        request = self._submit(tokens)
        end = time.monotonic() + 30
        while request.status == RequestStatus.WAITING:
            assert time.monotonic() < end, "the scheduler does not decide"
            output = self.scheduler.schedule()
            if request.num_computed_tokens or output.num_scheduled_tokens:
                break
            self._finish(output, self._carry_out(output))
            time.sleep(0.001)
        if output.num_scheduled_tokens:  # nothing to load: vLLM computes
            hit, found = 0, [self._found(rank, ()) for rank in self.ranks]
            self._compute(request, output)
        else:
            hit = request.num_computed_tokens  # vLLM's own hit included
            loaded = self._load(output)
            tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            found = [self._found(rank, tables) for rank in self.ranks]
            self._finish(output, loaded)
        self._end(request)
        return {"hit": hit, "ranks": found}

    def _shuffle(self) -> None:
        """Let the next request get other blocks: vLLM's free ones are a queue, and it would often meet the same."""
        pool = self.scheduler.kv_cache_manager.block_pool
        blocks = pool.get_new_blocks(pool.get_num_free_blocks())
        random.Random(blocks[0].block_id).shuffle(blocks)
        pool.free_blocks(blocks)

    def _submit(self, tokens: list[int]) -> Request:
        request = Request(
            next(self._names), tokens, SamplingParams(max_tokens=1, temperature=0), None, block_hasher=self._hasher
        )
        self.scheduler.add_request(request)
        return request

    def _compute(self, request: Request, output: Any) -> None:
        """Carry out a step in which the request is computed further, if it is."""
        computed = output.num_scheduled_tokens.get(request.request_id, 0)
        if computed:
            tables = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            # vLLM has counted the step's tokens already
            stop = request.num_computed_tokens
            for rank in self.ranks:
                rank.write(self.groups, tables, stop - computed, stop)
            for group in self.groups:
                for block, _ in group.stamps(stop - computed, stop):
                    self._written[group.number, block] = tables[group.number][block]
        before = [rank.digest() for rank in self.ranks] if computed else []
        self._finish(output, self._carry_out(output))
        if computed:
            assert [rank.digest() for rank in self.ranks] == before, "a store has changed the engine's memory"

    def _carry_out(self, output: Any) -> list[ModelRunnerOutput]:
        """The calls that vLLM makes to a connector in each worker, after the forward pass was submitted."""
        return [self._of_worker(rank.connector, output) for rank in self.ranks]

    def _of_worker(self, connector: LMCacheMPConnector, output: Any) -> ModelRunnerOutput:
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        found = connector.get_transfer_results(output.finished_req_ids)
        connector.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = [[7] if self._whole(name) else [] for name in ids]
        moved = KVConnectorOutput(finished_recving=found.finished_recving, failed_recving=found.failed_recving or set())
        places = {name: place for place, name in enumerate(ids)}
        return ModelRunnerOutput(ids, places, sampled, kv_connector_output=moved)

    def _whole(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_prompt_tokens

    def _load(self, output: Any) -> list[ModelRunnerOutput]:
        """Carry out a step that only loads, and wait until every rank has loaded."""
        results = self._carry_out(output)
        end = time.monotonic() + 60
        for rank, result in zip(self.ranks, results, strict=True):
            while not result.kv_connector_output.finished_recving:
                assert time.monotonic() < end, "a load does not end"
                found = rank.connector.get_transfer_results(set())
                result.kv_connector_output.finished_recving = found.finished_recving
                result.kv_connector_output.failed_recving = found.failed_recving or set()
                time.sleep(0.001)
            assert not result.kv_connector_output.failed_recving, "a load failed"
        return results

    def _finish(self, output: Any, results: list[ModelRunnerOutput]) -> None:
        self.scheduler.update_from_output(output, self._aggregator.aggregate(results))

    def _end(self, request: Request) -> None:
        if not request.is_finished():
            self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        while self.scheduler.finished_req_ids:
            output = self.scheduler.schedule()
            self._finish(output, self._carry_out(output))

    def _found(self, rank: Rank, tables: tuple[list[int], ...]) -> dict[str, Any]:
        """For each group, the sequence blocks that hold what they should; and every page or byte that is neither that
        nor poison, in words."""
        restored: list[list[int]] = [[] for _ in self.groups]
        stayed = 0
        wrong: list[str] = []
        for group, ids in zip(self.groups, tables, strict=False):
            for block, number in enumerate(ids):
                state = rank.take(group, block, number)
                if state == RESTORED and number:
                    restored[group.number].append(block)
                    stayed += self._written[group.number, block] == number
                elif state != UNTOUCHED:
                    wrong.append(f"group {group.number} block {block} (id {number}) is {state}")
        # restored pages are poison again by now: any other byte is one that nobody should have written
        if not all_poison(rank.memory):
            stray = np.flatnonzero(rank.memory != POISON)
            wrong.append(f"{len(stray)} bytes elsewhere were written, the first at {stray[0]}")
        return {"restored": restored, "stayed": stayed, "wrong": wrong}


def make_config(folder: str, model: Model, pool: Pool) -> VllmConfig:
    """vLLM's configuration; of the model it was made for, nothing is used but that it is a decoder."""
    cache = CacheConfig(
        block_size=model.block_size,
        enable_prefix_caching=True,
        num_gpu_blocks_override=pool.blocks,
        prefix_cache_retention_interval=pool.retention,
    )
    cache.kv_cache_layout = model.layout
    cache.mamba_cache_mode = model.recurrent_mode
    return VllmConfig(
        model_config=ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=pool.longest, seed=0
        ),
        cache_config=cache,
        parallel_config=ParallelConfig(tensor_parallel_size=model.ranks),
        scheduler_config=SchedulerConfig(
            max_model_len=pool.longest,
            max_num_batched_tokens=pool.budget,
            max_num_seqs=2,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
    )


def transfer(port: int, *, staging: bool = False) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="LMCacheMPConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "lmcache.mp.port": port or 1,
            "lmcache.start_wait": 20 if port else 0,
            "lmcache.deadline": 20,
            "lmcache.weights_id": "made up",
            "lmcache.staging": staging,
        },
    )


def plan(config: VllmConfig, model: Model) -> tuple[list[Any], Any]:
    """Group the layers and place their pages: as `EngineCore._initialize_kv_caches` does, for workers and scheduler."""
    specs = [dict(model.specs) for _ in range(model.ranks)]
    caches = kv_cache_utils.get_kv_cache_configs(config, specs, [1 << 50] * model.ranks)
    cache = kv_cache_utils.generate_scheduler_kv_cache_config(caches)
    config.cache_config.num_gpu_blocks = cache.num_blocks
    blocks = [g.kv_cache_spec.block_size for g in cache.kv_cache_groups if g.kv_cache_spec.prefix_cacheable]
    config.cache_config.block_size = min(blocks)
    sizes = kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
    alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(cache, config, *sizes)
    for one in (*caches, cache):
        one.hash_block_size, one.cache_hit_alignment_tokens = sizes[1], alignment
        one.kv_cache_layout = model.layout
    return caches, cache
