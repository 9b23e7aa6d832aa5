"""What policies are made of: queue, ranks, segments, ghosts, sketch, arrivals."""

import gc
import weakref

from lmcache.plugins.eviction.arrivals import Arrivals
from lmcache.plugins.eviction.ghosts import Ghosts
from lmcache.plugins.eviction.queue import NodeQueue
from lmcache.plugins.eviction.ranks import Ranks
from lmcache.plugins.eviction.segments import Segments
from lmcache.plugins.eviction.sketch import MOST, FrequencySketch
from lmcache.plugins.testing import make_chain

# --------------------------------------------------------------------------------------------------------------- queue


def test_a_mark_stays_with_a_node_that_moves_to_another_queue():
    one, other = NodeQueue(), NodeQueue()
    node = make_chain(1)[0]
    one.append(node, "mark")
    other.move_to_warm_end([node])
    assert (node.policy_state.mark, one.coldest, other.coldest) == ("mark", None, node)
    NodeQueue.remove(node)
    assert (node.policy_state, other.coldest) == (None, None)


def test_a_node_goes_to_the_cold_end_from_anywhere():
    one, other = NodeQueue(), NodeQueue()
    a, b, c, d = (make_chain(1)[0] for _ in range(4))
    for node in (a, b, c):
        one.append(node)
    other.append(d)
    for node in (b, d, b):
        one.move_to_cold_end(node)
    assert (list(one), list(other), one.coldest) == ([b, d, a, c], [], b)
    other.move_to_cold_end(c)
    one.move_to_warm_end([b])
    assert (list(one), list(other)) == ([d, a, b], [c])


# --------------------------------------------------------------------------------------------------------------- ranks


def test_ranks_go_from_low_to_high_and_from_cold_to_warm():
    ranks = Ranks()
    a, b, c, d = (make_chain(1)[0] for _ in range(4))
    for node, rank in ((a, 7), (b, 3), (c, 7), (d, 5)):
        ranks.append(node, rank)
    assert list(ranks) == [b, d, a, c]
    ranks.move([a], 7)
    ranks.move([b], 9)
    assert list(ranks) == [d, c, a, b]
    assert ranks.lowest() == 5


def test_a_rank_without_nodes_is_forgotten_and_may_come_again():
    ranks = Ranks()
    a, b = (make_chain(1)[0] for _ in range(2))
    ranks.append(a, 1)
    ranks.append(b, 2)
    ranks.remove(a)
    assert (ranks.lowest(), list(ranks)) == (2, [b])
    ranks.append(a, 1)
    assert (ranks.lowest(), list(ranks)) == (1, [a, b])
    ranks.remove(a)
    ranks.remove(b)
    assert list(ranks) == []


def test_a_million_moves_between_ranks_leave_only_the_ranks_in_use():
    ranks = Ranks()
    node = make_chain(1)[0]
    ranks.append(node, 0)
    for rank in range(1, 10_000):
        ranks.move([node], rank)
        ranks.lowest()
    assert len(ranks._ranks) == len(ranks._queues) == 1


# ------------------------------------------------------------------------------------------------------------ segments


def test_at_most_four_fifths_of_the_nodes_are_protected():
    segments = Segments()
    nodes = [make_chain(1)[0] for _ in range(10)]
    for node in nodes:
        segments.append(node)
    segments.protect(nodes)
    assert list(segments.probation) == nodes[:2]
    assert list(segments.protected) == nodes[2:]
    segments.protect(nodes[:1])
    assert list(segments.probation) == [nodes[1], nodes[2]]


# -------------------------------------------------------------------------------------------------------------- ghosts


def test_the_ghost_that_was_added_first_is_forgotten_first_and_one_may_leave_out_of_turn():
    ghosts = Ghosts()
    for key in "abcd":
        ghosts.add(key, key.upper())
    assert ghosts.pop("b") == "B"
    assert ghosts.pop("b") is None
    ghosts.add("a", "again")  # now the youngest
    ghosts.trim(2)
    assert [key for key in "abcd" if key in ghosts] == ["a", "d"]
    assert ghosts.pop_oldest() == "D"
    assert ghosts.pop("a") == "again"
    assert len(ghosts) == 0
    ghosts.trim(-3)


def test_a_forgotten_ghost_leaves_nothing_behind():
    class Note:
        pass

    ghosts = Ghosts()
    for key in range(3):
        ghosts.add(key, Note())
    end = weakref.ref(ghosts._ghosts[1].note)
    gc.disable()
    try:
        ghosts.pop(1)
        assert end() is None
    finally:
        gc.enable()


# -------------------------------------------------------------------------------------------------------------- sketch


def test_a_sketch_counts_exactly_while_there_are_few_keys_and_stops_at_its_most():
    sketch = FrequencySketch(1000)
    for key, times in (("a", 1), ("b", 7), ("c", 40)):
        for _ in range(times):
            sketch.add(key, period=10**6)
    assert [sketch.estimate(key) for key in "abcd"] == [1, 7, MOST, 0]


def test_a_sketch_forgets_half_after_each_period():
    sketch = FrequencySketch(1000)
    for _ in range(12):
        sketch.add("a", period=12)
    assert sketch.estimate("a") == 6
    for _ in range(6):
        sketch.add(("b", 1), period=12)
    assert (sketch.estimate("a"), sketch.estimate(("b", 1))) == (3, 3)


def test_a_sketch_never_counts_too_little_and_rarely_too_much():
    sketch = FrequencySketch(1024)
    for key in range(1024):
        for _ in range(key % 3):
            sketch.add(key, period=10**9)
    excess = [sketch.estimate(key) - key % 3 for key in range(1024)]
    assert min(excess) == 0
    assert sum(extra > 0 for extra in excess) < 64


# ------------------------------------------------------------------------------------------------------------ arrivals


def test_what_a_store_touches_is_told_from_what_a_lookup_touches():
    arrivals = Arrivals()
    trunk, branch = make_chain(2), []
    for node in trunk:
        arrivals.insert(node)
    assert arrivals.settle(trunk[::-1]) == trunk[::-1]
    assert arrivals.settle(trunk[::-1]) == []  # the same nodes, used
    branch = make_chain(2, trunk[-1])
    for node in branch:
        arrivals.insert(node)
    assert arrivals.settle([*branch[::-1], *trunk[::-1]]) == branch[::-1]
    assert arrivals.settle([]) == []


def test_a_node_that_goes_before_its_store_ends_is_forgotten():
    arrivals = Arrivals()
    first, second = make_chain(2)
    arrivals.insert(first)
    arrivals.insert(second)
    arrivals.remove(second)
    assert arrivals.settle([first]) == [first]
    assert arrivals._new == {}


def test_a_sketch_tells_keys_apart_wherever_they_differ():
    sketch = FrequencySketch(4096)
    keys = [b"namespace" + number.to_bytes(16, order) for number in range(1, 1000) for order in ("little", "big")]
    for key in keys[:20]:
        sketch.add(key, 1 << 20)
    assert {sketch.estimate(key) for key in keys[:20]} == {1}
    assert sum(sketch.estimate(key) for key in keys[20:]) < 5


def test_a_sketch_counts_the_keys_of_the_cache_alike_in_every_process():
    sketch = FrequencySketch(64)
    assert sketch._places(b"namespace" + bytes(range(16))) == [2, 53, 36, 62]
