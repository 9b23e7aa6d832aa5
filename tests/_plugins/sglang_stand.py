"""Real SGLang engines on the CPU, and a server beside them, in processes of their own that end when they are closed."""

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from vllm_stand import LOGPROB_TOLERANCE, EngineProcess, ServerProcess

from lmcache.core.adapter import EngineAdapter
from lmcache.core.control import ServerAddress
from lmcache.engines.sglang.adapter import SglangAdapter
from lmcache.plugins.testing import Answer, EngineAdapterTests, EngineUnderTest
from lmcache.plugins.testing.ports import free_port

HERE = Path(__file__).parents[1] / "engines" / "sglang"
PAGE = 16

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE / "cpu_kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "HF_HUB_OFFLINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "only_models",
    "OMP_NUM_THREADS": "1",
}


class SglangProcess(EngineProcess):
    """An SGLang engine that a test talks to."""

    def __init__(self, options: dict[str, Any], log: Path, **environment: str) -> None:
        super().__init__(options, log, ENVIRONMENT | environment, HERE / "engine_driver.py")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask_one(self, ids: list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """One prompt's answer."""
        return self.call("generate", prompts=[ids], max_tokens=max_tokens, **more)[0]

    def flush(self) -> None:
        """Drop the engine's own cache."""
        self.call("flush")


def linker(port: int, **extra: Any) -> dict[str, Any]:
    """What users write to choose the linker; patient, so that a busy machine is not taken for one that has stopped."""
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "LMCacheLinker",
            "linker_module_path": "lmcache.engines.sglang.linker",
            "linker_extra_config": _settings(port) | extra,
        },
    }


def hicache(port: int, layout: str = "page_first_direct", **extra: Any) -> dict[str, Any]:
    """What users write to choose HiCache storage, and what makes it store and load prompts as short as those here."""
    settings = {
        "backend_name": "lmcache",
        "module_path": "lmcache.engines.sglang.hicache",
        "class_name": "LMCacheStorage",
        "interface_v1": 1,
        "prefetch_threshold": PAGE,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(settings | _settings(port) | extra),
        "hicache_io_backend": "direct",
        "hicache_mem_layout": layout,
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
    }


def _settings(port: int) -> dict[str, Any]:
    return {"lmcache.mp.port": port, "lmcache.start_wait": 0, "lmcache.deadline": 5}


class SglangUnderTest(EngineUnderTest):
    """An engine as the conformance suite drives it."""

    can_abort = True
    can_be_killed = True

    def __init__(self, process: SglangProcess, ranks: int = 1) -> None:
        self.process = process
        self.clients = ranks

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "") -> list[Answer]:
        more = {"cache_salt": salt} if salt else {}
        try:
            answers = self.process.call("generate", prompts=list(map(list, prompts)), max_tokens=max_tokens, **more)
        except pytest.fail.Exception as failure:  # which is none to anybody but pytest
            raise RuntimeError("the engine has ended") from failure
        return [Answer(tuple(each["tokens"]), each["cached"], tuple(each["logprobs"])) for each in answers]

    def drop_own_cache(self) -> None:
        self.process.flush()

    def abort_after(self, prompt: Sequence[int], steps: int) -> None:
        self.process.call("abort_after", ids=list(prompt), steps=steps)

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        if self.process.alive:
            self.process.close()


class SglangTests(EngineAdapterTests):
    """The contract of engine adapters, for either door: a module derives its tests and says how its engines start."""

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
        cls.models, cls.folder = sglang_models, tmp_path_factory.mktemp("engines")

    @classmethod
    def start(cls, model: str, door: Callable[[int], dict[str, Any]], server: str) -> EngineUnderTest:
        """An engine with one of the models that comes to the server through a door: `linker` or `hicache`."""
        log = cls.folder / f"{model}{len(list(cls.folder.iterdir()))}.log"
        options = {"model_path": str(cls.models / model), "served_model_name": "llama"}
        process = SglangProcess(options | door(ServerAddress.parse(server).port), log)
        process.await_start()
        return SglangUnderTest(process)


def server_at(folder: Path) -> ServerProcess:
    """A server that is not started yet, with cells as small as the tests' pages."""
    return ServerProcess(free_port(), folder / "server.log", "--l1-cell-kb", "16", "--chunk-size", "256")


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that look like no other seed's."""
    generator = random.Random(seed)
    return [generator.randrange(3, 512) for _ in range(length)]


def same_answer(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal tokens, and logprobs that differ by rounding only."""
    return one["tokens"] == other["tokens"] and all(
        abs(a - b) <= LOGPROB_TOLERANCE for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    )
