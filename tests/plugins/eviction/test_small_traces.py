"""Each policy on a trace that is short enough to follow by hand: exact hits, and exactly who went."""

from policy_traces import SmallCache

from lmcache.plugins.eviction.arc import ARC
from lmcache.plugins.eviction.fifo import FIFO
from lmcache.plugins.eviction.gdsf import GDSF
from lmcache.plugins.eviction.lfu import LFU
from lmcache.plugins.eviction.lru import LRU
from lmcache.plugins.eviction.s3fifo import S3FIFO
from lmcache.plugins.eviction.sieve import SIEVE
from lmcache.plugins.eviction.slru import SLRU
from lmcache.plugins.eviction.tinylfu import WTinyLFU
from lmcache.plugins.testing import make_chain


def test_lru_evicts_what_was_used_longest_ago():
    cache = SmallCache(LRU(), 3).ask("abcadefa")
    assert (cache.hits, cache.evicted) == ("a", "bcad")


def test_fifo_evicts_what_was_stored_longest_ago_though_it_was_just_used():
    cache = SmallCache(FIFO(), 3).ask("abcada")
    assert (cache.hits, cache.evicted) == ("a", "ab")


def test_fifo_keeps_a_beginning_as_long_as_the_youngest_chunk_below_it():
    policy = FIFO()
    system = make_chain(1)
    old, young = make_chain(1, system[0]), make_chain(1, system[0])
    for nodes in ([*system], [*old, *system], [*young, *system]):
        policy.insert(nodes[0])
        policy.touch(nodes)
    policy.touch([*old, *system])
    assert list(policy.victims()) == [*old, *young, *system]


def test_lfu_evicts_what_was_used_least_until_old_fame_has_faded():
    # a has 3 uses; b goes at rank 1, c at 2, and so the next b ranks 3, as a does, which was used longer ago
    cache = SmallCache(LFU(), 2).ask("aaabcbc")
    assert (cache.hits, cache.evicted) == ("aa", "bca")


def test_slru_evicts_what_was_used_once_before_what_was_used_again():
    cache = SmallCache(SLRU(), 3).ask("abacdba")
    assert (cache.hits, cache.evicted) == ("aa", "bc")


def test_slru_puts_the_protected_chunk_used_longest_ago_on_probation_when_too_many_are_protected():
    # four of six may be protected: the fifth that is used sends a back, behind x and before f
    cache = SmallCache(SLRU(), 6).ask("xabcdeabcdefg")
    assert (cache.hits, cache.evicted) == ("abcde", "xa")


def test_arc_learns_from_ghosts_which_list_to_take_from():
    policy = ARC()
    cache = SmallCache(policy, 2)
    targets = []
    for letter in "aabcbdea":
        cache.ask(letter)
        targets.append(policy._target)
    # b comes back from B1: more room for what was used once, so that T2 gives next; a comes back from B2: less again
    assert targets == [0, 0, 0, 0, 1, 1, 1, 0]
    assert (cache.hits, cache.evicted) == ("a", "bcabd")


def test_arc_remembers_no_more_chunks_than_the_cache_holds():
    policy = ARC()
    cache = SmallCache(policy, 4).ask("abab" + "".join(chr(1000 + number) for number in range(100)))
    assert len(policy._once.ghosts) + len(policy._again.ghosts) <= 4
    assert cache.hits == "ab"


def test_sieve_spares_what_was_used_since_the_hand_passed():
    cache = SmallCache(SIEVE(), 3).ask("abcadefag")
    assert (cache.hits, cache.evicted) == ("aa", "bcde")


def test_sieve_begins_again_at_the_oldest_when_all_were_used():
    # the hand takes both marks, then a; it stands at b, which is next though c was never used either
    cache = SmallCache(SIEVE(), 2).ask("ababcd")
    assert (cache.hits, cache.evicted) == ("ab", "ab")


def test_s3_fifo_promotes_what_was_used_and_what_it_remembers():
    # a leaves S for M; d comes back while it is remembered, and enters M; when S is empty M gives b, for a was used
    cache = SmallCache(S3FIFO(), 3).ask("aaabcdbeadg")
    assert (cache.hits, cache.evicted) == ("aaa", "bcdeb")
    # e and g come back from G; a, whose one further use was spent on that round, goes the next time
    cache.ask("ehgi")
    assert (cache.hits, cache.evicted) == ("aaa", "bcdebgdha")


def test_w_tinylfu_names_the_newcomer_first_unless_it_is_more_popular():
    cache = SmallCache(WTinyLFU(), 3).ask("aabbcdab")
    assert (cache.hits, cache.evicted) == ("abab", "c")
    cache.ask("eeeeef")
    # d was asked for once, and lost against a, with three; e, with five, wins
    assert (cache.hits, cache.evicted) == ("ababeeee", "cda")


def test_gdsf_evicts_the_larger_of_two_chunks_that_are_used_as_often():
    policy = GDSF()
    large, small = make_chain(1, cells=4), make_chain(1, cells=1)
    for node in (*small, *large):
        policy.insert(node)
        policy.touch([node])
    assert list(policy.victims()) == [*large, *small]
    for _ in range(4):  # five quarters are more than one
        policy.touch(large)
    assert list(policy.victims()) == [*small, *large]


def test_gdsf_takes_the_size_from_the_end_of_the_store_for_a_new_node_has_none():
    policy = GDSF()
    growing, small = make_chain(1, cells=0), make_chain(1, cells=2)
    for node, cells in ((small[0], 2), (growing[0], 4)):
        policy.insert(node)
        node.cells = cells
        policy.touch([node])
    assert list(policy.victims()) == [*growing, *small]


def test_gdsf_of_chunks_of_one_size_is_lfu_with_dynamic_aging():
    letters = "aaabcbcdaeebfaagbbchdaab" * 5
    one, other = SmallCache(GDSF(), 4).ask(letters), SmallCache(LFU(), 4).ask(letters)
    assert (one.hits, one.evicted) == (other.hits, other.evicted)
