"""What memory there is, read from made-up hosts and containers."""

from pathlib import Path

import pytest

from lmcache.core import memory
from lmcache.core.memory import MARGIN, available_memory, total_memory

MIB = 1 << 20
GIB = 1 << 30


class Host:
    """A machine's `/proc` and `/sys/fs/cgroup`, as files."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.groups.mkdir()

    def has(self, total: int, available: int) -> None:
        (self.proc / "meminfo").write_text(
            f"MemTotal:  {total // 1024} kB\nMemFree:  1 kB\nMemAvailable:   {available // 1024} kB\n"
        )

    def runs_in(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def limit(self, group: str, limit: int | str, used: int, reclaimable: int = 0) -> None:
        folder = self.groups / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\nactive_file 7\n")

    def limit_v1(self, group: str, limit: int, used: int, reclaimable: int = 0) -> None:
        folder = self.groups / "memory" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {reclaimable}\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path)
    monkeypatch.setattr(memory, "PROC", made.proc)
    monkeypatch.setattr(memory, "CONTROL_GROUPS", made.groups)
    made.has(total=16 * GIB, available=10 * GIB)
    made.runs_in("0::/")
    return made


def test_without_limits_the_host_says_what_there_is(host: Host) -> None:
    assert (total_memory().bytes, total_memory().source) == (16 * GIB, "the host's memory")
    assert (available_memory().bytes, available_memory().source) == (10 * GIB - MARGIN, "memory available on the host")


def test_a_containers_limit_counts_and_is_named(host: Host) -> None:
    host.runs_in("0::/pod/box")
    host.limit("pod/box", 2 * GIB, used=GIB)

    assert total_memory().bytes == 2 * GIB
    assert total_memory().source == f"the container's limit ({host.groups}/pod/box)"
    assert available_memory().bytes == GIB - MARGIN
    assert available_memory().source == f"memory left under the container's limit ({host.groups}/pod/box)"


def test_the_tightest_limit_up_to_the_root_counts(host: Host) -> None:
    host.runs_in("0::/pod/box/process")
    host.limit("pod/box/process", "max", used=5 * GIB)
    host.limit("pod/box", 8 * GIB, used=5 * GIB)
    host.limit("pod", 6 * GIB, used=5 * GIB + 512 * MIB)

    assert total_memory().bytes == 6 * GIB
    assert available_memory().bytes == 512 * MIB - MARGIN


def test_a_limit_at_the_root_that_a_container_sees_counts(host: Host) -> None:
    """In a control-group namespace the container's own group is the root of the mount."""
    host.limit("", GIB, used=0)

    assert total_memory().bytes == GIB


def test_cached_files_that_can_be_reclaimed_are_not_in_use(host: Host) -> None:
    host.limit("", 4 * GIB, used=3 * GIB, reclaimable=2 * GIB)

    assert available_memory().bytes == 3 * GIB - MARGIN


def test_version_one_control_groups_count(host: Host) -> None:
    host.runs_in("5:cpu,memory:/docker/box", "4:devices:/docker/box", "0::/docker/box")
    host.limit_v1("docker/box", 3 * GIB, used=2 * GIB, reclaimable=GIB)

    assert total_memory().bytes == 3 * GIB
    assert available_memory().bytes == 2 * GIB - MARGIN


def test_version_ones_way_to_say_unlimited_is_no_limit(host: Host) -> None:
    host.runs_in("5:memory:/")
    host.limit_v1("", 9223372036854771712, used=GIB)

    assert total_memory().source == "the host's memory"


@pytest.mark.parametrize("path", ["/../elsewhere", "/../..", "/gone"])
def test_groups_that_this_mount_does_not_show_limit_nothing(host: Host, path: str) -> None:
    host.runs_in(f"0::{path}")

    assert total_memory().bytes == 16 * GIB


def test_a_kernel_without_control_groups_limits_nobody(host: Host) -> None:
    (host.proc / "self" / "cgroup").unlink()

    assert total_memory().bytes == 16 * GIB
    assert available_memory().bytes == 10 * GIB - MARGIN


def test_a_container_that_is_full_has_nothing_and_never_less(host: Host) -> None:
    host.limit("", GIB, used=GIB - MIB)

    assert available_memory().bytes == 0


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory().bytes < total_memory().bytes
