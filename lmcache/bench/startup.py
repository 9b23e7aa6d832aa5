"""Row 5: from nothing to a server that is ready, and what it weighs beside its arena."""

import os
import subprocess
import sys
import time
from statistics import median

from lmcache.bench.figures import Figure, Step, at_most, figure
from lmcache.bench.subject import ServerUnderTest

CPU_TARGET = at_most(0.5)
"""s"""
MEMORY_TARGET = at_most(60.0)
"""MB"""

ARENA_GIB = 0.125

SETTLE_SECONDS = 0.5
"""After it is ready a server puts memory behind its arena: what that costs is seen after this long."""


def measure_startup(starts: int, step: Step) -> list[Figure]:
    """Start the server `starts` times, each time after a bare interpreter, and once before that does not count."""
    cpu, wall, own, arena, bare = [], [], [], [], []
    for number in range(starts + 1):
        step(f"start {number} of {starts}" if number else "warming up")
        interpreter = _bare_interpreter()
        with ServerUnderTest("--l1-size-gb", str(ARENA_GIB)) as server:
            time.sleep(SETTLE_SECONDS)
            if not number:  # the first one may have to compile and read what the others find in memory
                continue
            bare.append(interpreter)
            cpu.append(server.cpu_until_ready)
            wall.append(server.wall_until_ready)
            own.append(server.anonymous_bytes() / 1e6)
            arena.append(server.shared_bytes() / 1e6)
    subject = "lmcache server"
    counts = {"starts": len(cpu)}
    beside = {"wall clock": median(wall), "a bare interpreter": median(bare)}
    return [
        figure(5, "CPU until ready", subject, cpu, "s", target=CPU_TARGET, beside=beside, counts=counts),
        figure(
            5,
            "anonymous memory",
            subject,
            own,
            "MB",
            target=MEMORY_TARGET,
            beside={"the arena": median(arena)},
            counts=counts,
        ),
    ]


def _bare_interpreter() -> float:
    """Seconds of CPU that this Python takes to start and end."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0  # it has been waited for
    return usage.ru_utime + usage.ru_stime
