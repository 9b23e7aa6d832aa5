"""prefix-aware: leaves before trunks, what it learns of returns, and what depth is worth."""

import itertools
from collections import deque

import pytest
from policy_traces import SmallCache

from lmcache.plugins.eviction.lru import LRU
from lmcache.plugins.eviction.prefix_aware import DEEP, FEWEST_GHOSTS, HINTED, PrefixAware
from lmcache.plugins.eviction.returns import BINS, EDGES, Life, Returns, bin_of
from lmcache.plugins.testing import FakeNode, make_chain


def store(policy, nodes, above=()):
    """Store a chain below `above`, both from the root on."""
    for node in nodes:
        policy.insert(node)
    policy.touch([*nodes[::-1], *above[::-1]])


def test_without_experience_the_prompt_used_longest_ago_goes_first_from_its_tail_to_its_root():
    policy = PrefixAware()
    old, new = make_chain(3), make_chain(2)
    store(policy, old)
    for _ in range(100):
        store(policy, make_chain(1))
    store(policy, new)
    order = list(policy.victims())
    assert [order.index(node) for node in old[::-1]] == sorted(order.index(node) for node in old)
    assert max(order.index(node) for node in old) < min(order.index(node) for node in new)


def test_a_trunk_is_named_after_everything_that_follows_it_however_often_a_branch_was_used():
    policy = PrefixAware()
    system = make_chain(2)
    store(policy, system)
    branches = [make_chain(3, system[-1]) for _ in range(4)]
    for branch in branches:
        store(policy, branch, system)
    for _ in range(5):
        policy.touch(branches[0][::-1])
    order = list(policy.victims())
    for branch in branches:
        chain = [*system, *branch]
        assert [order.index(node) for node in chain] == sorted((order.index(node) for node in chain), reverse=True)
    assert order[-2:] == [system[1], system[0]]


def test_a_trunk_whose_branches_are_gone_is_a_leaf_again():
    policy = PrefixAware()
    system, question = make_chain(1), []
    store(policy, system)
    question = make_chain(1, system[0])
    store(policy, question, system)
    policy.remove(question[0])
    assert list(policy.victims()) == system


def test_what_a_chunk_followed_goes_next_so_that_prompts_go_one_by_one():
    policy = PrefixAware()
    prompts = [make_chain(3) for _ in range(3)]
    for prompt in prompts:
        store(policy, prompt)
    for prompt in prompts:
        policy.remove(prompt.pop())
    gone = []
    for _ in range(6):
        gone.append(next(policy.victims()))
        policy.remove(gone[-1])
    assert gone == [node for prompt in prompts for node in reversed(prompt)]


def test_chunks_of_several_bins_that_grow_old_at_once_stay_in_the_order_of_their_last_use():
    policy = PrefixAware()
    prompts = [make_chain(1)[0] for _ in range(350)]
    for node in prompts:
        store(policy, [node])
    next(policy.victims())  # they are in two bins by now
    store(policy, make_chain(EDGES[6]))
    order = list(policy.victims())
    assert len({bin_of(policy._returns.now - node.policy_state.mark.since) for node in prompts}) == 1
    assert [node for node in order if node in set(prompts)] == prompts


def test_whatever_was_learned_chunks_as_young_as_a_few_prompts_go_by_recency():
    policy = PrefixAware()
    pause = deque()
    for number in range(20_000):
        node = FakeNode(key=number)
        store(policy, [node])
        pause.append(node)
        if len(pause) > 100:  # comes back after 200 chunks, and then goes
            policy.touch([pause[0]])
            policy.remove(pause.popleft())
    for node in pause:
        policy.remove(node)
    prompts = [make_chain(1)[0] for _ in range(250)]
    for node in prompts:
        store(policy, [node])
    assert list(policy.victims()) == prompts


def test_of_chunks_used_at_the_same_time_those_of_low_priority_go_first_and_those_of_high_priority_last():
    policy = PrefixAware()
    nodes = [FakeNode(priority=priority) for priority in (1, 0, -1, 0, 1, -1)]
    for node in nodes:
        store(policy, [node])
    high, low = (nodes[0], nodes[4]), (nodes[2], nodes[5])
    assert list(policy.victims()) == [*low, nodes[1], nodes[3], *high]
    assert policy._worth(high[0])[0] == HINTED * policy._worth(nodes[1])[0]


def test_popularity_counts_by_its_order_of_magnitude():
    policy = PrefixAware()
    node = FakeNode(key="a")
    store(policy, [node])
    kinds = [node.policy_state.mark.kind]
    for _ in range(40):
        policy.touch([node])
        kinds.append(node.policy_state.mark.kind)
    assert [kinds.count(kind) for kind in dict.fromkeys(kinds)] == [1, 1, 1, 4, 8, 26]


def pausing(letters, rounds):
    """Conversations that pause while as many strangers come as there is room, and strangers that never return."""
    strangers = (chr(number) for number in itertools.count(1000))
    for _ in range(rounds):
        for letter in letters:
            yield letter
            yield from itertools.islice(strangers, 5)


def test_it_learns_to_keep_those_who_return_after_a_pause_from_those_who_never_do():
    # each of 20 returns after 120 chunks, most of which never do: hopeless for an order of recency with room for 60
    traffic = list(pausing([f"{number}" for number in range(20)], 60))
    hits = {}
    for policy in (LRU(), PrefixAware()):
        hits[policy.name] = len(SmallCache(policy, 60).ask(traffic).hits)
    assert hits["LRU"] == 0
    # 1,180 is all that can be had; the digits of a name count twice where it has two
    assert hits["prefix-aware"] > 900


def test_a_deep_chunk_is_worth_more_than_an_equal_one_at_the_beginning():
    policy = PrefixAware()
    deep, shallow = make_chain(DEEP + 1), make_chain(1)
    store(policy, deep)
    store(policy, shallow)
    policy.touch([deep[-1]])
    policy.touch([shallow[0]])
    assert policy._worth(deep[-1])[0] == pytest.approx(2 * policy._worth(shallow[0])[0])


def test_a_chunk_that_comes_again_has_the_uses_of_its_former_life():
    policy = PrefixAware()
    first = FakeNode(key="a")
    store(policy, [first])
    policy.touch([first])
    policy.remove(first)
    second = FakeNode(key="a")
    store(policy, [second])
    assert second.policy_state.mark.uses == 3


def test_it_learns_from_chunks_that_come_back_when_they_are_cached_no_more():
    policy = PrefixAware()
    for _ in range(400):
        node = FakeNode(key="a")
        store(policy, [node])
        policy.remove(node)
    watched = sum(map(sum, policy._returns._returned))
    assert 70 < watched < 130  # a quarter of 399


def test_it_remembers_some_thousands_of_chunks_however_few_are_cached():
    policy = PrefixAware()
    for number in range(FEWEST_GHOSTS + 100):
        node = FakeNode(key=number)
        store(policy, [node])
        policy.remove(node)
    assert len(policy._ghosts) == FEWEST_GHOSTS


# ---------------------------------------------------------------------------------------------------- what is learned


def test_bins_meet_without_a_gap_and_the_last_has_no_end():
    assert [bin_of(age) for age in (0, 255, 256, 383, 384, 10**9)] == [0, 0, 1, 1, 2, BINS - 1]
    assert all(bin_of(edge) == number for number, edge in enumerate(EDGES[:-1]))


def test_what_returns_after_a_pause_is_worth_more_with_time_and_little_when_its_time_has_passed():
    returns = Returns(1)
    pausing = deque()
    for number in range(40_000):
        life = Life()
        returns.begin([life])
        returns.now += 1
        if number % 2:
            pausing.append(life)  # returns 500 later; the others never do
        if len(pausing) > 250:
            returns.end([pausing.popleft()])
        returns.advance()
    young, due, late = (returns.worth()[0][bin_of(age)] for age in (0, 400, 2_000))
    assert young < due / 2
    assert late < young / 2


def test_of_two_kinds_the_one_that_returns_is_worth_more():
    returns = Returns(2)
    for _ in range(20_000):
        back, lost = Life(kind=0), Life(kind=1)
        returns.begin([back])
        returns.begin([lost])
        returns.now += 40
        returns.end([back])
        returns.forget(lost)
        returns.advance()
    assert returns.worth()[0][0] > 5 * returns.worth()[1][0]
    assert returns._entered[0][bin_of(EDGES[3])] == 0  # all had returned by then


def test_returns_are_counted_for_the_kind_that_the_life_began_as():
    returns = Returns(2)
    lives = [Life(kind=number % 2) for number in range(200)]
    for life in lives:
        returns.begin([life])
    for life in lives[1::2]:
        returns.end([life])
    assert sum(returns._returned[0]) == 0
    assert sum(returns._returned[1]) == sum(returns._entered[1]) > 10


def test_a_life_that_ended_and_began_anew_does_not_enter_the_bins_of_the_one_before():
    returns = Returns(1)
    lives = [Life() for _ in range(400)]
    for life in lives:
        returns.begin([life])
    returns.now += EDGES[1] - 1
    for life in lives:
        returns.end([life])
        returns.begin([life])
    returns.now += 1  # the first lives, had they not ended, would be as old as the second bin
    returns.advance()
    assert returns._entered[0][:2] == [pytest.approx(200, abs=50), 0]
    returns.now += EDGES[1]
    returns.advance()
    assert returns._entered[0][:2] == [pytest.approx(200, abs=50), pytest.approx(100, abs=40)]


def test_a_chunk_that_is_forgotten_says_nothing_about_the_ages_that_it_did_not_reach():
    policy = PrefixAware()
    for number in range(3 * FEWEST_GHOSTS):
        node = FakeNode(key=number)
        store(policy, [node])
        policy.remove(node)
    # the oldest that is remembered is as old as there are ghosts, so nobody can be seen to return later than that
    late = [sum(kind[number] for kind in policy._returns._entered) for number in range(BINS)]
    assert late[bin_of(FEWEST_GHOSTS) - 1] > 100
    assert late[bin_of(FEWEST_GHOSTS) + 1 :] == [0] * (BINS - bin_of(FEWEST_GHOSTS) - 1)
