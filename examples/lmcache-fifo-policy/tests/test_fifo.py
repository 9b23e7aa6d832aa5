"""FIFO keeps every promise of a policy, and its order is the order of arrival."""

from lmcache_fifo_policy.policy import FIFO

from lmcache.plugins.testing import EvictionPolicySuite, make_chain


class TestPromises(EvictionPolicySuite):
    def make_policy(self) -> FIFO:
        return FIFO()


def test_what_was_stored_first_goes_first_however_often_it_is_used() -> None:
    policy = FIFO()
    first, second, third = make_chain(1)[0], make_chain(1)[0], make_chain(1)[0]
    for node in (first, second, third):
        policy.insert(node)
    for _ in range(3):
        policy.touch([first])
    assert list(policy.victims()) == [first, second, third]
