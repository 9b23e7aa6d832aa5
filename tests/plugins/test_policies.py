"""Every built-in policy keeps the promises of the conformance suite."""

import pytest

from lmcache.plugins.eviction.arc import ARC
from lmcache.plugins.eviction.fifo import FIFO
from lmcache.plugins.eviction.gdsf import GDSF
from lmcache.plugins.eviction.lfu import LFU
from lmcache.plugins.eviction.prefix_aware import PrefixAware
from lmcache.plugins.eviction.s3fifo import S3FIFO
from lmcache.plugins.eviction.sieve import SIEVE
from lmcache.plugins.eviction.slru import SLRU
from lmcache.plugins.eviction.tinylfu import WTinyLFU
from lmcache.plugins.manager import PluginManager
from lmcache.plugins.testing import EvictionPolicySuite


class TestFIFO(EvictionPolicySuite):
    def make_policy(self):
        return FIFO()


class TestLFU(EvictionPolicySuite):
    def make_policy(self):
        return LFU()


class TestSLRU(EvictionPolicySuite):
    def make_policy(self):
        return SLRU()


class TestARC(EvictionPolicySuite):
    def make_policy(self):
        return ARC()


class TestSIEVE(EvictionPolicySuite):
    def make_policy(self):
        return SIEVE()


class TestS3FIFO(EvictionPolicySuite):
    def make_policy(self):
        return S3FIFO()


class TestWTinyLFU(EvictionPolicySuite):
    def make_policy(self):
        return WTinyLFU()


class TestGDSF(EvictionPolicySuite):
    def make_policy(self):
        return GDSF()


class TestPrefixAware(EvictionPolicySuite):
    def make_policy(self):
        return PrefixAware()


NAMES = ("LRU", "FIFO", "LFU", "SLRU", "ARC", "SIEVE", "S3-FIFO", "W-TinyLFU", "GDSF", "prefix-aware")


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_is_selected_by_its_name_in_any_case(name):
    assert PluginManager().make_policy(name.swapcase()).name == name


def test_these_are_the_policies_that_are_built_in():
    assert PluginManager().policies() == NAMES
