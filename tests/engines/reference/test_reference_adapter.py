"""The reference engine's adapter keeps the contract of engine adapters, on every kind of group and on ranks."""

from collections.abc import Sequence
from typing import ClassVar

import pytest

from lmcache.engines.reference.adapter import ReferenceAdapter
from lmcache.engines.reference.engine import Engine
from lmcache.engines.reference.requests import Output
from lmcache.engines.reference.shapes import GEOMETRIES
from lmcache.plugins.testing import Answer, EngineAdapterTests, EngineUnderTest, Weights

pytestmark = pytest.mark.may_leave("the engine of a class connects anew whenever a test starts another server")


class ReferenceEngine(EngineUnderTest):
    can_abort = True

    def __init__(self, geometry: str, server: str, seed: int, ranks: int) -> None:
        self._engine = Engine(
            GEOMETRIES[geometry], server=server, seed=seed, ranks=ranks, deadline=5.0, step_tokens=100
        )
        self.clients = 1 + ranks

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "") -> list[Answer]:
        return [self._answer(output) for output in self._engine.generate(prompts, max_tokens, salt)]

    def _answer(self, output: Output) -> Answer:
        logits = tuple(value for row in output.logits for value in row.tolist())
        return Answer(tuple(output.tokens), output.hit_tokens + output.own_hit_tokens, logits)

    def drop_own_cache(self) -> None:
        self._engine.drop_prefix_cache()

    def abort_after(self, prompt: Sequence[int], steps: int) -> None:
        request = self._engine.add(prompt, 8)
        for _ in range(steps):
            self._engine.step()
        self._engine.abort(request)
        while self._engine.busy:
            self._engine.step()
        self._engine.step()
        self._engine.take(request)

    def close(self) -> None:
        self._engine.close()


class ReferenceTests(EngineAdapterTests):
    adapter = ReferenceAdapter
    chunk_size = 64
    hit_step = 16
    wrong_chunk_size = 40
    geometry: ClassVar[str] = "llama"
    ranks: ClassVar[int] = 1

    @classmethod
    def start_engine(cls, server: str, weights: Weights) -> EngineUnderTest:
        return ReferenceEngine(cls.geometry, server, 1 if weights is Weights.USUAL else 2, cls.ranks)


class TestFullAttention(ReferenceTests):
    pass


class TestTwoRanks(ReferenceTests):
    ranks = 2


class TestEveryKindOfGroup(ReferenceTests):
    geometry = "everything"
    hit_step = 64
