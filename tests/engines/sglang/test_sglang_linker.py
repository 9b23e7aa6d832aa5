"""The linker on a real SGLang engine keeps the contract of engine adapters."""

from pathlib import Path
from typing import ClassVar

import pytest
from sglang_stand import PAGE, SglangProcess, SglangUnderTest, linker

from lmcache.core.adapter import EngineAdapter
from lmcache.core.control import ServerAddress
from lmcache.engines.sglang.adapter import SglangAdapter
from lmcache.plugins.testing import EngineAdapterTests, EngineUnderTest, Weights

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.may_leave("the engine of a class connects anew whenever a test starts another server"),
]


class TestLinker(EngineAdapterTests):
    adapter: ClassVar[type[EngineAdapter]] = SglangAdapter
    chunk_size = PAGE
    hit_step = PAGE
    server_flags = ("--l1-size-gb", "0.125", "--l1-cell-kb", "16")
    tolerance = 1e-4
    models: ClassVar[Path]
    folder: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def places(cls, sglang_models: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.models, cls.folder = sglang_models, tmp_path_factory.mktemp("linker")

    @classmethod
    def start_engine(cls, server: str, weights: Weights) -> EngineUnderTest:
        model = cls.models / ("llama" if weights is Weights.USUAL else "other_llama")
        log = cls.folder / f"{weights.value}{len(list(cls.folder.iterdir()))}.log"
        options = {"model_path": str(model), "served_model_name": "llama"}
        process = SglangProcess(options | linker(ServerAddress.parse(server).port), log)
        process.await_start()
        return SglangUnderTest(process)
