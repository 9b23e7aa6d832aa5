"""A real vLLM with a tiny Llama keeps the contract of engine adapters."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from vllm_stand import LOGPROB_TOLERANCE, VllmUnderTest

from lmcache.engines.vllm.adapter import VllmAdapter
from lmcache.plugins.testing import EngineAdapterTests, EngineUnderTest, Weights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.may_leave("a server that a test has started serves the next one, too; the last is killed at the end"),
]


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
