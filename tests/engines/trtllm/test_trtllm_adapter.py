"""TensorRT-LLM's adapter keeps the contract of engine adapters, under a model of the executor (no engine is here)."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from trtllm_executor import Executor
from trtllm_model import VOCABULARY, LayerGroup, Toy
from trtllm_names import LAYOUTS, RESERVATIONS, SALTED, installed
from trtllm_stand import BLOCK, CHUNK

from lmcache.engines.trtllm.adapter import TrtllmAdapter
from lmcache.plugins.testing import Answer, EngineAdapterTests, EngineUnderTest, Weights

pytestmark = pytest.mark.may_leave("the engine of a class connects anew whenever a test starts another server")

WINDOWS = Toy((LayerGroup((0, 2)), LayerGroup((1,), window=24)))


class TrtllmUnderTest(EngineUnderTest):
    """The executor compares every byte that an answer depends on with what computing it gives, so answers need none."""

    can_abort = True

    def __init__(self, names: Any, server: str, toy: Toy, ranks: int) -> None:
        self._engine = Executor(
            names, server, toy, layouts=names.generation >= LAYOUTS, ranks=ranks, slots=256, step_tokens=20
        )
        self.clients = 1 + ranks

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "") -> list[Answer]:
        runs = [self._engine.submit(prompt, answer=max_tokens, salt=salt or None) for prompt in prompts]
        self._engine.finish(*runs)
        return [Answer(tuple(run.answer), run.computed + run.taken) for run in runs]

    def drop_own_cache(self) -> None:
        pass  # it keeps none

    def abort_after(self, prompt: Sequence[int], steps: int) -> None:
        run = self._engine.submit(prompt, answer=8)
        for _ in range(steps):
            self._engine.step()
        if not run.done:
            self._engine.abort(run)
        self._engine.finish(run)

    def close(self) -> None:
        self._engine.close()


class TrtllmTests(EngineAdapterTests):
    adapter = TrtllmAdapter
    chunk_size = CHUNK
    hit_step = BLOCK
    wrong_chunk_size = 10
    token_ids = range(VOCABULARY)
    ends_when_a_load_fails = True
    generation: ClassVar[int]
    toy: ClassVar[Toy] = Toy()
    ranks: ClassVar[int] = 1
    settings: ClassVar[dict[str, str]] = {}
    names: ClassVar[Any]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def surroundings(cls) -> Iterator[None]:
        """TensorRT-LLM of a generation, and settings that bear with a busy machine."""
        settings = {"WEIGHTS_ID": "toy", "DEADLINE": "5", "LOOKUP_WAIT": "5", "START_WAIT": "0", **cls.settings}
        with pytest.MonkeyPatch.context() as patch, installed(cls.generation) as cls.names:
            for name, value in settings.items():
                patch.setenv(f"LMCACHE_{name}", value)
            yield

    @classmethod
    def start_engine(cls, server: str, weights: Weights) -> EngineUnderTest | None:
        if weights is Weights.OTHER:
            return None  # the toy model has none: its KV is a function of the tokens
        return TrtllmUnderTest(cls.names, server, cls.toy, cls.ranks)


class TestFlatPools(TrtllmTests):
    generation = SALTED


class TestFlatPoolsOnTwoRanksWithRequestsParked(TrtllmTests):
    generation = SALTED
    ranks = 2
    settings: ClassVar[dict[str, str]] = {"ASYNC_LOADS": "1"}


class TestLayerGroups(TrtllmTests):
    generation = LAYOUTS
    toy = WINDOWS
    hit_step = CHUNK


class TestReservations(TrtllmTests):
    generation = RESERVATIONS
    toy = WINDOWS
    hit_step = CHUNK
    ranks = 2
