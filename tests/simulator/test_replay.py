"""Replays of traces that are small enough to follow by hand: every count is exact."""

import json
from collections.abc import Iterator, Sequence

import pytest

from lmcache.core.policy import ChunkNode, EvictionPolicy
from lmcache.core.recording import FORMAT
from lmcache.plugins.eviction.lru import LRU
from lmcache.simulator.capacity import fit_capacities, parse_capacity
from lmcache.simulator.compare import compare
from lmcache.simulator.opt import Opt, next_uses
from lmcache.simulator.reading import TraceError, read_trace
from lmcache.simulator.replay import BatchCache, Outcome, Replay, replay
from lmcache.simulator.trace import Trace

ALTERNATING = ([1, 2], [3, 4], [1, 2], [5, 6], [3, 4], [1, 2])
"""With room for four chunks, who goes by the last use keeps 5 and 6, which nobody asks for again."""


def run(trace: Trace, chunks: int, policy: EvictionPolicy, *, batches: bool = False) -> Outcome:
    (capacity,) = fit_capacities([parse_capacity(str(chunks))], trace)
    return replay(trace, capacity, policy, batches=batches)


def hits(trace: Trace, chunks: int, policy: EvictionPolicy) -> list[int]:
    """Chunks that hit, request by request."""
    replaying = Replay(trace, chunks, policy)
    return [replaying.take(number, event) // 512 for number, event in enumerate(trace.events)]


def test_lru_hits_what_was_used_last(make_trace) -> None:
    trace = make_trace(*ALTERNATING)

    assert hits(trace, 4, LRU()) == [0, 0, 2, 0, 0, 0]
    # 5 and 6 take the place of 3 and 4, these that of 1 and 2, and these again that of 5 and 6
    assert run(trace, 4, LRU()).chunks_evicted == 6


def test_the_optimum_does_not_even_store_what_never_comes_back(make_trace) -> None:
    trace = make_trace(*ALTERNATING)

    assert hits(trace, 4, Opt(next_uses(trace))) == [0, 0, 2, 0, 2, 2]
    outcome = run(trace, 4, Opt(next_uses(trace)))
    assert (outcome.tokens_hit, outcome.tokens_asked, outcome.chunks_evicted) == (6 * 512, 12 * 512, 0)


def test_the_optimum_evicts_what_is_asked_for_last_of_all(make_trace) -> None:
    # when 3 comes there is room for one more beside 1; of 2 and 3, 3 is asked for first
    trace = make_trace([1], [2], [3], [1], [3], [1], [2])

    assert hits(trace, 2, Opt(next_uses(trace))) == [0, 0, 0, 1, 1, 1, 0]


def test_a_prompt_hits_its_leading_chunks_only(make_trace) -> None:
    trace = make_trace([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 4])

    assert hits(trace, 16, LRU()) == [0, 2, 4]
    # the first prompt loses its end when the second needs room, and its beginning is what is left of it
    assert hits(trace, 5, LRU()) == [0, 2, 2]


def test_at_the_watermark_room_is_made_before_it_is_needed(make_trace) -> None:
    trace = make_trace([1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [1, 2])
    exact, batches = run(trace, 10, LRU()), run(trace, 10, LRU(), batches=True)

    assert (exact.tokens_hit, exact.chunks_evicted) == (2 * 512, 0)
    # 8 of 10 are full: a fifth of 8 is 1, for each of the four chunks that come now
    assert (batches.tokens_hit, batches.chunks_evicted) == (0, 4)


def test_a_batch_is_a_fifth_of_what_is_there(make_trace) -> None:
    trace = make_trace(*([number] for number in range(41)))
    replaying = Replay(trace, 50, LRU(), batches=True)
    for number, event in enumerate(trace.events):
        replaying.take(number, event)

    assert isinstance(replaying.cache, BatchCache)
    # the 41st finds 40 of 50 full, and 8 go
    assert replaying.cache.allocator.used == 33
    assert replaying.cache.counters.chunks_evicted == 8


def test_of_a_prompt_that_is_larger_than_the_cache_the_beginning_is_kept(make_trace) -> None:
    trace = make_trace([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    outcome = run(trace, 4, LRU())

    # of the four chunks that were kept, one engine may load half of the cache at once, as from a server
    assert (outcome.tokens_hit, outcome.tokens_asked, outcome.chunks_evicted) == (2 * 512, 12 * 512, 0)


def test_a_policy_cannot_have_a_trunk_evicted_before_its_branches(make_trace) -> None:
    class RootsFirst(EvictionPolicy):
        name = "roots-first"

        def __init__(self) -> None:
            self.nodes: dict[ChunkNode, None] = {}

        def insert(self, node: ChunkNode) -> None:
            self.nodes[node] = None

        def touch(self, nodes: Sequence[ChunkNode]) -> None:
            pass

        def remove(self, node: ChunkNode) -> None:
            del self.nodes[node]

        def victims(self) -> Iterator[ChunkNode]:
            return iter(sorted(self.nodes, key=lambda node: node.depth))

    trace = make_trace([1, 2, 3], [4, 5, 6], [1, 2, 3])

    assert hits(trace, 5, RootsFirst()) == [0, 0, 2]


def test_a_policy_that_fails_is_replayed_by_last_use_and_its_failures_are_counted(make_trace) -> None:
    class Broken(LRU):
        name = "broken"

        def victims(self) -> Iterator[ChunkNode]:
            raise RuntimeError("no idea")

    trace = make_trace(*ALTERNATING)
    outcome = run(trace, 4, Broken())

    # as with LRU: 3 and 4 go for 5 and 6, then 1 and 2, then 5 and 6; it was asked once for each prompt that was stored
    assert (outcome.tokens_hit, outcome.chunks_evicted, outcome.policy_errors) == (2 * 512, 6, 3)


def test_every_policy_gets_a_cache_of_its_own_and_the_optimum_comes_last(make_trace) -> None:
    trace = make_trace(*ALTERNATING)
    heard: list[int] = []
    found = compare(trace, [parse_capacity("4"), parse_capacity("100%")], [LRU, LRU], progress=heard.append)

    assert found.policies == ["LRU", "LRU", "opt"]
    assert [[outcome.tokens_hit // 512 for outcome in outcomes] for _, outcomes in found.rows] == [[2, 2, 6], [6, 6, 6]]
    assert found.most == 0.5
    assert sum(heard) == 6 * len(trace.events)


def test_what_a_recorded_engine_had_hit_is_stored_where_a_replay_misses_it(tmp_path) -> None:
    """It stored what followed its hit only; in a smaller cache, it would have computed and stored the hit as well."""
    path = tmp_path / "recording.jsonl"
    path.write_text(
        f'{{"event": "recording", "format": {FORMAT}, "recording": "a", "part": 1, "policy": "LRU", "cells": 99, '
        '"cell_bytes": 4096}\n'
        '{"event": "namespace", "namespace": 0, "digest": "aa", "model": "m", "chunk_size": 16, "geometry": '
        '{"groups": [{"kind": "full", "tokens_per_block": 16, "page_bytes": [4096]}]}}\n'
        '{"event": "lookup", "timestamp": 1, "input_length": 65, "output_length": 0, "hash_ids": [1, 2, 3, 4], '
        '"namespace": 0, "tenant": "", "hit_length": 32}\n'
        '{"event": "store", "timestamp": 2, "input_length": 0, "output_length": 0, "hash_ids": [3, 4], '
        '"namespace": 0, "tenant": "", "parent": 2, "groups": [0]}\n'
        '{"event": "lookup", "timestamp": 3, "input_length": 64, "output_length": 0, "hash_ids": [1, 2, 3, 4], '
        '"namespace": 0, "tenant": "", "hit_length": 48}\n'
    )
    trace = read_trace(path)
    replaying = Replay(trace, 99, LRU())

    # the second prompt's last chunk is whole, but one token has to be computed
    assert [replaying.take(number, event) for number, event in enumerate(trace.events)] == [0, 0, 48]
    assert trace.recorded
    assert (trace.recorded.tokens_hit, trace.recorded.tokens_asked) == (80, 128)


def test_what_requests_said_of_their_chunks_holds_in_the_replay(tmp_path) -> None:
    """A TTL by the times of the recording, and low before normal, whatever the policy."""

    def event(kind: str, at: int, ids: list[int], **said: object) -> str:
        common = {"event": kind, "timestamp": at, "output_length": 0, "hash_ids": ids, "namespace": 0, "tenant": ""}
        more = {"parent": None, "groups": [0]} if kind == "store" else {"hit_length": 0}
        length = 0 if kind == "store" else 16 * len(ids) + 1
        return json.dumps({**common, "input_length": length, **more, **said}) + "\n"

    path = tmp_path / "recording.jsonl"
    geometry = {"groups": [{"kind": "full", "tokens_per_block": 16, "page_bytes": [4096]}]}
    head = {"format": FORMAT, "recording": "a", "part": 1, "policy": "LRU", "cells": 4, "cell_bytes": 4096}
    space = {"namespace": 0, "digest": "aa", "model": "m", "chunk_size": 16, "geometry": geometry}
    path.write_text(
        json.dumps({"event": "recording", **head})
        + "\n"
        + json.dumps({"event": "namespace", **space})
        + "\n"
        + event("store", 1_000, [1, 2], ttl_s=5)
        + event("lookup", 5_900, [1, 2], ttl_s=0)
        + event("lookup", 6_000, [1, 2])
        + event("store", 7_000, [5, 6])
        + event("store", 8_000, [7, 8], priority="low")
        + event("store", 9_000, [9], session_end=True)
        + event("lookup", 9_001, [5, 6])
        + event("lookup", 9_002, [7, 8])
    )
    trace = read_trace(path)
    replaying = Replay(trace, 4, LRU())

    assert [replaying.take(number, each) // 16 for number, each in enumerate(trace.events)] == [0, 2, 0, 0, 0, 0, 2, 1]
    path.write_text(path.read_text().replace('"low"', '"urgent"'))
    with pytest.raises(TraceError, match=r"line 7: .*urgent"):
        read_trace(path)
