"""A model of TensorRT-LLM's executor, as strict as what is known of it: it drives a connector's classes on CPU.

Order of a step: schedule, allocate, ask the connector (once for each allocation), tell it the blocks, build the
scheduler's output, take parked requests out, build the metadata, carry it to every rank as bytes, load, compute layer
by layer with the hooks, save, and ask what has finished; an id counts when all ranks have reported it. Every page that
a token reads is compared with what computing it would give, and every byte that changes must be allowed to.
"""

import concurrent.futures
import hashlib
import pickle
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

from trtllm_blocks import Blocks
from trtllm_model import PLAIN, VOCABULARY, Toy, row
from trtllm_names import LAYOUTS, RESERVATIONS, PrefixLoad, process
from trtllm_pools import FlatPool, LayoutPools
from trtllm_requests import BAD_PAGE, Request, Run

PATIENCE_S = 30


class Stream:
    """`torch.cuda.Stream`."""

    def synchronize(self) -> None:
        pass


class Rank:
    """One worker, its pages, and what it has reported."""

    def __init__(self, number: int, worker: Any, pools: Any) -> None:
        self.number, self.worker, self.pools = number, worker, pools
        self.outstanding: dict[str, set[int]] = {"saving": set(), "loading": set(), "prefix": set()}
        self.reported: dict[str, set[int]] = {"saving": set(), "loading": set(), "prefix": set()}

    def report(self, what: str, ids: Sequence[int]) -> None:
        """Ids may be reported once, and only after they were handed over."""
        assert len(set(ids)) == len(ids), f"{what}: {ids}"
        assert set(ids) <= self.outstanding[what], f"{what}: {ids} of {self.outstanding[what]}"
        self.outstanding[what] -= set(ids)
        self.reported[what] |= set(ids)


class Executor:
    """One engine."""

    def __init__(
        self,
        names: Any,
        address: str,
        toy: Toy = PLAIN,
        *,
        layouts: bool = False,
        ranks: int = 1,
        slots: int = 64,
        step_tokens: int = 1_000_000,
        reuse: bool = False,
        partial: bool = False,
        take_at_most: int | None = None,
        says_so: str = "both",
        refuse_reservations: int = 0,
        owner: int | None = None,
        **arguments: Any,
    ) -> None:
        """`layouts` is the second KV cache manager; `step_tokens` are what a step computes of one prompt.

        `reuse` lets the engine keep pages of its own, `partial` end its own hits inside blocks. `take_at_most` tokens
        of an offer, and none of the first `refuse_reservations`, are taken; the engine says so by a `call` of
        `cancel_load`, by a `note` on the request, or by `both`. `owner` is the rank of an engine that serves its
        requests alone (attention DP).
        """
        assert not layouts or names.generation >= LAYOUTS
        self.names, self.toy, self.layouts, self.step_tokens = names, toy, layouts, step_tokens
        self.partial, self.take_at_most, self.owner = partial, take_at_most, owner
        self.refuse_reservations, self.says_so = refuse_reservations, says_so
        self.reserving = names.generation >= RESERVATIONS and layouts
        self.blocks = Blocks(toy, slots, reuse=reuse)
        self.runs: list[Run] = []
        self.reservations: dict[int, tuple[Run, int, int]] = {}
        self.loads: list[PrefixLoad] = []
        self.trace: list[str] = []
        self._numbers = iter(range(1, 1_000_000))
        self.ranks: list[Rank] = []
        for number in range(ranks):
            process.rank = number if owner is None else owner
            # other ranks are other processes, with arguments of their own
            self._bring_up(number, _arguments(address, toy, ranks, arguments))
        self._check_classes()
        for rank in self.ranks:
            rank.pools.register(rank.worker)
        if hasattr(names.interface.KvCacheConnectorScheduler, "wait_for_initialization"):
            self.scheduler.wait_for_initialization()

    def _bring_up(self, number: int, arguments: Any) -> None:
        connector = self.names.connector
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            worker = pool.submit(connector.LMCacheWorker, arguments)
            if number == 0:
                self.scheduler = pool.submit(connector.LMCacheScheduler, arguments).result()
        pools = (LayoutPools if self.layouts else FlatPool)(self.toy, self.blocks.slots)
        self.ranks.append(Rank(number, worker.result(), pools))

    def _check_classes(self) -> None:
        """What the runtime checks before it admits a request."""
        interface = self.names.interface
        scheduler, worker = type(self.scheduler), type(self.ranks[0].worker)
        assert issubclass(scheduler, interface.KvCacheConnectorScheduler)
        assert issubclass(worker, interface.KvCacheConnectorWorker)
        if self.names.generation >= LAYOUTS:
            base = interface.KvCacheConnectorScheduler
            grouped = [
                getattr(scheduler, f"{name}_by_layer_group") is not getattr(base, f"{name}_by_layer_group")
                for name in ("update_state_after_alloc", "request_finished")
            ]
            assert len(set(grouped)) == 1, "one form of each pair"
        if self.names.generation >= RESERVATIONS:
            three = [
                hasattr(scheduler, "reserve_prefix"),
                hasattr(scheduler, "release_prefix_reservation"),
                hasattr(worker, "get_finished_prefix_loads"),
            ]
            assert all(three) or not any(three), "all three or none"

    # ---------------------------------------------------------------------------------------------------- from outside

    @property
    def linked(self) -> bool:
        """Whether the scheduler and every worker have their links: the server counts a client a moment earlier."""
        sides = [half._side for half in (self.scheduler, *(rank.worker for rank in self.ranks))]
        return all(side is not None and side._client.linked for side in sides)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        answer: int = 3,
        salt: str | None = None,
        lora: int | None = None,
        images: Sequence[tuple[list[int], int, int]] = (),
    ) -> Run:
        request = Request(next(self._numbers), prompt, self.names.generation, salt=salt, lora=lora, images=images)
        run = Run(
            request, len(prompt), answer, f"{self.toy.weights} {lora}", images, f"{salt} {lora}", len(self.toy.groups)
        )
        run.told_blocks = [0] * run.groups
        self.runs.append(run)
        return run

    def finish(self, *runs: Run) -> None:
        """Step until these are done."""
        end = time.monotonic() + PATIENCE_S
        while not all(run.done for run in runs):
            assert time.monotonic() < end, f"never done: {[run for run in runs if not run.done]}"
            self.step()

    def generate(self, prompt: Sequence[int], **options: Any) -> Run:
        run = self.submit(prompt, **options)
        self.finish(run)
        return run

    def abort(self, run: Run) -> None:
        """The user went away."""
        run.aborted = True
        if not run.admitted:
            run.done = True
        elif not (self.layouts and run.waits):
            self._end(run)
        # else its load is drained first: older versions have no such care

    def replay(self, run: Run) -> None:
        """It loses its pages, and starts again from the beginning."""
        self.scheduler.request_reset(run.request)
        done, self.blocks.reuse = run.done, False
        self.blocks.free(run, self.pools_of)
        run.done, run.admitted, run.told, run.told_tokens, run.offered, run.taken = done, False, False, 0, 0, 0
        run.told_blocks = [0] * run.groups

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.close()
        self.scheduler.close()

    # ------------------------------------------------------------------------------------------------------ scheduling

    def step(self) -> None:
        admitted = [run for run in self.runs if not run.admitted and not run.done and self._admit(run)]
        batch = [run for run in self.runs if run.admitted and not (run.waits or run.saving or run.done)]
        if batch or admitted:
            self._run_batch([(run, self._tokens_of(run)) for run in batch])
        elif any(run.waits or run.saving for run in self.runs):
            time.sleep(0.001)
        self._poll()
        self.runs = [run for run in self.runs if not run.done]

    def _tokens_of(self, run: Run) -> int:
        if run.position >= run.prompt_tokens:
            return 1
        left = run.prompt_tokens - run.position
        if left <= self.step_tokens:
            return left
        tokens = self.toy.tokens_per_block
        return (run.position + self.step_tokens) // tokens * tokens - run.position

    def _admit(self, run: Run) -> bool:
        """Guaranteed never to be evicted: a request starts when there is room for all of it."""
        if not self.blocks.room_for(run.prompt_tokens + run.answer_tokens, self.runs):
            return False
        run.computed = run.position = self.blocks.match(run)
        if self.partial and run.computed:
            # the beginning of another block matched: the engine copied it into a page of this request's
            run.computed = run.position = run.computed + 1
        if not self._ask(run):
            self.blocks.give_back(run)
            return False
        run.admitted = True
        self._allocate(run)
        run.position += run.taken
        if self.reserving and run.taken:
            self._admit_load(run)
        elif run.taken and run.waits:
            run.loading = True
        if not run.taken:
            assert not run.waits
        return True

    def _ask(self, run: Run) -> bool:
        """Have the connector say what it has; whether the request may go on."""
        if self.reserving:
            run.reservation = next(self._numbers)
            offered, waits = self.scheduler.reserve_prefix(run.request, run.computed, run.reservation)
            self.trace.append("reserve_prefix")
            if offered and self.refuse_reservations:
                self.refuse_reservations -= 1
                self._release(run, run.computed, run.computed + offered)
                return False
        else:
            offered, waits = self.scheduler.get_num_new_matched_tokens(run.request, run.computed)
            self.trace.append("get_num_new_matched_tokens")
        self._check_offer(run, offered, waits)
        run.offered, run.waits = offered, waits
        run.taken = offered if self.take_at_most is None or not self.layouts else min(offered, self.take_at_most)
        if run.taken < offered:
            at = run.computed + run.taken
            if self.reserving:
                self._release(run, at, run.computed + offered)
            elif self.says_so != "note":
                self.scheduler.cancel_load(run.request, at, run.computed + offered)
        if not run.taken and self.reserving:
            run.waits = False
        if self.says_so == "call":
            del run.request.py_num_connector_matched_tokens
        elif hasattr(run.request, "py_num_connector_matched_tokens"):
            run.request.py_num_connector_matched_tokens = run.taken
        return True

    def _check_offer(self, run: Run, offered: int, waits: bool) -> None:
        tokens = self.toy.tokens_per_block
        assert isinstance(offered, int)
        assert isinstance(waits, bool)
        assert offered or not waits, "nothing to load, and yet it has to be waited for"
        assert offered % tokens == 0, f"{offered} tokens are no whole blocks"
        assert not offered or run.computed % tokens == 0, "the engine holds half a block"
        assert run.computed + offered < len(run.request.tokens), "one prompt token has to be computed"

    def _release(self, run: Run, start: int, end: int) -> None:
        self.scheduler.release_prefix_reservation(run.request, run.reservation, start, end)

    def _allocate(self, run: Run) -> None:
        start = run.computed + run.taken
        whole = not self.layouts or run.waits
        end = len(run.request.tokens) if whole else min(len(run.request.tokens), start + self.step_tokens)
        self.blocks.allocate(run, end, start)
        if self.partial and run.computed % self.toy.tokens_per_block:
            self._write(run, run.computed - 1, 1)
        if self.layouts:
            self.scheduler.update_state_after_alloc_by_layer_group(run.request, [list(t) for t in run.tables])
        else:
            self.scheduler.update_state_after_alloc(run.request, list(run.tables[0]))
        self.trace.append("update_state_after_alloc")

    def _admit_load(self, run: Run) -> None:
        start, end = run.computed, run.computed + run.taken
        self.reservations[run.reservation] = (run, start, end)
        run.loading = True
        self.loads.append(
            PrefixLoad(
                *(run.reservation, run.number, start, end, run.waits, [list(table) for table in run.tables]),
                *(list(run.request.tokens), getattr(run.request, "cache_salt", None)),
            )
        )
        for rank in self.ranks:
            rank.outstanding["prefix"].add(run.reservation)

    # -------------------------------------------------------------------------------------------------------- one step

    def _run_batch(self, batch: list[tuple[Run, int]]) -> None:
        for run, tokens in batch:
            self.blocks.grow(run, run.position + tokens)
        output = self._output(batch)
        metadata = pickle.dumps(self.scheduler.build_connector_meta(output))
        self.trace.append("build_connector_meta")
        first = [run for run, _ in batch if run.taken and run.position == run.computed + run.taken and not run.loaded]
        stream = Stream()
        for rank in self.ranks:
            rank.worker.bind_connector_meta(pickle.loads(metadata))
            rank.worker.start_load_kv(stream)
        self.trace.append("start_load_kv")
        self._check_writes("start_load_kv", first)
        if batch:
            self._forward(batch, stream)
        for rank in self.ranks:
            rank.worker._clear_connector_meta()
        for run, tokens in batch:
            self._advance(run, tokens)

    def _output(self, batch: list[tuple[Run, int]]) -> Any:
        output = self.names.interface.SchedulerOutput()
        for run, tokens in batch:
            list_of = output.cached_requests if run.told else output.new_requests
            list_of.append(self._data(run, tokens))
            run.told = True
        if self.owner is not None:
            output.attention_dp_rank = self.owner
        if self.reserving:
            output.prefix_loads, self.loads = self.loads, []
        return output

    def _data(self, run: Run, tokens: int) -> Any:
        """What has been added since the connector was last told."""
        computed = run.position
        if not run.told and run.taken and not run.waits and run.position == run.computed + run.taken and not run.loaded:
            computed -= run.taken
        new = [table[known:] for table, known in zip(run.tables, run.told_blocks, strict=True)]
        data = self.names.interface.RequestData(
            run.number,
            run.request.tokens[run.told_tokens :],
            new[0] if len(new) == 1 else [],
            computed,
            tokens,
        )
        if self.layouts:
            data.new_block_ids_by_layer_group = new
        if hasattr(data, "cache_salt"):
            data.cache_salt = run.request.cache_salt
        run.told_tokens, run.told_blocks = len(run.request.tokens), [len(table) for table in run.tables]
        return data

    def _forward(self, batch: list[tuple[Run, int]], stream: Stream) -> None:
        for run, _ in batch:
            self._check_context(run)
        layers = sorted(layer for group in self.toy.groups for layer in group.layers)
        for rank in self.ranks:
            for layer in layers:
                rank.worker.wait_for_layer_load(layer, stream)
                for run, tokens in batch:
                    self._write(run, run.position, tokens, only=(rank, layer))
                rank.worker.save_kv_layer(layer, stream)
        for rank in self.ranks:
            rank.worker.wait_for_save(stream)
        self.trace.append("wait_for_save")
        self._check_writes("wait_for_save", [])

    def _write(self, run: Run, position: int, tokens: int, only: tuple[Rank, int] | None = None) -> None:
        """Compute: put the KV of some tokens into their pages."""
        for rank, number, buffer, layer, role, of_rank in self._buffers():
            if only is not None and only != (rank, layer):
                continue
            table, per_block = run.tables[number], self.toy.tokens_per_block
            pool = rank.pools.groups[number]
            new = row(run.states()[position : position + tokens], layer, role, of_rank)
            for at in range(tokens):
                slot = table[(position + at) // per_block]
                pool.at(slot, buffer)[(position + at) % per_block] = new[at]
            for slot in {table[at // per_block] for at in range(position, position + tokens)}:
                assert self.blocks.owner(number, slot) == run.number, "the engine writes to a foreign page"
                pool.accept(slot)

    def _check_context(self, run: Run) -> None:
        """What the next token reads is what computing it would have given."""
        per_block = self.toy.tokens_per_block
        for rank, number, buffer, layer, role, of_rank in self._buffers():
            window = self.toy.groups[number].window
            start = max(0, run.position - window + 1) if window else 0
            wanted = row(run.states()[start : run.position], layer, role, of_rank)
            pool = rank.pools.groups[number]
            for at in range(start, run.position):
                slot = run.tables[number][at // per_block]
                got = pool.at(slot, buffer)[at % per_block]
                assert got.tobytes() == wanted[at - start].tobytes(), (
                    f"token {at} of {run.position} of request {run.number} is wrong in layer {layer} {role} "
                    f"(group {number}, page {slot}) on rank {rank.number}: {got[:4]} is not {wanted[at - start][:4]}"
                )

    def _buffers(self) -> Iterator[tuple[Rank, int, int, int, str, int]]:
        """Rank, layer group, place in a page, layer, role, and whose bytes: of a rank, or (-1) of all."""
        for rank in self.ranks:
            for number, group in enumerate(self.toy.groups):
                for buffer, (layer, role) in enumerate(group.buffers):
                    same = self.toy.same_everywhere(group, role)
                    yield rank, number, buffer, layer, role, -1 if same else rank.number

    def _check_writes(self, who: str, loading: Sequence[Run]) -> None:
        for rank in self.ranks:
            for number, pool in enumerate(rank.pools.groups):
                allowed = {
                    run.tables[number][block]
                    for run in [*loading, *(run for run in self.runs if run.loading)]
                    for block in run.loadable(self.toy)
                    if run.tables[number][block] != BAD_PAGE
                }
                pool.check(allowed, f"{who} of rank {rank.number}")

    def _advance(self, run: Run, tokens: int) -> None:
        run.position += tokens
        if not self.reserving and not run.waits:
            run.loading = False
        if run.position >= len(run.request.tokens):
            digest = hashlib.sha256(run.states()[-1]).digest()
            run.request.tokens.append(int.from_bytes(digest[:4], "little") % VOCABULARY)
            if len(run.answer) >= run.answer_tokens:
                self._end(run)
                return
        self.blocks.reclaim(run, self.pools_of)

    def pools_of(self, number: int) -> list[Any]:
        """A layer group's pages on every rank."""
        return [rank.pools.groups[number] for rank in self.ranks]

    # ---------------------------------------------------------------------------------------------------------- ending

    def _end(self, run: Run) -> None:
        if self.layouts:
            pinned = self.scheduler.request_finished_by_layer_group(run.request, [list(t) for t in run.tables])
        else:
            pinned = self.scheduler.request_finished(run.request, list(run.tables[0]))
        self.trace.append("request_finished")
        assert isinstance(pinned, bool)
        if pinned:
            run.saving = True
            for rank in self.ranks:
                rank.outstanding["saving"].add(run.number)
        else:
            self._free(run)

    def _free(self, run: Run) -> None:
        run.loading, run.done = False, True
        self.blocks.free(run, self.pools_of)

    def _poll(self) -> None:
        started = [run.number for run in self.runs if run.waits and run.admitted and not run.polled]
        saving = [run.number for run in self.runs if run.saving and not run.saving_polled]
        if self.reserving:
            started = []
        for rank in self.ranks:
            rank.outstanding["loading"] |= set(started)
            saved, loaded = rank.worker.get_finished(list(saving), list(started))
            rank.report("saving", saved)
            rank.report("loading", loaded)
            if self.reserving:
                rank.report("prefix", rank.worker.get_finished_prefix_loads())
        for run in self.runs:
            run.polled |= run.number in started
            run.saving_polled |= run.number in saving
        self._check_writes("get_finished", [])
        self._act()

    def _act(self) -> None:
        """What all ranks have reported counts."""
        everywhere = {
            what: set.intersection(*(rank.reported[what] for rank in self.ranks))
            for what in ("saving", "loading", "prefix")
        }
        for rank in self.ranks:
            for what, ids in everywhere.items():
                rank.reported[what] -= ids
        for run in self.runs:
            if run.number in everywhere["loading"]:
                self._loaded(run)
            if run.number in everywhere["saving"]:
                self._free(run)
        for number in everywhere["prefix"]:
            run, start, end = self.reservations.pop(number)
            self.scheduler.release_prefix_reservation(run.request, number, start, end)
            self._loaded(run)

    def _loaded(self, run: Run) -> None:
        run.loaded = run.loaded or run.waits
        waited, run.waits, run.loading = run.waits, False, False
        if waited and run.aborted and not run.saving and not run.done:
            self._end(run)


def _arguments(address: str, toy: Toy, ranks: int, more: dict[str, Any]) -> Any:
    """`TorchLlmArgs`, as far as connectors look at them."""
    cache = {
        "tokens_per_block": toy.tokens_per_block,
        "enable_block_reuse": True,
        "enable_partial_reuse": False,
        "dtype": "auto",
        "host_cache_size": None,
    }
    values: dict[str, Any] = {
        "model": "toy",
        "dtype": "float32",
        "load_format": "auto",
        "max_seq_len": 4096,
        "attn_backend": "TRTLLM",
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": 1,
        "enable_attention_dp": False,
        "kv_cache_config": types.SimpleNamespace(**cache | more.pop("cache", {})),
        "kv_connector_config": types.SimpleNamespace(server_url=address),
        "scheduler_config": types.SimpleNamespace(capacity_scheduler_policy="GUARANTEED_NO_EVICT"),
    }
    return types.SimpleNamespace(**values | more)
