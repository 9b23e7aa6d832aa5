"""The reference engine: schedules requests over a paged KV cache of any mix of groups, greedily and reproducibly.

It does what real engines do that a cache must cope with: prompts are computed in pieces, several requests at once;
blocks are few and shared; window blocks and snapshots are dropped while a request runs; requests are preempted and
aborted; ranks are processes of their own. `scheduler.py` and `worker.py` beside it are the adapter to the cache.
"""

import itertools
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from lmcache.core.client import Client, ClientSettings, ServerAddress
from lmcache.core.protocol import Role
from lmcache.engines.reference.blocks import BlockPool, OutOfBlocks
from lmcache.engines.reference.describe import describe
from lmcache.engines.reference.messages import LoadOrder, Run, Setup, Step, StepDone
from lmcache.engines.reference.ranks import RANK_COMMAND, LocalRank, RankProcesses, Ranks
from lmcache.engines.reference.requests import Output, Request, State
from lmcache.engines.reference.scheduler import SchedulerConnector
from lmcache.engines.reference.shapes import ModelShape
from lmcache.engines.reference.tables import BlockTables, blocks_for
from lmcache.errors import ConfigError

IDLE_SECONDS = 0.0005
"""Pause between steps in which nothing can be computed, because lookups or loads are under way."""


class Engine:
    """One engine. Not thread-safe: one thread calls it. Without `server` it runs without the cache."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        server: str = "",
        seed: int = 0,
        ranks: int = 1,
        processes: bool = False,
        blocks: int = 512,
        step_tokens: int = 256,
        max_requests: int = 4,
        deadline: float = 1.0,
        rank_command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        """Start ranks, and connect to the cache server at `server` (`host:port`), if it is there.

        `blocks` is the size of the block pool, the null block included; `step_tokens` how many tokens a step computes
        at most; `deadline` the seconds that a request to the server may take. More than one rank means processes.
        """
        if shape.heads % ranks:
            raise ConfigError(f"{ranks} ranks do not divide {shape.heads} heads", remedy="use 1, 2 or 4")
        self.shape = shape
        self._step_tokens = step_tokens
        self._max_requests = max_requests
        self._blocks = blocks
        self._pool = BlockPool(blocks)
        self._tables = BlockTables(shape, self._pool)
        self._ids = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._outputs: dict[int, Output] = {}
        self._ended: list[int] = []
        setups = [Setup(shape, seed, rank, ranks, blocks, server, deadline) for rank in range(ranks)]
        self._ranks: Ranks = RankProcesses(setups, rank_command) if processes or ranks > 1 else LocalRank(setups[0])
        self._client: Client | None = None
        self._connector: SchedulerConnector | None = None
        if server:
            me = describe(shape, seed=seed, ranks=ranks, role=Role.SCHEDULER)
            self._client = Client(ServerAddress.parse(server), me, ClientSettings(deadline=deadline))
            self._connector = SchedulerConnector(self._client)
            self._client.start(wait=deadline)

    @property
    def client(self) -> Client | None:
        """The scheduler's client; None without a server."""
        return self._client

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Of ranks that are processes."""
        return self._ranks.pids

    @property
    def busy(self) -> bool:
        """Whether requests are under way."""
        return bool(self._requests)

    @property
    def unused_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.unused

    # ------------------------------------------------------------------------------------------------- what users call

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, salt: str = "") -> list[Output]:
        """Answer prompts, as many at once as the engine takes. Raises RankLost."""
        ids = [self.add(prompt, max_tokens, salt) for prompt in prompts]
        while any(request in self._requests for request in ids):
            self.step()
        return [self.take(request) for request in ids]

    def add(self, prompt: Sequence[int], max_tokens: int = 8, salt: str = "") -> int:
        """Queue a request; returns its id. Raises ConfigError for one that can never fit."""
        need = blocks_for(self.shape, len(prompt) + max_tokens)
        if not prompt or max_tokens < 1 or need >= self._blocks:
            raise ConfigError(
                f"a request of {len(prompt)} + {max_tokens} tokens needs {need} of {self._blocks - 1} blocks",
                remedy="give at least one token each, and no more than the pool holds",
            )
        request = Request(next(self._ids), self.shape, len(prompt), list(prompt), max_tokens, salt, time.perf_counter())
        self._requests[request.id] = request
        self._look_up(request)
        return request.id

    def abort(self, request_id: int) -> None:
        """End a request, wherever it stands. What is being loaded for it is released when the ranks are done."""
        request = self._requests.get(request_id)
        if request is None:
            return
        request.aborted = True
        if request.state is not State.LOADING:
            self._finish(request)

    def take(self, request_id: int) -> Output:
        """The output of a request that has ended; can be taken once. Raises KeyError while it has not."""
        return self._outputs.pop(request_id)

    def drop_prefix_cache(self) -> None:
        """Forget the KV of all prompts that the engine itself still holds."""
        self._pool.drop_cache()

    def close(self) -> None:
        """End ranks and leave the server. Idempotent."""
        self._ranks.close()
        if self._client:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------------- a step

    def step(self) -> None:
        """Schedule, compute, and take note of what has been loaded. Raises RankLost."""
        if self._connector:
            self._connector.tick()
        loads = self._admit_waiting()
        scheduled = self._schedule()
        offers = []
        if self._connector:
            for request, count in scheduled:
                tokens = request.tokens[: request.computed + count]
                offer = self._connector.offer(request.id, tokens, _copied(request.tables))
                offers += [offer] if offer else []
        runs = [
            Run(r.id, r.computed, r.tokens[r.computed : r.computed + count], _copied(r.tables))
            for r, count in scheduled
        ]
        ended, self._ended = self._ended, []
        done = self._ranks.step(Step(runs, loads, offers, ended))
        for rank, answer in enumerate(done):
            self._note_loads(rank, answer, len(done))
        for (request, count), logits in zip(scheduled, done[0].logits, strict=True):
            self._advance(request, count, logits)
        if not scheduled and self._requests:
            time.sleep(IDLE_SECONDS)

    def _schedule(self) -> list[tuple[Request, int]]:
        """Running requests and how many tokens of each are computed in this step, oldest first."""
        budget = self._step_tokens
        scheduled = []
        for request in self._in_state(State.RUNNING):
            count = min(budget, len(request.tokens) - request.computed)
            # it may have been preempted for an older one, a moment ago
            if count and request.state is State.RUNNING and self._make_room(request, request.computed + count):
                scheduled.append((request, count))
                budget -= count
        return scheduled

    def _advance(self, request: Request, count: int, logits: bytes) -> None:
        request.computed += count
        request.computed_tokens += count
        self._tables.remember(request)
        if request.computed == len(request.tokens):
            row = np.frombuffer(logits, np.float32)
            request.logits.append(row)
            request.tokens.append(int(row.argmax()))
            request.first_token_s = request.first_token_s or time.perf_counter() - request.arrived
        if request.finished:
            self._finish(request)
        else:
            self._tables.release_unneeded(request)

    def _in_state(self, state: State) -> list[Request]:
        return [request for request in self._requests.values() if request.state is state]

    # ----------------------------------------------------------------------------------------------- admitting, loading

    def _look_up(self, request: Request) -> None:
        if self._connector:
            self._connector.arrived(request.id, request.tokens, request.salt)

    def _admit_waiting(self) -> list[LoadOrder]:
        """Give blocks to waiting requests while there are enough; returns the loads that begin."""
        loads = []
        for request in self._in_state(State.WAITING):
            active = len(self._requests) - len(self._in_state(State.WAITING))
            if active >= self._max_requests or not self._tables.room_for(request):
                break
            hit = self._connector.hit(request.id) if self._connector else 0
            if hit is None:
                continue
            self._tables.take_own(request)
            if self._connector and hit > request.computed:
                loads.append(self._start_load(request, self._connector, hit))
            else:
                request.state = State.RUNNING
                if self._connector:
                    self._connector.drop(request.id)
        return loads

    def _start_load(self, request: Request, connector: SchedulerConnector, hit: int) -> LoadOrder:
        for group, numbers in connector.blocks_to_load(request.id, request.computed):
            self._tables.fill(request, group, numbers)
        request.state, request.loading_to = State.LOADING, hit
        request.reports, request.load_failed = set(), False
        return connector.load(request.id, request.computed, _copied(request.tables))

    def _note_loads(self, rank: int, done: StepDone, ranks: int) -> None:
        for request_id, well in itertools.chain(((r, True) for r in done.loaded), ((r, False) for r in done.failed)):
            request = self._requests[request_id]
            request.reports.add(rank)
            request.load_failed = request.load_failed or not well
            # until the last rank has reported, some rank may still write to the blocks
            if len(request.reports) == ranks:
                self._end_load(request)

    def _end_load(self, request: Request) -> None:
        if self._connector:
            self._connector.loaded(request.id, well=not request.load_failed)
        if request.aborted:
            self._finish(request)
        elif request.load_failed:
            request.load_failures += 1
            self._put_back(request)
        else:
            request.hit_tokens += request.loading_to - request.computed
            request.computed = request.loading_to
            request.state = State.RUNNING
            self._tables.release_unneeded(request)

    # ------------------------------------------------------------------------------------------- making room, ending

    def _make_room(self, request: Request, upto: int) -> bool:
        """Give the request blocks for its tokens up to `upto`, taking them from younger ones if need be."""
        while True:
            try:
                self._tables.extend(request, upto)
            except OutOfBlocks:
                youngest = self._in_state(State.RUNNING)[-1]
                self._put_back(youngest)
                if youngest is request:
                    return False
            else:
                return True

    def _put_back(self, request: Request) -> None:
        """Take all blocks from a request, which then waits to begin again: it was preempted, or its load has failed."""
        self._tables.release(request)
        request.state = State.WAITING
        self._look_up(request)

    def _finish(self, request: Request) -> None:
        self._tables.release(request)
        del self._requests[request.id]
        self._outputs[request.id] = request.output()
        if self._connector:
            self._connector.ended(request.id)
            self._ended.append(request.id)


def _copied(tables: list[list[int]]) -> list[list[int]]:
    """As they are now: ranks in this process, and loads, read them later."""
    return [list(table) for table in tables]
