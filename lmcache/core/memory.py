"""How much memory the host and the container have: read before the arena takes any, so that it never dies of SIGBUS.

Linux only. Figures are bytes.
"""

from collections.abc import Iterator
from pathlib import Path

import attrs

MARGIN = 128 << 20
"""Left alone, always: the arena is not the only one that needs memory."""

PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""Where the kernel shows its figures."""


@attrs.frozen
class MemoryFigure:
    """An amount, and who says so."""

    bytes: int
    source: str


def total_memory() -> MemoryFigure:
    """The most this process could ever use: the host's memory or the tightest limit of a control group above it."""
    figures = [MemoryFigure(meminfo("MemTotal"), "the host's memory")]
    figures += [MemoryFigure(limit, f"the container's limit ({path})") for path, limit, _ in _memory_limits()]
    return min(figures, key=lambda figure: figure.bytes)


def available_memory() -> MemoryFigure:
    """What could be taken now, less `MARGIN`; never negative."""
    figures = [MemoryFigure(meminfo("MemAvailable"), "memory available on the host")]
    figures += [
        MemoryFigure(limit - used, f"memory left under the container's limit ({path})")
        for path, limit, used in _memory_limits()
    ]
    tightest = min(figures, key=lambda figure: figure.bytes)
    return MemoryFigure(max(0, tightest.bytes - MARGIN), tightest.source)


def meminfo(name: str) -> int:
    """A figure of /proc/meminfo that is given in kB. Raises OSError where there is none of that name."""
    for line in (PROC / "meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{PROC}/meminfo has no {name}")


def group_limits(
    controller: str, version_two: tuple[str, ...], version_one: tuple[str, ...]
) -> Iterator[tuple[Path, int, int]]:
    """(folder, limit, use) of each limited control group, from this process's to the root.

    For either version the names of two files, limit and use, and of a row in memory.stat that counts as no use, if any.
    """
    for line in _own_groups():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = CONTROL_GROUPS, version_two
        elif controller in controllers.split(","):
            root, names = CONTROL_GROUPS / controller, version_one
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            figures = _read_group(folder, *names)
            if figures:
                yield folder, *figures
            if folder == root:
                break
            folder = folder.parent


def _memory_limits() -> Iterator[tuple[Path, int, int]]:
    """As `group_limits`; the use is what cannot be reclaimed."""
    return group_limits(
        "memory",
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )


def _own_groups() -> list[str]:
    try:
        return (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []  # a kernel without control groups limits nobody


def _read_group(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str = "") -> tuple[int, int] | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stat = (folder / "memory.stat").read_text() if reclaimable_name else ""
    except (OSError, ValueError):
        return None  # the root group, or one that this mount does not show, limits nothing
    if limit == "max" or int(limit) >= 1 << 60:
        return None
    reclaimable = next((int(row.split()[1]) for row in stat.splitlines() if row.startswith(f"{reclaimable_name} ")), 0)
    return int(limit), usage - reclaimable
