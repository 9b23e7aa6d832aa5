"""Conformance suites: what a third party runs against its own plugin. Needs pytest and hypothesis (`lmcache[test]`).

    from lmcache.plugins.testing import EvictionPolicySuite

    class TestMyPolicy(EvictionPolicySuite):
        def make_policy(self):
            return MyPolicy()

pytest then runs every test of `EvictionPolicySuite` against `MyPolicy`. They check that it keeps its promises, not that
its order is a good one: write tests of your own for that, with `make_chain`. `StorageTierSuite` and `CodecSuite` do the
same for tiers and codecs.
"""

from lmcache.plugins.testing.codec import CodecSuite
from lmcache.plugins.testing.policy import EvictionPolicySuite, FakeNode, make_chain
from lmcache.plugins.testing.tier import StorageTierSuite

__all__ = ["CodecSuite", "EvictionPolicySuite", "FakeNode", "StorageTierSuite", "make_chain"]
