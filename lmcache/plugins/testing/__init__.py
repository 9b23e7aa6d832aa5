"""Conformance suites: what a third party runs against its own plugin. Needs pytest and hypothesis (`lmcache[test]`).

    from lmcache.plugins.testing import EvictionPolicySuite

    class TestMyPolicy(EvictionPolicySuite):
        def make_policy(self):
            return MyPolicy()

pytest then runs every test of `EvictionPolicySuite` against `MyPolicy`. They check that it keeps its promises, not that
its order is a good one: write tests of your own for that, with `make_chain`. `StorageTierSuite` and `CodecSuite` do the
same for tiers and codecs, and `EngineAdapterTests` for an engine's adapter: it drives your engine, as `EngineUnderTest`
puts it into words, beside a real server. Compare blobs in your own tests with `assert_same_bytes`.
"""

import pytest

# before they are imported, so that a failed assertion shows its values
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in ("adapter", "codec", "policy", "served", "tier")))

from lmcache.plugins.testing.adapter import EngineAdapterTests  # noqa: E402
from lmcache.plugins.testing.codec import CodecSuite  # noqa: E402
from lmcache.plugins.testing.engine import Answer, EngineUnderTest, Weights  # noqa: E402
from lmcache.plugins.testing.long_bytes import assert_same_bytes  # noqa: E402
from lmcache.plugins.testing.policy import EvictionPolicySuite, FakeNode, make_chain  # noqa: E402
from lmcache.plugins.testing.tier import StorageTierSuite  # noqa: E402

__all__ = [
    "Answer",
    "CodecSuite",
    "EngineAdapterTests",
    "EngineUnderTest",
    "EvictionPolicySuite",
    "FakeNode",
    "StorageTierSuite",
    "Weights",
    "assert_same_bytes",
    "make_chain",
]
