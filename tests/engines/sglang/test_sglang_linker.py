"""The linker on a real SGLang engine keeps the contract of engine adapters."""

import pytest
from sglang_stand import SglangTests, linker

from lmcache.plugins.testing import EngineUnderTest, Weights

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.may_leave("the engine of a class connects anew whenever a test starts another server"),
]


class TestLinker(SglangTests):
    @classmethod
    def start_engine(cls, server: str, weights: Weights) -> EngineUnderTest:
        return cls.start("llama" if weights is Weights.USUAL else "other_llama", linker, server)
