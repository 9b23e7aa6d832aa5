"""Real SGLang engines on the CPU, and a server beside them, in processes of their own that end when they are closed."""

import random
from pathlib import Path
from typing import Any

from vllm_stand import LOGPROB_TOLERANCE, EngineProcess, ServerProcess, free_port

HERE = Path(__file__).parents[1] / "engines" / "sglang"
PAGE = 16

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": str(HERE / "cpu_kernels"),
    "HF_HUB_OFFLINE": "1",
    "SGLANG_LOG_MS": "1",
    "OMP_NUM_THREADS": "1",
}


class SglangProcess(EngineProcess):
    """An SGLang engine that a test talks to."""

    def __init__(self, options: dict[str, Any], log: Path) -> None:
        super().__init__(options, log, ENVIRONMENT, HERE / "engine_driver.py")

    def ask_one(self, ids: list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """One prompt's answer."""
        return self.call("generate", prompts=[ids], max_tokens=max_tokens, **more)[0]

    def flush(self) -> None:
        """Drop the engine's own cache."""
        assert self.call("flush")


def linker(port: int, **extra: Any) -> dict[str, Any]:
    """What users write to choose the linker; patient, so that a busy machine is not taken for one that has stopped."""
    settings = {"lmcache.mp.port": port, "lmcache.start_wait": 0, "lmcache.deadline": 5, **extra}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": "LMCacheLinker",
            "linker_module_path": "lmcache.engines.sglang.linker",
            "linker_extra_config": settings,
        },
    }


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
