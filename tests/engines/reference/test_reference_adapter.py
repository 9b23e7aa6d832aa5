"""The reference engine's adapter keeps the contract of engine adapters, on every kind of group and on ranks."""

from typing import ClassVar

import pytest
from reference_stand import ReferenceUnderTest

from lmcache.engines.reference.adapter import ReferenceAdapter
from lmcache.engines.reference.shapes import GEOMETRIES
from lmcache.plugins.testing import EngineAdapterTests, EngineUnderTest, Weights

pytestmark = pytest.mark.may_leave("the engine of a class connects anew whenever a test starts another server")


class ReferenceTests(EngineAdapterTests):
    adapter = ReferenceAdapter
    chunk_size = 64
    hit_step = 16
    wrong_chunk_size = 40
    geometry: ClassVar[str] = "llama"
    ranks: ClassVar[int] = 1

    @classmethod
    def start_engine(cls, server: str, weights: Weights) -> EngineUnderTest:
        return ReferenceUnderTest(GEOMETRIES[cls.geometry], server, 1 if weights is Weights.USUAL else 2, cls.ranks)


class TestFullAttention(ReferenceTests):
    pass


class TestTwoRanks(ReferenceTests):
    ranks = 2


class TestEveryKindOfGroup(ReferenceTests):
    geometry = "everything"
    hit_step = 64
