"""Everything that is replaceable. Built-in plugins come in through the same hooks as third-party ones.

`manager.py` finds plugins and holds what they offer, `eviction/` has the built-in policies, and `testing.py` has the
conformance suites that third parties run against their own. The hooks themselves are in `lmcache.core.hookspecs`.
"""
