"""Both halves of the vLLM connector as one small engine, with NumPy arrays in the place of vLLM's KV cache."""

import functools
import time
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from lmcache.core.client import Client, ClientSettings, Engine, ServerAddress
from lmcache.core.protocol import Role
from lmcache.engines.copy import Copier, Pages
from lmcache.engines.vllm.offering import Offering, Snapshot
from lmcache.engines.vllm.orders import StepOrders
from lmcache.engines.vllm.scheduler import SchedulerSide
from lmcache.engines.vllm.worker import WorkerSide
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

CHUNK, BLOCK, PAGE, BLOCKS = 32, 16, 4096, 64

Table = tuple[list[int], ...]
"""Block ids of a request, for each group."""


def full(shards: int = 1) -> KVGroup:
    """A full group of two layers."""
    return KVGroup(GroupKind.FULL, BLOCK, (PAGE, PAGE), shards=shards)


class Rank:
    """One worker: for each group two layers of pages that hold what the test writes, and the connector's half."""

    def __init__(
        self, client: Client, geometry: Geometry, rank: int, *, one_memory: bool, lost: Iterable[str] = ()
    ) -> None:
        memory = np.zeros((2, BLOCKS, PAGE), np.uint8)
        self.groups = {g: memory if one_memory else np.zeros_like(memory) for g in geometry.cached_groups}
        makers = {group: functools.partial(Copier, Pages(list(pages))) for group, pages in self.groups.items()}
        self.side = WorkerSide(client, geometry, rank, makers, lost=lost)

    @property
    def memory(self) -> np.ndarray:
        """Pages of the first group: layers, blocks, bytes."""
        return self.groups[0]

    def fill(self, blocks: list[int], seed: int, group: int = 0) -> np.ndarray:
        """Write bytes that depend on the seed to these blocks; returns a copy of them."""
        pages = self.groups[group]
        pages[:, blocks] = np.random.default_rng(seed).integers(0, 256, (2, len(blocks), PAGE), np.uint8)
        return pages[:, blocks].copy()


class Host:
    """An engine of some ranks; its requests are lists of tokens with block tables that the test chooses."""

    def __init__(
        self, port: int, geometry: Geometry, handed_over: Sequence[int] = (), *, one_memory: bool = False
    ) -> None:
        """With `one_memory` the groups' layers lie in the same bytes, as vLLM has pages of one size."""
        self.geometry = geometry
        self._port = port
        workers = [self._client(Role.WORKER, rank) for rank in range(geometry.ranks)]
        self.ranks = [Rank(client, self.geometry, rank, one_memory=one_memory) for rank, client in enumerate(workers)]
        scheduler = self._client(Role.SCHEDULER, 0)
        self.scheduler = SchedulerSide(scheduler, self.geometry, Offering(geometry, handed_over))
        self.clients = [*workers, scheduler]
        self.await_links()

    def _client(self, role: Role, rank: int) -> Client:
        engine = Engine({"engine": "test"}, self.geometry, role, rank)
        client = Client(ServerAddress(port=self._port), engine, ClientSettings(deadline=5.0, retry_max=0.1))
        client.start()
        return client

    def request(self, name: str, tokens: list[int]) -> SimpleNamespace:
        return SimpleNamespace(
            request_id=name,
            all_token_ids=tokens,
            num_tokens=len(tokens),
            num_prompt_tokens=len(tokens),
            num_computed_tokens=0,
            num_preemptions=0,
            cache_salt=None,
            lora_request=None,
            prompt_embeds=None,
            mm_features=[],
            resumable=False,
            skip_reading_prefix_cache=False,
            kv_transfer_params=None,
        )

    def matched(self, request: SimpleNamespace, computed: int = 0) -> int:
        while (answer := self.scheduler.matched(request, computed)[0]) is None:
            time.sleep(0.001)
        return answer

    def prefill(self, request: SimpleNamespace, table: Table, tokens: int, *snapshots: Snapshot) -> None:
        """One step that computes `tokens` of the request in these blocks, on every rank."""
        orders = self.scheduler.step(
            {request.request_id: tokens}, lambda _: table, {request.request_id: list(snapshots)}
        )
        request.num_computed_tokens += tokens
        for rank in self.ranks:
            rank.side.store(orders.stores, orders.namespace, orders.updates)

    def store(self, name: str, tokens: list[int], blocks: list[int]) -> None:
        """A request of one step, whose table has one group."""
        request = self.request(name, tokens)
        self.scheduler.arrived(request)
        self.prefill(request, (blocks,), len(tokens))
        self.end(request)

    def load(self, request: SimpleNamespace, table: Table, computed: int, external: int) -> set[str]:
        """Load into these blocks on every rank; returns the requests whose load failed."""
        self.scheduler.allocated(request, lambda: table, external)
        orders = self.scheduler.step({}, lambda _: None)
        return self.carry_out(orders)

    def carry_out(self, orders: StepOrders) -> set[str]:
        failed: set[str] = set()
        for rank in self.ranks:
            rank.side.load(orders.loads, orders.updates)
        for rank in self.ranks:
            ended: set[str] = set()
            while not ended:
                ended, lost = rank.side.outcomes([])
                failed |= lost
                time.sleep(0.001)
        self.scheduler.loaded([order.request for order in orders.loads], failed)
        return failed

    def end(self, request: SimpleNamespace) -> None:
        self.scheduler.ended(request)
        for rank in self.ranks:
            rank.side.outcomes([request.request_id])

    @property
    def epoch(self) -> str:
        return self.clients[0].link().epoch

    def await_links(self, other_than: str = "") -> None:
        """Return when every client has found a server whose epoch is another than this one."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                if all(client.link().epoch != other_than for client in self.clients):
                    return
            except ConnectionError:
                pass
            time.sleep(0.02)
        pytest.fail("the clients do not come back")

    def close(self) -> None:
        for rank in self.ranks:
            rank.side.close()
        self.scheduler.close()
