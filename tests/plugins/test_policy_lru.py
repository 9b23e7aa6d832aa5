"""LRU: promises, order, and what an order of use means for prompts."""

import itertools

from lmcache.plugins.eviction.lru import LRU
from lmcache.plugins.testing import EvictionPolicySuite, make_chain


class TestLRU(EvictionPolicySuite):
    def make_policy(self):
        return LRU()


def store(policy, nodes):
    for node in nodes:
        policy.insert(node)
    policy.touch(nodes[::-1])


def test_the_chunk_used_longest_ago_goes_first():
    policy = LRU()
    a, b, c = (make_chain(1)[0] for _ in range(3))
    for node in (a, b, c):
        store(policy, [node])
    policy.touch([a])
    assert list(policy.victims()) == [b, c, a]


def test_a_prompt_goes_from_its_tail_to_its_root():
    policy = LRU()
    old, new = make_chain(3), make_chain(2)
    store(policy, old)
    store(policy, new)
    assert list(policy.victims()) == [old[2], old[1], old[0], new[1], new[0]]


def test_a_shared_beginning_outlives_every_prompt_that_has_it():
    policy = LRU()
    system = make_chain(2)
    store(policy, system)
    for _ in range(3):
        question = make_chain(2, system[-1])
        for node in question:
            policy.insert(node)
        policy.touch([*question[::-1], *system[::-1]])
    order = list(policy.victims())
    assert order[-2:] == [system[1], system[0]]
    assert [node.depth for node in order] == [3, 2, 3, 2, 3, 2, 1, 0]


def test_what_is_inserted_counts_as_used():
    policy = LRU()
    used, inserted = make_chain(1)[0], make_chain(1)[0]
    store(policy, [used])
    policy.insert(inserted)
    assert list(policy.victims()) == [used, inserted]


def test_exact_hits_of_a_cyclic_scan_one_chunk_larger_than_the_cache():
    """The classic worst case of LRU: every chunk is evicted just before it is asked for again."""
    policy, kept, hits = LRU(), {}, 0
    for key in itertools.islice(itertools.cycle(range(5)), 50):
        if key in kept:
            hits += 1
            policy.touch([kept[key]])
            continue
        if len(kept) == 4:
            victim = next(policy.victims())
            policy.remove(victim)
            kept = {k: node for k, node in kept.items() if node is not victim}
        kept[key] = make_chain(1)[0]
        policy.insert(kept[key])
    assert hits == 0
