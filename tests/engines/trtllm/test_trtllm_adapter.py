"""The suite that every engine adapter must pass, on the simulated engine; and where TensorRT-LLM cannot keep it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch", reason="the simulated KV caches are torch tensors")

from trtllm_executor import Executor
from trtllm_model import LayerGroup, Toy
from trtllm_names import LAYOUTS, RESERVATIONS, installed
from trtllm_stand import BLOCK, CHUNK

from lmcache.engines.trtllm.adapter import TrtllmAdapter
from lmcache.errors import LoadFailed
from lmcache.plugins.testing import EngineAdapterTests
from lmcache.plugins.testing.engine import Answer, EngineUnderTest, Weights
from lmcache.plugins.testing.served import LoadFault, ServerUnderControl

pytestmark = pytest.mark.may_leave("the engine of a class connects anew whenever a test starts another server")

WINDOWS = (LayerGroup((0, 2)), LayerGroup((1,), window=20))


class SimulatedEngine(EngineUnderTest):
    """TensorRT-LLM's executor, simulated, under somebody who starts it again when it has ended."""

    can_abort = True

    def __init__(self, names: Any, server: str, toy: Toy, ranks: int) -> None:
        self._make = lambda: Executor(
            *(names, server, toy),
            layouts=len(toy.groups) > 1,
            ranks=ranks,
            slots=300,
            step_tokens=3 * CHUNK,
            reuse=len(toy.groups) == 1,
        )
        self.executor = self._make()
        self.clients = 1 + ranks
        self.starts = 1

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "") -> list[Answer]:
        while True:
            with contextlib.suppress(LoadFailed):
                return self.generate_once(prompts, max_tokens, salt)
            self.close()
            self.executor = self._make()
            self.starts += 1

    def generate_once(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "") -> list[Answer]:
        runs = [self.executor.submit(prompt, answer=max_tokens, salt=salt or None) for prompt in prompts]
        self.executor.finish(*runs)
        return [Answer(tuple(run.answer), run.computed + run.taken) for run in runs]

    def linked(self) -> bool:
        return self.executor.linked

    def drop_own_cache(self) -> None:
        self.executor.blocks.forget()

    def abort_after(self, prompt: Sequence[int], steps: int) -> None:
        run = self.executor.submit(prompt, answer=20)
        for _ in range(steps):
            self.executor.step()
        if not run.done:
            self.executor.abort(run)
        self.executor.finish(run)

    def close(self) -> None:
        self.executor.close()


class SimulatedTests(EngineAdapterTests):
    adapter = TrtllmAdapter
    chunk_size = CHUNK
    hit_step = BLOCK
    wrong_chunk_size = 10
    generation: ClassVar[int]
    groups: ClassVar[tuple[LayerGroup, ...]] = (LayerGroup((0, 1)),)
    ranks: ClassVar[int] = 1
    async_loads: ClassVar[str] = "0"
    names: ClassVar[Any]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _installed(cls) -> Iterator[None]:
        with installed(cls.generation) as names, pytest.MonkeyPatch.context() as patch:
            for name, value in (("DEADLINE", "5"), ("LOOKUP_WAIT", "5"), ("START_WAIT", "0"), ("WEIGHTS_ID", "toy")):
                patch.setenv(f"LMCACHE_{name}", value)
            patch.setenv("LMCACHE_ASYNC_LOADS", cls.async_loads)
            cls.names = names
            yield

    @classmethod
    def start_engine(cls, server: str, weights: Weights) -> EngineUnderTest:
        usual = weights is Weights.USUAL
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LMCACHE_WEIGHTS_ID", "toy" if usual else "other")
            return SimulatedEngine(cls.names, server, Toy(cls.groups, weights=1 if usual else 2), cls.ranks)

    @pytest.mark.parametrize("fault", [LoadFault.OPEN, LoadFault.CONFIRM, LoadFault.LAST_RANK])
    def test_a_load_that_fails_is_computed_and_not_tried_for_ever(
        self,
        engine: EngineUnderTest,
        server: ServerUnderControl,
        fault: LoadFault,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """TensorRT-LLM cannot: it is raised, the engine ends, and the next one answers as ever."""
        assert isinstance(engine, SimulatedEngine)
        prompt = self.prompt(3 * self.chunk_size + 1, ("failing", fault.value))
        cold = self.store(engine, server, prompt)
        server.fail_loads(fault)
        with pytest.raises(LoadFailed):
            engine.generate_once([prompt], self.max_tokens)
        server.fail_loads(LoadFault.NONE)
        engine.close()
        # connected before its first request, not counted by clients: those of the old one may not be gone yet
        monkeypatch.setenv("LMCACHE_START_WAIT", "30")
        engine.executor = engine._make()
        self.assert_served(engine, cold, prompt)


class TestOnePool(SimulatedTests):
    generation = LAYOUTS
    ranks = 2


class TestLayerGroupsAndReservations(SimulatedTests):
    generation = RESERVATIONS
    groups = WINDOWS
    async_loads = "1"
