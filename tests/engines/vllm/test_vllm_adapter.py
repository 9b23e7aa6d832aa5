"""A real vLLM with a tiny Llama keeps the contract of engine adapters."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from vllm_stand import LOGPROB_TOLERANCE, EngineProcess

from lmcache.engines.vllm.adapter import VllmAdapter
from lmcache.plugins.testing import Answer, EngineAdapterTests, EngineUnderTest, Weights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.may_leave("a server that a test has started serves the next one, too; the last is killed at the end"),
]


class VllmUnderTest(EngineUnderTest):
    """A vLLM in a process of its own."""

    clients = 2
    can_abort = True
    can_be_killed = True

    def __init__(self, model: Path, server: str, log: Path) -> None:
        self._names = itertools.count()
        extra = {"lmcache.mp.port": int(server.rpartition(":")[2]), "lmcache.start_wait": 0, "lmcache.deadline": 5}
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        # prefills in pieces that are no multiple of a chunk
        options = {"model": str(model), "kv_transfer_config": transfer, "max_num_batched_tokens": 1000}
        self._engine = EngineProcess(options | {"max_model_len": 2048}, log)
        self._engine.await_start()

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "") -> list[Answer]:
        try:
            answers = self._engine.generate(*map(list, prompts), max_tokens=max_tokens, salt=salt or None)
        except pytest.fail.Exception as end:
            raise RuntimeError("the engine has ended") from end
        return [Answer(tuple(each["tokens"]), each["cached"], tuple(each["logprobs"])) for each in answers]

    def drop_own_cache(self) -> None:
        self._engine.forget()

    def abort_after(self, prompt: Sequence[int], steps: int) -> None:
        name = f"aborted {next(self._names)}"
        self._engine.call("add", name=name, ids=list(prompt), max_tokens=8)
        self._engine.call("step", times=steps)
        self._engine.call("abort", name=name)
        self._engine.run("while scheduler.requests or looking.busy(): driver.step()")

    def kill(self) -> None:
        self._engine.kill()

    def close(self) -> None:
        self._engine.close()


class TestVllm(EngineAdapterTests):
    adapter = VllmAdapter
    chunk_size = 256
    hit_step = 128
    wrong_chunk_size = 100
    server_flags = ("--l1-size-gb", "1")
    tolerance = LOGPROB_TOLERANCE
    model: ClassVar[Path]
    logs: ClassVar[Iterator[Path]]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def folders(cls, models: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.model = models / "llama"
        folder = tmp_path_factory.mktemp("engines")
        cls.logs = (folder / f"engine-{number}.log" for number in itertools.count())

    @classmethod
    def start_engine(cls, server: str, weights: Weights) -> EngineUnderTest | None:
        if weights is not Weights.USUAL:
            return (
                None  # a third engine would cost a minute, and test_vllm_identity.py tells weights apart in every way
            )
        return VllmUnderTest(cls.model, server, next(cls.logs))
