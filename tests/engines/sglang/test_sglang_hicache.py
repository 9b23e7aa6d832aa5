"""HiCache storage on a real SGLang engine keeps the contract of engine adapters."""

from pathlib import Path
from typing import ClassVar

import pytest
from sglang_stand import PAGE, SglangProcess, SglangUnderTest, hicache

from lmcache.core.adapter import EngineAdapter
from lmcache.core.control import ServerAddress
from lmcache.engines.sglang.adapter import SglangAdapter
from lmcache.plugins.testing import EngineAdapterTests, EngineUnderTest, Weights

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.may_leave("the engine of a class connects anew whenever a test starts another server"),
]


class TestHiCacheStorage(EngineAdapterTests):
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
        cls.models, cls.folder = sglang_models, tmp_path_factory.mktemp("hicache")

    @classmethod
    def start_engine(cls, server: str, weights: Weights) -> EngineUnderTest | None:
        if weights is Weights.OTHER:
            return None  # the linker's tests have one, and both doors name their namespace alike
        log = cls.folder / f"engine{len(list(cls.folder.iterdir()))}.log"
        options = {"model_path": str(cls.models / "llama")}
        process = SglangProcess(options | hicache(ServerAddress.parse(server).port), log)
        process.await_start()
        return SglangUnderTest(process)
