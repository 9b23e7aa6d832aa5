"""HiCache storage on a real SGLang engine keeps the contract of engine adapters."""

import pytest
from sglang_stand import SglangTests, hicache

from lmcache.plugins.testing import EngineUnderTest, Weights

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.may_leave("the engine of a class connects anew whenever a test starts another server"),
]


class TestHiCacheStorage(SglangTests):
    @classmethod
    def start_engine(cls, server: str, weights: Weights) -> EngineUnderTest | None:
        if weights is Weights.OTHER:
            return None  # the linker's tests have one, and both doors name their namespace alike
        return cls.start("llama", hicache, server)
