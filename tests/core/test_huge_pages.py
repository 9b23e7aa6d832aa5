"""`--hugepages`: an arena of pages that the administrator has set aside, or a refusal that says what to do."""

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_stand import CHUNK, RunningServer, prompt, wait_until
from huge_page_stand import huge_pages

from lmcache.core import huge_pages as module
from lmcache.core import memory
from lmcache.core.arena import SLAB_BYTES, MappedArena, Mapping, create_segment
from lmcache.core.cells import unpack_cells
from lmcache.core.client import Client
from lmcache.core.config import GIB, KIB, ServerConfig
from lmcache.core.huge_pages import available_bytes, huge_page_pool, shortage
from lmcache.core.protocol import Role
from lmcache.engines.copying import mapped_arena
from lmcache.errors import ConfigError, MemoryLimitError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

MIB = 1 << 20
TWO = 2 * MIB


class Pool:
    """What a kernel shows of its huge pages of 2 MiB, as files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/meminfo").write_text("MemTotal: 1 kB\nHugepagesize:       2048 kB\n")
        self.folder = root / "pools/hugepages-2048kB"
        self.folder.mkdir(parents=True)
        self.has(0, 0)

    def has(self, total: int, free: int, promised: int = 0, more: int = 0, surplus: int = 0) -> None:
        figures = {"nr": total, "free": free, "resv": promised, "nr_overcommit": more, "surplus": surplus}
        for name, value in figures.items():
            (self.folder / f"{name}_hugepages").write_text(f"{value}\n")

    def limit(self, path: str, line: str, **figures: int | str) -> None:
        (self.root / "proc/self/cgroup").write_text(f"{line}\n")
        folder = self.root / "cgroup" / path
        folder.mkdir(parents=True)
        for name, value in figures.items():
            (folder / f"hugetlb.2MB.{name.replace('_in_', '#').replace('_', '.').replace('#', '_in_')}").write_text(
                f"{value}\n"
            )


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CONTROL_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(module, "POOLS", tmp_path / "pools")
    return Pool(tmp_path)


# ------------------------------------------------------------------------------------------------------ what there is


@pytest.mark.parametrize(
    ("figures", "total", "free"),
    [
        ((0, 0), 0, 0),
        ((700, 600), 700, 600),
        ((700, 600, 590), 700, 10),  # promised to somebody who has not touched them yet
        ((700, 0, 0, 50), 750, 50),  # the kernel makes 50 more when they are asked for
        ((720, 0, 0, 50, 20), 750, 30),  # 20 of which it has made
    ],
)
def test_pages_that_others_have_or_were_promised_are_not_free(
    pool: Pool, figures: tuple[int, ...], total: int, free: int
) -> None:
    pool.has(*figures)
    found = huge_page_pool()

    assert (found.page_bytes, found.total, found.free) == (TWO, total, free)
    assert found.available_bytes == available_bytes() == free * TWO


def test_a_kernel_without_huge_pages_is_told_of(pool: Pool) -> None:
    (pool.root / "proc/meminfo").write_text("MemTotal: 1 kB\n")

    with pytest.raises(
        ConfigError, match=r"--hugepages: this kernel offers no huge pages \(.*no Hugepagesize\); leave"
    ):
        huge_page_pool()
    assert available_bytes() == 0


def test_a_host_that_has_too_few_says_how_many_it_has_and_what_to_set(pool: Pool) -> None:
    pool.has(100, 40)
    config = ServerConfig(l1_bytes=8 * GIB, huge_page_bytes=TWO)
    with pytest.raises(MemoryLimitError) as refused:
        config.check_memory()
    assert str(refused.value) == (
        "--hugepages: L1 takes 4096 huge pages of 2 MiB, and this host has 100, 40 of them free; set them aside: "
        "sysctl -w vm.nr_hugepages=4156; or give L1 less with --l1-size-gb, or leave out --hugepages"
    )
    pool.has(4156, 4096)
    config.check_memory()


def test_pages_that_others_have_for_now_make_a_smaller_beginning_and_a_warning(pool: Pool) -> None:
    pool.has(4096, 40)
    ServerConfig(l1_bytes=8 * GIB, huge_page_bytes=TWO).check_memory()

    assert shortage(8 * GIB) == (
        "L1 takes 4096 huge pages of 2 MiB, of which 40 are free now: it begins smaller and grows as others give "
        "theirs back, as engines do with those of a server before this one. To have all of them at once: "
        "sysctl -w vm.nr_hugepages=8152"
    )


@pytest.mark.parametrize(
    ("path", "line", "figures"),
    [
        ("pod", "0::/pod", {"max": 64 * MIB, "current": 10 * MIB}),
        ("pod", "0::/pod", {"max": "max", "current": 0, "rsvd_max": 64 * MIB, "rsvd_current": 10 * MIB}),
        ("hugetlb/pod", "4:hugetlb:/pod", {"limit_in_bytes": 64 * MIB, "usage_in_bytes": 10 * MIB}),
    ],
    ids=["version 2", "version 2, promised", "version 1"],
)
def test_a_containers_limit_on_huge_pages_counts(
    pool: Pool, path: str, line: str, figures: dict[str, int | str]
) -> None:
    pool.has(4096, 4096)
    pool.limit(path, line, **figures)

    assert available_bytes() == 54 * MIB
    huge_page_pool().check(64 * MIB)
    with pytest.raises(
        MemoryLimitError, match=r"L1 takes 0\.125 GB of huge pages, and the container's limit \(.*0\.06"
    ):
        huge_page_pool().check(128 * MIB)


# ------------------------------------------------------------------------------------------------------------ settings


def test_the_arena_is_whole_huge_pages() -> None:
    def sizes(**settings: int) -> tuple[int, int]:
        made = ServerConfig(huge_page_bytes=TWO, **settings)
        return made.cells, made.arena_bytes

    assert sizes(l1_bytes=9 * MIB) == (8, 8 * MIB)
    assert sizes(l1_bytes=9 * MIB, cell_bytes=4 * MIB) == (2, 8 * MIB)
    assert sizes(l1_bytes=9 * MIB, cell_bytes=64 * KIB) == (128, 8 * MIB)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"cell_bytes": 1028 * KIB},
            (
                "--l1-cell-kb 1028 neither divides a huge page of 2048 KiB nor is a multiple of it; use 1024, or "
                "another power of two; or leave out --hugepages"
            ),
        ),
        (
            {"cell_bytes": 3 * MIB},
            (
                "--l1-cell-kb 3072 neither divides a huge page of 2048 KiB nor is a multiple of it; use 1024, or "
                "another power of two; or leave out --hugepages"
            ),
        ),
        (
            {"l1_bytes": MIB},
            "--l1-size-gb 0.000976562 holds no huge page of 2048 KiB; give more memory, or leave out --hugepages",
        ),
    ],
)
def test_cells_that_do_not_go_with_huge_pages_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig(huge_page_bytes=TWO, **settings)
    assert str(refused.value) == message


# ---------------------------------------------------------------------------------------------------------- real pages

L1 = SLAB_BYTES + 6 * MIB
"""A slab and part of one."""


@pytest.fixture
def page_bytes() -> Iterator[int]:
    """The host's huge pages, as many free as L1 takes."""
    with huge_pages(L1) as size:
        if L1 % size:
            pytest.skip(f"this host's huge pages have {size >> 20} MiB")
        yield size


def kernel_page_kib(memory: memoryview) -> set[int]:
    """Sizes of the pages that this process's arenas are made of, by /proc/self/smaps."""
    sizes, ours = set(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0] and ":" not in line.partition(" ")[0]:
            ours = "memfd:lmcache-l1" in line
        elif ours and line.startswith("KernelPageSize:"):
            sizes.add(int(line.split()[1]))
    assert memory.nbytes
    return sizes


def test_server_and_worker_map_the_same_huge_pages_and_the_last_one_gives_them_back(page_bytes: int) -> None:
    descriptor = create_segment(L1, page_bytes)
    server = Mapping(descriptor, L1, reserve=True)
    assert server.reserved
    assert huge_page_pool().free == 0, "promised at once"
    worker = MappedArena(descriptor, L1)
    os.close(descriptor)
    server.populate(0, L1)
    worker.prefault(L1)
    wait_until(lambda: worker._done == L1)
    server.memory[L1 - 3 :] = b"abc"

    assert kernel_page_kib(server.memory) == {page_bytes >> 10}
    assert bytes(worker.memory[L1 - 3 :]) == b"abc"
    server.close()
    assert huge_page_pool().free == 0
    worker.close()
    assert huge_page_pool().free == L1 // page_bytes


def test_what_is_not_there_is_an_error_and_no_death(page_bytes: int) -> None:
    descriptor = create_segment(L1, page_bytes)
    other = create_segment(L1, page_bytes)
    taken, late = Mapping(descriptor, L1, reserve=True), Mapping(other, L1, reserve=True)
    taken.populate(0, L1)
    try:
        assert (taken.reserved, late.reserved) == (True, False)
        with pytest.raises(OSError, match="cannot back arena bytes 0 to"):
            late.populate(0, SLAB_BYTES)
    finally:
        for mapping in (taken, late):
            mapping.close()
        os.close(descriptor)
        os.close(other)


GEOMETRY = Geometry((KVGroup(GroupKind.FULL, CHUNK, (MIB,)),))
"""A cell of 1 MiB a chunk."""


def store(client: Client, number: int, count: int) -> None:
    """Chunks of one byte each, over and over."""
    link = client.link()
    reply = link.reserve("", b"", b"".join(prompt(number, count)), 0, 0)
    with mapped_arena(link) as arena:
        for at, cell in enumerate(unpack_cells(reply.cells)):
            arena[cell * MIB : (cell + 1) * MIB] = (number + at) % 251
    link.commit(reply.reservation)
    assert len(reply.placed) == count


def test_an_engine_stores_and_finds_in_huge_pages(
    page_bytes: int, serve: Callable[..., RunningServer], connect: Callable[..., Client]
) -> None:
    server = serve(l1_bytes=L1, cell_bytes=MIB, huge_page_bytes=page_bytes)
    worker = connect(server.address, geometry=GEOMETRY)
    scheduler = connect(server.address, Role.SCHEDULER, geometry=GEOMETRY)
    count = server.server.config.cells
    store(worker, 7, count)  # every cell there is

    hit = scheduler.link().lookup("", b"".join(prompt(7, count // 4)), CHUNK * count).wait()
    cells = unpack_cells(worker.link().open(hit.ticket).cells[0])
    with mapped_arena(worker.link()) as arena:
        seen = [(int(arena[c * MIB]), int(arena[(c + 1) * MIB - 1])) for c in cells]
    assert seen == [((7 + at) % 251, (7 + at) % 251) for at in range(len(cells))]
    assert len(cells) == count // 4
    worker.link().confirm(hit.ticket)
    assert server.status()["huge_page_bytes"] == page_bytes
    assert (Path("/proc/meminfo").read_text()).count("HugePages_Free:        0") == 1


def test_a_server_whose_pages_others_hold_grows_when_they_are_given_back(
    page_bytes: int, serve: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    descriptor = create_segment(L1, page_bytes)
    old = Mapping(descriptor, L1, reserve=True)  # an engine that is stopped has the arena of the server before
    os.close(descriptor)
    old.populate(0, L1)
    server = serve(l1_bytes=L1, cell_bytes=MIB, huge_page_bytes=page_bytes, backed=False)
    server.status()
    assert server.gauge("cells_backed") == 0
    assert "of which 0 are free now: it begins smaller" in caplog.text
    old.close()

    server.server.service.keep_ahead()
    wait_until(lambda: server.gauge("cells_backed") == server.server.config.cells)


def test_ordinary_memory_is_what_there_is_without_the_flag() -> None:
    descriptor = create_segment(TWO)
    mapping = Mapping(descriptor, TWO)
    os.close(descriptor)
    mapping.populate(0, TWO)
    assert kernel_page_kib(mapping.memory) == {mmap.PAGESIZE >> 10}
    assert not mapping.reserved
    mapping.close()
    assert ServerConfig(l1_bytes=9 * MIB).cells == 9
