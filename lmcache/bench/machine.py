"""What the machine is, and what it can do at best: every figure is read beside it."""

import os
import platform
from pathlib import Path

import attrs

from lmcache.core.memory import available_memory, total_memory

_HUGE = Path("/sys/kernel/mm/transparent_hugepage")


@attrs.frozen
class Machine:
    """Facts of the host. Strings are empty where it does not tell."""

    cpu: str
    cores: int
    """That this process may use."""
    last_level_cache: str
    memory_bytes: int
    """Host or container, whichever is less."""
    available_bytes: int
    huge_pages: str
    """Whether anonymous and shared memory may have them."""
    load: float
    """Processes that wanted to run, on average over the last minute: above `cores` every figure in seconds is noise."""
    python: str
    kernel: str
    device: str = ""
    """The accelerator, its driver and torch, where one is measured."""


def this_machine() -> Machine:
    """Read it now."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        last_level_cache=_last_level_cache(),
        memory_bytes=total_memory().bytes,
        available_bytes=available_memory().bytes,
        huge_pages=f"anonymous {_chosen('enabled')}, shared {_chosen('shmem_enabled')}",
        load=os.getloadavg()[0],
        python=platform.python_version(),
        kernel=platform.release(),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"model name", "Model", "cpu model"}:
            return value.strip()
    return platform.machine()


def _last_level_cache() -> str:
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return _read(sizes[-1]) if sizes else ""


def _chosen(name: str) -> str:
    """The value in brackets, of all that the kernel offers."""
    return _read(_HUGE / name).partition("[")[2].partition("]")[0] or "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
