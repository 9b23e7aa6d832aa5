"""Groups of every kind at once, through both halves of the connector and a real server, byte for byte."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from vllm_stand import ServerProcess
from worker_stand import BLOCKS, CHUNK, PAGE, Host, Table, full

from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

FULL, WINDOW, STATE, SCRATCH, SPAN = range(5)
PAGES = (PAGE, PAGE)
MIXED = Geometry(
    (
        full(),
        # half a chunk: one block of 16 tokens is kept
        KVGroup(GroupKind.SLIDING_WINDOW, 16, PAGES, window=12),
        KVGroup(GroupKind.RECURRENT, CHUNK, PAGES),
        KVGroup(GroupKind.SCRATCH, 0, ()),
        # reaches over two chunks
        KVGroup(GroupKind.CHUNKED_LOCAL, 8, PAGES, window=2 * CHUNK),
    )
)
TOKENS = list(range(100, 100 + 3 * CHUNK + 5))
TABLE: Table = (
    [1, 2, 3, 4, 5, 6, 7],
    [11, 12, 13, 14, 15, 16, 17],
    [21, 22, 23, 24],
    [9],
    list(range(31, 44)),
)
"""Where the prompt is computed. Ids are unique across groups, as in vLLM."""


@pytest.fixture
def host(server: ServerProcess) -> Iterator[Host]:
    host = Host(server.port, MIXED, handed_over=[STATE])
    for group, pages in host.ranks[0].groups.items():
        pages[:] = np.random.default_rng(group).integers(0, 256, pages.shape, np.uint8)
    yield host
    host.close()


def store(host: Host, table: Table = TABLE, tokens: int = 3 * CHUNK + 5, name: str = "a") -> SimpleNamespace:
    """A prompt that one step computes; vLLM keeps the states after the second and the third chunk."""
    request = host.request(name, TOKENS)
    host.scheduler.arrived(request)
    snapshots = [(STATE, table[STATE][chunk], (chunk + 1) * CHUNK) for chunk in (1, 2)]
    host.prefill(request, table, tokens, *snapshots)
    return request


def look_up(host: Host, tokens: int, computed: int = 0) -> tuple[SimpleNamespace, int]:
    """A request for the prompt's first tokens, `computed` of which the engine has itself, and how many more hit."""
    again = host.request("again", TOKENS[:tokens])
    host.scheduler.arrived(again)
    return again, host.matched(again, computed)


def test_each_group_gets_back_what_a_hit_reads_and_nothing_else_is_written(host: Host, server: ServerProcess) -> None:
    host.end(store(host))
    before = {group: pages.copy() for group, pages in host.ranks[0].groups.items()}
    again, hit = look_up(host, 3 * CHUNK + 5)
    assert hit == 3 * CHUNK
    # as vLLM lays it out: null blocks where the next token reads nothing
    target: Table = (
        [51, 52, 53, 54, 55, 56],
        [0, 0, 0, 0, 0, 57],
        [0, 0, 58],
        [8],
        [0] * 8 + [59, 60, 61, 62],
    )
    assert host.load(again, target, 0, hit) == set()
    moved = {
        FULL: dict(zip([51, 52, 53, 54, 55, 56], [1, 2, 3, 4, 5, 6], strict=True)),
        WINDOW: {57: 16},
        STATE: {58: 23},
        SPAN: dict(zip([59, 60, 61, 62], [39, 40, 41, 42], strict=True)),
    }
    for group, pages in host.ranks[0].groups.items():
        for block in range(BLOCKS):
            assert np.array_equal(pages[:, block], before[group][:, moved[group].get(block, block)]), (group, block)
    server.quiet()


def test_a_chunk_end_without_a_state_is_no_hit(host: Host, server: ServerProcess) -> None:
    host.end(store(host))
    assert [look_up(host, tokens)[1] for tokens in (CHUNK + 5, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK)] == [
        0,
        0,
        2 * CHUNK,
        2 * CHUNK,
    ]


def test_null_blocks_are_never_stored(host: Host, server: ServerProcess) -> None:
    behind: Table = (TABLE[FULL], [0, 0, 0, 14, 15, 16, 17], TABLE[STATE], [9], [0] * 8 + TABLE[SPAN][8:])
    host.end(store(host, behind))
    # the first chunk of the span lies behind it, and so does the second: they cannot be loaded
    assert look_up(host, 3 * CHUNK + 1)[1] == 3 * CHUNK
    assert server.settle()["counters"]["shards_committed"] == 3 + 2 + 2 + 1


def test_window_blocks_are_stored_in_their_step_or_not_at_all(host: Host, server: ServerProcess) -> None:
    request = host.request("a", TOKENS)
    host.scheduler.arrived(request)
    orders = host.scheduler.step({"a": CHUNK}, lambda _: TABLE, {"a": [(STATE, 21, CHUNK)]})
    request.num_computed_tokens = CHUNK
    # the worker hears of the first chunk, and cannot store it in that step
    host.ranks[0].side.store(orders.stores, b"another namespace")
    # vLLM gives the blocks behind the window to another request, which writes to them
    host.ranks[0].groups[WINDOW][:, [11, 12]] = 255
    host.ranks[0].groups[STATE][:, 21] = 255
    later: Table = (TABLE[FULL], [0, 0, 13, 14, 15, 16, 17], [0, 22, 23], [9], TABLE[SPAN])
    host.prefill(request, later, 2 * CHUNK + 5, (STATE, 23, 3 * CHUNK))
    host.end(request)
    assert look_up(host, CHUNK + 1)[1] == 0
    # full: all three, window and span: those of this step, state: the one that was handed over
    assert server.settle()["counters"]["shards_committed"] == 3 + 2 + 2 + 1


def test_a_hit_is_not_loaded_into_the_null_block(host: Host, server: ServerProcess) -> None:
    host.end(store(host))
    again, hit = look_up(host, 3 * CHUNK + 5)
    null = host.ranks[0].groups[WINDOW][:, 0].copy()
    assert host.load(again, ([51, 52, 53, 54, 55, 56], [0] * 6, [0, 0, 58], [8], [0] * 8 + [59, 60, 61, 62]), 0, hit)
    assert np.array_equal(host.ranks[0].groups[WINDOW][:, 0], null)
    assert host.matched(again) == 0
    server.quiet()


def test_what_the_engine_holds_of_each_group_is_not_written(host: Host, server: ServerProcess) -> None:
    host.end(store(host))
    computed = 2 * CHUNK + 16
    again, more = look_up(host, 3 * CHUNK + 5, computed)
    assert more == 16
    before = {group: pages.copy() for group, pages in host.ranks[0].groups.items()}
    target: Table = ([51, 52, 53, 54, 55, 56], [0, 0, 0, 0, 57, 58], [0, 0, 59], [8], [0] * 8 + [60, 61, 62, 63])
    assert host.load(again, target, computed, more) == set()
    written = {
        group: [b for b in range(BLOCKS) if not np.array_equal(pages[:, b], before[group][:, b])]
        for group, pages in host.ranks[0].groups.items()
    }
    assert written == {FULL: [56], WINDOW: [58], STATE: [59], SPAN: [62, 63]}


def test_a_rank_that_stores_states_need_not_wait_for_the_one_that_stores_attention(server: ServerProcess) -> None:
    # all ranks hold the same latent vectors, each its own part of the state
    geometry = Geometry((full(shards=1), KVGroup(GroupKind.RECURRENT, CHUNK, PAGES, shards=2)), 2)
    host = Host(server.port, geometry, handed_over=[1])
    try:
        table: Table = ([1, 2, 3, 4, 5, 6, 7], [21, 22, 23, 24])
        host.ranks[0].fill(table[0], seed=1)
        host.ranks[1].fill(table[0], seed=1)
        states = [rank.fill([23], seed=2 + number, group=1) for number, rank in enumerate(host.ranks)]
        request = host.request("a", TOKENS)
        host.scheduler.arrived(request)
        orders = host.scheduler.step({"a": len(TOKENS)}, lambda _: table, {"a": [(1, 23, 3 * CHUNK)]})
        for first in (1, 0):
            host.ranks[first].side.store(orders.stores, orders.namespace)
        assert server.settle()["counters"]["shards_committed"] == 3 + 2
        host.end(request)
        again, hit = look_up(host, 3 * CHUNK + 5)
        assert hit == 3 * CHUNK
        assert host.load(again, ([51, 52, 53, 54, 55, 56], [0, 0, 57]), 0, hit) == set()
        for rank, state in zip(host.ranks, states, strict=True):
            assert np.array_equal(rank.groups[1][:, [57]], state)
    finally:
        host.close()


def test_groups_that_share_one_memory_do_not_disturb_each_other(server: ServerProcess) -> None:
    geometry = Geometry((full(), KVGroup(GroupKind.SLIDING_WINDOW, 16, PAGES, window=16)))
    host = Host(server.port, geometry, one_memory=True)
    try:
        shared = host.ranks[0].groups[0]
        shared[:] = np.random.default_rng(5).integers(0, 256, shared.shape, np.uint8)
        before = shared.copy()
        request = host.request("a", TOKENS)
        host.scheduler.arrived(request)
        host.prefill(request, ([1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17]), len(TOKENS))
        host.end(request)
        again, hit = look_up(host, len(TOKENS))
        assert host.load(again, ([51, 52, 53, 54, 55, 56], [0] * 5 + [57]), 0, hit) == set()
        moved = dict(zip([51, 52, 53, 54, 55, 56, 57], [1, 2, 3, 4, 5, 6, 16], strict=True))
        for block in range(BLOCKS):
            assert np.array_equal(shared[:, block], before[:, moved.get(block, block)]), block
    finally:
        host.close()
