"""Both halves of the connector on a real server: what is stored comes back, byte for byte, or not at all."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gated_tier
import numpy as np
import pytest
from core_stand import wait_until
from vllm_stand import ServerProcess
from worker_stand import BLOCK, BLOCKS, CHUNK, Host, Rank, full

from lmcache.core.link import Link
from lmcache.engines.storing import StoreOrder
from lmcache.geometry.groups import Geometry
from lmcache.plugins.testing.ports import free_port


@pytest.fixture
def host(server: ServerProcess) -> Iterator[Host]:
    host = Host(server.port, Geometry((full(),)))
    yield host
    host.close()


TOKENS = list(range(100, 100 + 3 * CHUNK + 5))
"""Three chunks and a rest: six blocks are stored."""


def test_pages_come_back_byte_for_byte_into_other_blocks(host: Host, server: ServerProcess) -> None:
    pages = host.ranks[0].fill([9, 3, 30, 4, 5, 63, 7], seed=1)
    host.store("a", TOKENS, [9, 3, 30, 4, 5, 63, 7])
    again = host.request("b", TOKENS)
    host.scheduler.arrived(again)
    assert host.matched(again) == 3 * CHUNK
    before = host.ranks[0].memory.copy()
    target = [20, 11, 12, 40, 13, 14, 15]
    assert host.load(again, (target,), 0, 3 * CHUNK) == set()
    assert np.array_equal(host.ranks[0].memory[:, target[:6]], pages[:, :6])
    untouched = [block for block in range(BLOCKS) if block not in target[:6]]
    assert np.array_equal(host.ranks[0].memory[:, untouched], before[:, untouched])
    server.quiet()


def test_what_the_engine_holds_itself_is_never_written(host: Host, server: ServerProcess) -> None:
    pages = host.ranks[0].fill([1, 2, 3, 4, 5, 6, 7], seed=2)
    host.store("a", TOKENS, [1, 2, 3, 4, 5, 6, 7])
    again = host.request("b", TOKENS)
    host.scheduler.arrived(again)
    computed = CHUNK + BLOCK
    assert host.matched(again, computed) == 3 * CHUNK - computed
    target = [20, 21, 22, 23, 24, 25]
    shared = host.ranks[0].fill(target[:3], seed=3)
    assert host.load(again, (target,), computed, 3 * CHUNK - computed) == set()
    assert np.array_equal(host.ranks[0].memory[:, target[:3]], shared)
    assert np.array_equal(host.ranks[0].memory[:, target[3:]], pages[:, 3:6])
    server.quiet()


@pytest.mark.parametrize(("shards", "stored"), [(2, 6), (1, 3)])
def test_two_ranks_each_get_their_own_bytes_and_equal_bytes_are_stored_once(
    server: ServerProcess, shards: int, stored: int
) -> None:
    host = Host(server.port, Geometry((full(shards),), 2))
    try:
        blocks = [1, 2, 3, 4, 5, 6]
        pages = [rank.fill(blocks, seed=number if shards == 2 else 0) for number, rank in enumerate(host.ranks)]
        host.store("a", TOKENS, blocks)
        assert server.settle()["counters"]["shards_committed"] == stored
        again = host.request("b", TOKENS)
        host.scheduler.arrived(again)
        assert host.matched(again) == 3 * CHUNK
        assert host.load(again, ([10, 11, 12, 13, 14, 15],), 0, 3 * CHUNK) == set()
        for rank, own in zip(host.ranks, pages, strict=True):
            assert np.array_equal(rank.memory[:, 10:16], own)
        server.quiet()
    finally:
        host.close()


def test_a_chunk_that_one_rank_of_two_did_not_store_is_no_hit(server: ServerProcess) -> None:
    host = Host(server.port, Geometry((full(2),), 2))
    try:
        request = host.request("a", TOKENS)
        host.scheduler.arrived(request)
        orders = host.scheduler.step({"a": len(TOKENS)}, lambda _: ([1, 2, 3, 4, 5, 6],))
        host.ranks[0].side.store(orders.stores, orders.namespace)
        host.end(request)
        again = host.request("b", TOKENS)
        host.scheduler.arrived(again)
        assert host.matched(again) == 0
    finally:
        host.close()


def test_one_failing_rank_of_two_fails_the_load_and_leaves_no_ticket(server: ServerProcess) -> None:
    host = Host(server.port, Geometry((full(2),), 2))
    try:
        host.store("a", TOKENS, [1, 2, 3, 4, 5, 6])
        again = host.request("b", TOKENS)
        host.scheduler.arrived(again)
        host.matched(again)
        host.ranks[1].side._loader._copy_in = lambda *_: 1 / 0
        assert host.load(again, ([10, 11, 12, 13, 14, 15],), 0, 3 * CHUNK) == {"b"}
        assert host.matched(again) == 0
        server.quiet()
    finally:
        host.close()


def test_a_request_that_runs_while_the_server_is_restarted_is_stored_whole(host: Host, server: ServerProcess) -> None:
    blocks = [1, 2, 3, 4, 5, 6]
    pages = host.ranks[0].fill(blocks, seed=4)
    request = host.request("a", TOKENS)
    host.scheduler.arrived(request)
    host.prefill(request, (blocks,), CHUNK + 1)
    epoch = host.epoch
    server.kill()
    host.prefill(request, (blocks,), CHUNK)
    server.start()
    host.await_links(epoch)
    while not server.settle()["gauges"]["nodes"]:
        # a step with nothing new for the cache, in which scheduler and worker find the new server
        host.prefill(request, (blocks,), 0)
    host.prefill(request, (blocks,), CHUNK - 1)
    host.end(request)
    again = host.request("b", TOKENS)
    host.scheduler.arrived(again)
    assert host.matched(again) == 3 * CHUNK
    assert host.load(again, ([10, 11, 12, 13, 14, 15],), 0, 3 * CHUNK) == set()
    assert np.array_equal(host.ranks[0].memory[:, 10:16], pages)
    server.quiet()


def test_a_worker_that_finds_a_new_server_offers_what_the_old_one_had_before_what_is_new(
    host: Host, server: ServerProcess
) -> None:
    host.ranks[0].fill([1, 2, 3, 4], seed=6)
    namespace, epoch = host.clients[0].link().namespace, host.epoch
    hashes = bytes(range(32))
    host.ranks[0].side.store([StoreOrder("a", "", 0, hashes[:16], ([1, 2],))], namespace)
    server.kill()
    server.start()
    host.await_links(epoch)
    # the scheduler made this order before it knew
    host.ranks[0].side.store([StoreOrder("a", "", 1, hashes[16:], ([3, 4],))], namespace)
    assert server.settle()["gauges"]["nodes"] == 2


def test_a_ticket_of_an_earlier_server_is_not_loaded(host: Host, server: ServerProcess) -> None:
    host.store("a", TOKENS, [1, 2, 3, 4, 5, 6])
    again = host.request("b", TOKENS)
    host.scheduler.arrived(again)
    assert host.matched(again) == 3 * CHUNK
    epoch = host.epoch
    server.kill()
    server.start()
    host.await_links(epoch)
    assert host.load(again, ([10, 11, 12, 13, 14, 15],), 0, 3 * CHUNK) == {"b"}
    server.quiet()


def test_a_chunk_whose_parent_was_evicted_is_stored_again_from_the_start(host: Host, server: ServerProcess) -> None:
    request = host.request("a", TOKENS)
    host.scheduler.arrived(request)
    blocks = [1, 2, 3, 4, 5, 6]
    host.ranks[0].fill(blocks, seed=5)
    host.prefill(request, (blocks,), CHUNK)
    # as if the first chunk had gone: this worker believes in a chunk that the server does not know
    stored = host.ranks[0].side._storer._stored["a"]
    stored.hashes[:16] = bytes(16)
    request.num_computed_tokens = CHUNK
    host.prefill(request, (blocks,), 2 * CHUNK)
    assert stored.done == {0: 3}
    assert server.settle()["gauges"]["nodes"] == 4


def test_orders_for_another_namespace_are_left_alone(host: Host, server: ServerProcess) -> None:
    order = StoreOrder("a", "", 0, bytes(16), ([1, 2],))
    host.ranks[0].side.store([order], b"another")
    assert server.settle()["gauges"]["nodes"] == 0


def test_a_store_that_fails_half_way_gives_its_cells_back(
    host: Host, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    host.store("a", TOKENS, [1, 2, 3, 4, 5, BLOCKS])  # vLLM has no such block
    report = server.quiet()
    assert (report["gauges"]["nodes"], report["counters"]["chunks_aborted"]) == (0, 3)
    assert "the engine goes on" in caplog.text


def test_a_store_that_finds_the_link_broken_says_nothing_and_loses_nothing(
    host: Host, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Link.commit

    def lose(link: Link, reservation: int) -> None:
        link.close()
        commit(link, reservation)

    monkeypatch.setattr(Link, "commit", lose)
    host.store("a", TOKENS, [1, 2, 3, 4, 5, 6])
    monkeypatch.undo()
    host.await_links()
    while server.settle()["gauges"]["reservations"]:
        time.sleep(0.01)
    assert server.quiet()["gauges"]["nodes"] == 0


def test_a_request_whose_store_fails_keeps_no_other_out_and_the_log_short(
    host: Host, server: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = host.ranks[0].fill([1, 2, 3, 4, 5, 6], seed=9)
    for step in range(2):
        bad, good = host.request(f"bad {step}", [step, *TOKENS]), host.request(f"good {step}", [step + 7, *TOKENS])
        for request in (bad, good):
            host.scheduler.arrived(request)
        tables = {bad.request_id: ([1, 2, 3, 4, 5, BLOCKS],), good.request_id: ([1, 2, 3, 4, 5, 6],)}
        orders = host.scheduler.step(dict.fromkeys(tables, len(TOKENS)), tables.__getitem__)
        host.ranks[0].side.store(orders.stores, orders.namespace)
        for request in (bad, good):
            host.end(request)
        again = host.request(f"again {step}", good.all_token_ids)
        host.scheduler.arrived(again)
        assert host.matched(again) == 3 * CHUNK
        assert host.load(again, ([10, 11, 12, 13, 14, 15],), 0, 3 * CHUNK) == set()
        assert np.array_equal(host.ranks[0].memory[:, 10:16], wanted)
    report = server.quiet()
    assert (report["gauges"]["nodes"], report["counters"]["chunks_aborted"]) == (6, 6)
    assert caplog.text.count("the engine goes on") == 1


def test_what_was_ordered_before_the_weights_changed_is_neither_stored_nor_counts_as_loaded(
    host: Host, server: ServerProcess
) -> None:
    [rank] = host.ranks
    host.store("a", TOKENS, [1, 2, 3, 4, 5, 6])
    updates = rank.side._updates
    found = host.request("found", TOKENS)
    host.scheduler.arrived(found)
    assert host.matched(found) == 3 * CHUNK
    assert rank.side.news() is None
    updates.count += 1
    assert host.load(found, ([10, 11, 12, 13, 14, 15],), 0, 3 * CHUNK) == {"found"}
    host.store("b", [7, *TOKENS], [1, 2, 3, 4, 5, 6])
    assert server.settle()["gauges"]["nodes"] == 3
    # from when the scheduler has heard of it, there is a cache again, with nothing of before
    host.scheduler.updated(rank.side.news())
    for cached in (0, 3 * CHUNK):
        request = host.request(f"after {cached}", TOKENS)
        host.scheduler.arrived(request)
        assert host.matched(request) == cached
        if cached:
            assert host.load(request, ([20, 21, 22, 23, 24, 25],), 0, cached) == set()
        else:
            host.prefill(request, ([1, 2, 3, 4, 5, 6],), len(TOKENS))
        host.end(request)
    assert rank.side.news() is None
    assert np.array_equal(rank.memory[:, 20:26], rank.memory[:, 1:7])
    # a load that has begun when they change has read what was computed with the old ones
    last = host.request("last", TOKENS)
    host.scheduler.arrived(last)
    assert host.matched(last) == 3 * CHUNK
    copy = rank.side._loader._copy_in

    def change(link: Link, copies: Any) -> None:
        copy(link, copies)
        updates.count += 1

    rank.side._loader._copy_in = change
    assert host.load(last, ([30, 31, 32, 33, 34, 35],), 0, 3 * CHUNK) == {"last"}
    server.quiet()


def test_a_request_that_goes_while_a_tier_is_read_leaves_nothing_to_wait_for(tmp_path: Path) -> None:
    folder = tmp_path / "blobs"
    folder.mkdir()
    flags = ("--chunk-size", str(CHUNK), "--plugin", gated_tier.__file__, "--l2", f"gated://{folder}?timeout_s=60")
    server = ServerProcess(free_port(), tmp_path / "server.log", *flags, "--l2-deadline-s", "60")
    server.start()
    host = Host(server.port, Geometry((full(),)))
    pages = host.ranks[0].fill([1, 2, 3, 4, 5, 6], seed=5)
    host.store("a", TOKENS, [1, 2, 3, 4, 5, 6])
    server.settle()
    epoch = host.epoch
    server.kill()
    server.start()
    host.await_links(epoch)
    try:
        request = host.request("b", TOKENS)
        host.scheduler.arrived(request)
        assert host.scheduler.matched(request, 0) == (None, False)
        tracked = host.scheduler._tracked["b"].state
        wait_until(lambda: tracked.pending.poll() or tracked.pending.promised, "the server says that it looks further")
        host.scheduler.ended(request)
        assert not host.scheduler.busy()
        (folder / gated_tier.GATE).touch()
        server.quiet()
        again = host.request("c", TOKENS)
        host.scheduler.arrived(again)
        assert host.matched(again) == 3 * CHUNK
        assert host.load(again, ([10, 11, 12, 13, 14, 15],), 0, 3 * CHUNK) == set()
        assert np.array_equal(host.ranks[0].memory[:, 10:16], pages)
    finally:
        host.close()
        server.kill()


def test_loads_into_pages_that_were_allocated_anew_meanwhile_are_told_as_failed(
    host: Host, server: ServerProcess
) -> None:
    host.store("a", TOKENS, [1, 2, 3, 4, 5, 6])
    again = host.request("b", TOKENS)
    host.scheduler.arrived(again)
    assert host.matched(again) == 3 * CHUNK
    host.scheduler.allocated(again, lambda: ([10, 11, 12, 13, 14, 15],), 3 * CHUNK)
    orders = host.scheduler.step({}, lambda _: None)
    [rank] = host.ranks
    rank.side.load(orders.loads)
    assert rank.side.unfinished == {"b"}
    other = Rank(host.clients[0], host.geometry, 0, one_memory=False, lost=rank.side.unfinished)
    assert other.side.unfinished == {"b"}
    assert other.side.outcomes([]) == ({"b"}, {"b"})
    assert other.side.outcomes([]) == (set(), set())
    host.scheduler.loaded({"b"}, {"b"})
    assert host.matched(again) == 0
    other.side._loader.close()
    wait_until(lambda: rank.side.outcomes([])[0])
    server.quiet()
