"""What both doors do with pages, beside a real server and with arrays for pools."""

import functools
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import gated_tier
import numpy as np
import pytest
from core_stand import wait_until
from device_order import DeviceOrder
from vllm_stand import ServerProcess

from lmcache.core.client import Client, ClientSettings, Engine, ServerAddress
from lmcache.core.protocol import Role
from lmcache.engines.copy import Copier
from lmcache.engines.copy import Pages as Memory
from lmcache.engines.sglang.page_keys import chain_hashes
from lmcache.engines.sglang.page_store import Pages, PageStore
from lmcache.engines.sglang.pools import Pool, build_geometry
from lmcache.errors import GeometryError
from lmcache.plugins.testing.ports import free_port

PAGE = 16


def hashes_of(name: str, pages: int) -> bytes:
    return chain_hashes([hashlib.sha256(f"{name} {page}".encode()).hexdigest() for page in range(pages)])


class Rank:
    """One rank with a pool of 32 pages, of two runs of memory each."""

    def __init__(
        self,
        port: int,
        rank: int = 0,
        ranks: int = 1,
        *,
        replicated: bool = False,
        name: str = "kv",
        run: int = 1000,
        device: DeviceOrder | None = None,
    ) -> None:
        self.memory = np.random.default_rng(rank).integers(0, 256, (2, 32, run), np.uint8)
        memory = Memory(list(self.memory))
        make = device.maker(memory) if device else functools.partial(Copier, memory)
        pool = Pool(name, (run, run), make, replicated, "an array")
        geometry = build_geometry([pool], PAGE, ranks, window=2 * PAGE)
        engine = Engine({"engine": "arrays"}, geometry, Role.WORKER, rank)
        client = Client(ServerAddress(port=port), engine, ClientSettings(deadline=2.0))
        client.start(2.0)
        self.store = PageStore(client, geometry, rank, {0: pool.make}, device, stream="the forward stream")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(free_port(), tmp_path / "server.log", "--chunk-size", "256", "--l1-cell-kb", "4")
    process.start()
    yield process
    process.kill()


@pytest.fixture
def rank(server: ServerProcess) -> Iterator[Rank]:
    rank = Rank(server.port)
    yield rank
    rank.store.close()


def test_pages_come_back_and_any_page_may_be_the_first_that_is_asked_for(rank: Rank) -> None:
    hashes = hashes_of("a", 6)
    wanted = rank.memory[:, [4, 9, 2, 7, 5, 1]].copy()
    assert rank.store.store(0, hashes, [4, 9, 2, 7, 5, 1])

    assert rank.store.restorable(hashes) == [1, 2, 3, 4, 5, 6]
    assert rank.store.restorable(hashes, longest=True) == [6]
    assert rank.store.restorable(hashes[32:] + hashes_of("b", 2)) == [1, 2, 3, 4]
    assert rank.store.load(hashes[32:], {0: Pages(0, [20, 21, 22, 23])}, whole=True) == 4
    assert np.array_equal(rank.memory[:, 20:24], wanted[:, 2:])
    assert rank.store.load(hashes + hashes_of("b", 1), {0: Pages(0, list(range(10, 17)))}, whole=False) == 6
    assert np.array_equal(rank.memory[:, 10:16], wanted)


def test_a_prefix_that_is_not_all_there_is_not_loaded_where_all_of_it_is_wanted(rank: Rank) -> None:
    hashes = hashes_of("a", 3)
    assert rank.store.store(0, hashes[:32], [1, 2])
    before = rank.memory.copy()

    assert rank.store.load(hashes, {0: Pages(0, [5, 6, 7])}, whole=True) == 0
    assert np.array_equal(rank.memory, before)


@pytest.mark.parametrize("parent", ["unknown", "never stored"])
def test_pages_whose_predecessor_is_not_there_are_stored_and_found_all_the_same(rank: Rank, parent: str) -> None:
    hashes = hashes_of("a", 5)
    before = b"" if parent == "unknown" else hashes[16:32]
    assert rank.store.store(0, hashes[32:], [1, 2, 3], before)
    assert rank.store.restorable(hashes[32:]) == [1, 2, 3]
    assert rank.store.restorable(hashes) == []

    assert rank.store.store(0, hashes[:32], [4, 5])
    assert rank.store.restorable(hashes) == [1, 2, 3, 4, 5]


def test_what_is_stored_already_is_left_alone(rank: Rank, server: ServerProcess) -> None:
    hashes = hashes_of("a", 3)
    wanted = rank.memory[:, 1:4].copy()
    assert rank.store.store(0, hashes[:32], [1, 2])
    rank.memory[:, 1:3] = 0
    assert rank.store.store(0, hashes, [1, 2, 3])
    assert rank.store.store(0, hashes, [1, 2, 3])

    assert server.settle()["counters"]["shards_committed"] == 3
    assert rank.store.load(hashes, {0: Pages(0, [4, 5, 6])}, whole=True) == 3
    assert np.array_equal(rank.memory[:, 4:7], wanted)


def test_pages_that_ranks_hold_in_parts_are_there_when_all_have_stored_theirs(server: ServerProcess) -> None:
    ranks = [Rank(server.port, rank, 2) for rank in range(2)]
    hashes = hashes_of("a", 2)
    assert ranks[0].store.store(0, hashes, [1, 2])
    assert [rank.store.restorable(hashes) for rank in ranks] == [[], []]

    assert ranks[1].store.store(0, hashes, [3, 4])
    assert [rank.store.restorable(hashes) for rank in ranks] == [[1, 2], [1, 2]]
    for rank, blocks in zip(ranks, ([1, 2], [3, 4]), strict=True):
        assert rank.store.load(hashes, {0: Pages(0, [8, 9])}, whole=True) == 2
        assert np.array_equal(rank.memory[:, 8:10], rank.memory[:, blocks])
        rank.store.close()
    assert server.quiet()["counters"]["shards_committed"] == 4


def test_pages_that_all_ranks_hold_alike_are_stored_by_one(server: ServerProcess) -> None:
    ranks = [Rank(server.port, rank, 2, replicated=True) for rank in range(2)]
    hashes = hashes_of("a", 2)
    assert ranks[1].store.store(0, hashes, [1, 2])
    assert ranks[0].store.load(hashes, {0: Pages(0, [8, 9])}, whole=True) == 2
    assert np.array_equal(ranks[0].memory[:, 8:10], ranks[1].memory[:, 1:3])
    for rank in ranks:
        rank.store.close()


def test_without_a_server_everything_is_a_miss_and_a_server_that_comes_is_used(tmp_path: Path) -> None:
    server = ServerProcess(free_port(), tmp_path / "server.log", "--l1-cell-kb", "4")
    rank = Rank(server.port)
    hashes = hashes_of("a", 2)
    assert not rank.store.linked
    assert rank.store.restorable(hashes) == []
    assert rank.store.load(hashes, {0: Pages(0, [1, 2])}, whole=False) == 0
    assert not rank.store.store(0, hashes, [1, 2])

    server.start()
    wait_until(lambda: rank.store.linked)
    assert rank.store.store(0, hashes, [1, 2])
    assert rank.store.restorable(hashes) == [1, 2]
    rank.store.close()
    server.kill()


def test_a_server_that_hangs_costs_one_deadline_and_then_nobody_waits(rank: Rank, server: ServerProcess) -> None:
    hashes = hashes_of("a", 2)
    assert rank.store.store(0, hashes, [1, 2])
    os.kill(server.pid, signal.SIGSTOP)
    try:
        assert rank.store.restorable(hashes) == []
        assert not rank.store.linked  # so whoever comes next is told at once
        assert rank.store.restorable(hashes) == []
    finally:
        os.kill(server.pid, signal.SIGCONT)
    wait_until(lambda: rank.store.linked)  # the server may count the link that was given up for a moment longer
    assert rank.store.restorable(hashes) == [1, 2]


def test_a_pool_whose_rule_nobody_knows_is_refused_by_name() -> None:
    pool = Pool("deepseek_v4_c4", (1000,), functools.partial(Copier, None), False, "")
    with pytest.raises(GeometryError, match="SGLang keeps a pool 'deepseek_v4_c4' for this model"):
        build_geometry([pool], PAGE, 1)


def test_a_window_of_unknown_length_is_refused() -> None:
    pool = Pool("swa", (1000,), functools.partial(Copier, None), False, "")
    with pytest.raises(GeometryError, match="does not say how long its window is"):
        build_geometry([pool], PAGE, 1)


def test_pages_that_leave_most_of_their_cells_empty_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for run, said in ((1000, 1), (2000, 0)):  # of cells of 4,096 bytes
        server = ServerProcess(free_port(), tmp_path / f"{run}.log", "--l1-cell-kb", "4")
        server.start()
        rank = Rank(server.port, run=run)
        caplog.clear()
        for name in "ab":
            assert rank.store.store(0, hashes_of(name, 2), [1, 2])
        assert [each.getMessage()[:60] for each in caplog.records if "--page-size" in each.getMessage()] == [
            "lmcache: a page of 16 tokens fills 49 % of the server's cells"[:60]
        ] * said
        rank.store.close()
        server.kill()


def test_on_a_device_pages_overlap_and_wait_for_forward_passes_not_for_the_device(server: ServerProcess) -> None:
    device = DeviceOrder()
    rank = Rank(server.port, device=device)
    hashes = hashes_of("overlapping", 4)
    assert rank.store.store(0, hashes, [3, 1, 4, 15])
    # by the thread that stores, in a stream of its own, once the events of SGLang have come
    assert device.seen == ["store"] * 4 + ["finish"]
    stored = rank.memory[:, [3, 1, 4, 15]].copy()
    device.seen.clear()
    assert rank.store.load(hashes, {0: Pages(0, [20, 21, 22, 23])}, whole=True) == 4
    assert device.seen == ["behind current and the forward stream", *["load"] * 4, "finish", "beside no more"]
    assert np.array_equal(rank.memory[:, 20:24], stored)
    rank.store.close()


def test_a_load_whose_pages_are_in_a_tier_waits_for_it_no_longer_than_it_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "blobs"
    folder.mkdir()
    flags = ("--l1-cell-kb", "4", "--plugin", gated_tier.__file__, "--l2", f"gated://{folder}?timeout_s=60")
    server = ServerProcess(free_port(), tmp_path / "server.log", *flags, "--l2-deadline-s", "60")
    server.start()
    rank = Rank(server.port)
    hashes = hashes_of("a", 2)
    wanted = rank.memory[:, [1, 2]].copy()
    assert rank.store.store(0, hashes, [1, 2])
    server.settle()
    rank.store.close()
    server.kill()
    server.start()
    rank = Rank(server.port)
    try:
        assert rank.store.load(hashes, {0: Pages(0, [5, 6])}, whole=True, patience=0.0) == 0
        assert len(rank.store._promotions) == 1  # it goes on at the server
        (folder / gated_tier.GATE).touch()
        wait_until(lambda: rank.store.load(hashes, {0: Pages(0, [5, 6])}, whole=True, patience=0.0) == 2)
        assert np.array_equal(rank.memory[:, [5, 6]], wanted)
    finally:
        rank.store.close()
        server.kill()
