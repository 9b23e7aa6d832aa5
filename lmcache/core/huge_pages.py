"""The host's pool of huge pages (hugetlbfs), which `--hugepages` has the arena made of.

Linux only. Such pages are set aside by the administrator, and no part of the memory that `memory.py` reads. Sources:
Documentation/admin-guide/mm/hugetlbpage.rst, Documentation/admin-guide/cgroup-v2.rst (HugeTLB).
"""

from pathlib import Path

import attrs

from lmcache.core.memory import MemoryFigure, group_limits, meminfo
from lmcache.errors import ConfigError, MemoryLimitError

POOLS = Path("/sys/kernel/mm/hugepages")
"""Where the kernel shows its pools, a folder for each size."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@attrs.frozen
class HugePagePool:
    """The pages of one size, now. What the kernel would make on demand (overcommit) counts as if it were there."""

    page_bytes: int
    total: int
    """Pages."""
    free: int
    """Pages that nobody has, nor was promised."""

    @property
    def available_bytes(self) -> int:
        """Bytes that may be taken now; less where a control group leaves less."""
        return min([self.free * self.page_bytes, *(figure.bytes for figure in self._left())])

    def check(self, size: int) -> None:
        """Raise MemoryLimitError where an arena of `size` bytes could never be made of these pages."""
        wanted = size // self.page_bytes
        if wanted > self.total:
            raise MemoryLimitError(
                f"--hugepages: L1 takes {wanted} huge pages of {page_text(self.page_bytes)}, and this host has "
                f"{self.total}, {self.free} of them free",
                remedy=f"set them aside: {self.remedy(wanted)}; or give L1 less with --l1-size-gb, or leave out "
                "--hugepages",
            )
        for limit in self._limits():
            if size > limit.bytes:
                raise MemoryLimitError(
                    f"--hugepages: L1 takes {size / GIB:.3g} GB of huge pages, and {limit.source} is "
                    f"{limit.bytes / GIB:.3g}",
                    remedy="give the container more (in Kubernetes a limit hugepages-2Mi), L1 less with "
                    "--l1-size-gb, or leave out --hugepages",
                )

    def remedy(self, wanted: int) -> str:
        """The command that makes `wanted` pages available beside what others have taken."""
        return f"sysctl -w vm.nr_hugepages={wanted + self.total - self.free}"

    def _limits(self) -> list[MemoryFigure]:
        return [MemoryFigure(limit, source) for source, limit, _ in self._groups()]

    def _left(self) -> list[MemoryFigure]:
        return [MemoryFigure(max(0, limit - used), source) for source, limit, used in self._groups()]

    def _groups(self) -> list[tuple[str, int, int]]:
        name = f"hugetlb.{page_text(self.page_bytes).replace('i', '').replace(' ', '')}"
        found = []
        # what is taken and what is promised have limits of their own
        for part in (name, f"{name}.rsvd"):
            two, one = (f"{part}.max", f"{part}.current"), (f"{part}.limit_in_bytes", f"{part}.usage_in_bytes")
            for folder, limit, used in group_limits("hugetlb", two, one):
                found.append((f"the container's limit ({folder / two[0]})", limit, used))
        return found


def huge_page_pool() -> HugePagePool:
    """The pool of the host's default size. Raises ConfigError where the kernel has none."""
    try:
        page_bytes = meminfo("Hugepagesize")
        pool = POOLS / f"hugepages-{page_bytes // KIB}kB"
        total, free, promised, more, surplus = (
            int((pool / f"{name}_hugepages").read_text()) for name in ("nr", "free", "resv", "nr_overcommit", "surplus")
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--hugepages: this kernel offers no huge pages ({error})", remedy="leave out --hugepages"
        ) from error
    return HugePagePool(page_bytes, total - surplus + more, max(0, free - promised) + max(0, more - surplus))


def available_bytes() -> int:
    """Of huge pages, now; none while nobody can tell."""
    try:
        return huge_page_pool().available_bytes
    except (ConfigError, OSError):
        return 0


def shortage(size: int) -> str:
    """What to tell whoever asked for more than is free now, though not for more than there is."""
    pool = huge_page_pool()
    wanted = size // pool.page_bytes
    return (
        f"L1 takes {wanted} huge pages of {page_text(pool.page_bytes)}, of which {pool.free} are free now: it begins "
        "smaller and grows as others give theirs back, as engines do with those of a server before this one. To have "
        f"all of them at once: {pool.remedy(wanted)}"
    )


def page_text(page_bytes: int) -> str:
    """As the administrator knows the size."""
    unit, name = next((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if page_bytes >= unit)
    return f"{page_bytes // unit} {name}"
