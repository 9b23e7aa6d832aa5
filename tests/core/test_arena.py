"""The segment: sealed, nameless, backed before use, and gone with the last process that maps it."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache.core import arena
from lmcache.core.arena import SLAB_BYTES, Backer, MappedArena, Mapping, create_segment
from lmcache.core.memory import MemoryFigure

PAGE = mmap.PAGESIZE
MIB = 1 << 20

F_GET_SEALS = 1034
SEAL, SHRINK, GROW = 1, 2, 4


@pytest.fixture
def segment() -> Iterator[int]:
    descriptor = create_segment(8 * MIB)
    yield descriptor
    os.close(descriptor)


def resident_pages(mapping: Mapping, start: int, stop: int) -> int:
    """Pages of the file that have memory, by mincore(2)."""
    anchor = ctypes.c_char.from_buffer(mapping.memory)
    address = ctypes.addressof(anchor)
    found = (ctypes.c_ubyte * ((stop - start) // PAGE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address + start), ctypes.c_size_t(stop - start), found) == 0
    return sum(byte & 1 for byte in found)


def shared_memory_of(pid: int) -> list[str]:
    """The lines of a process's memory map that show an arena."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/memfd:lmcache-l1" in line]


def arena_descriptors(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    found = []
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            if "lmcache-l1" in str(entry.readlink()):
                found.append(entry.name)
    return found


# --------------------------------------------------------------------------------------------------------- the segment


def test_nobody_can_resize_the_segment_or_undo_that(segment: int) -> None:
    assert fcntl.fcntl(segment, F_GET_SEALS) == SEAL | SHRINK | GROW
    for size in (0, 4 * MIB, 16 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(segment, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment, 1033, 8)
    assert os.fstat(segment).st_size == 8 * MIB


def test_the_segment_has_no_name_and_is_not_inherited_by_programs_that_are_started(segment: int) -> None:
    assert os.fstat(segment).st_nlink == 0
    assert not os.get_inheritable(segment)


def test_a_segment_that_cannot_be_made_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are all that is wanted
    with pytest.raises(OverflowError):
        create_segment(1 << 63)

    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_populating_backs_exactly_what_was_asked(segment: int) -> None:
    mapping = Mapping(segment, 8 * MIB)
    assert resident_pages(mapping, 0, 8 * MIB) == 0
    mapping.populate(2 * MIB, 5 * MIB)

    assert resident_pages(mapping, 2 * MIB, 5 * MIB) == 3 * MIB // PAGE
    assert resident_pages(mapping, 0, 8 * MIB) == 3 * MIB // PAGE
    assert os.fstat(segment).st_blocks * 512 == 3 * MIB
    mapping.close()


def test_populating_what_is_not_there_raises_and_says_where(segment: int) -> None:
    mapping = Mapping(segment, 8 * MIB)
    with pytest.raises(OSError, match="cannot back arena bytes 8388608 to 1099511627776"):
        mapping.populate(8 * MIB, 1 << 40)
    mapping.close()


def test_two_mappings_see_the_same_bytes(segment: int) -> None:
    server, worker = Mapping(segment, 8 * MIB), Mapping(segment, 8 * MIB)
    worker.memory[5 * MIB : 5 * MIB + 3] = b"abc"

    assert bytes(server.memory[5 * MIB : 5 * MIB + 3]) == b"abc"
    server.close()
    worker.close()


def test_a_closed_mapping_offers_no_memory_and_may_be_closed_again(segment: int) -> None:
    mapping = Mapping(segment, 8 * MIB)
    mapping.close()
    mapping.close()

    with pytest.raises(ValueError, match="closed"):
        _ = mapping.memory
    assert shared_memory_of(os.getpid()) == []


def test_a_view_that_outlives_its_mapping_still_reads_its_bytes_and_unmaps_at_its_end(segment: int) -> None:
    mapping = Mapping(segment, 8 * MIB)
    view = mapping.memory
    view[0:1] = b"x"
    mapping.close()

    assert view[0] == ord("x")
    assert len(shared_memory_of(os.getpid())) == 1
    view.release()
    del view
    assert shared_memory_of(os.getpid()) == []


# ------------------------------------------------------------------------------------------------------------- workers


def wait_until(condition: threading.Event) -> None:
    assert condition.wait(30)


def test_a_worker_maps_in_the_background_what_the_server_has_backed(segment: int) -> None:
    server = Mapping(segment, 8 * MIB)
    server.populate(0, 4 * MIB)
    mapped = MappedArena(segment, 8 * MIB)
    populated = threading.Event()
    real = mapped._mapping.populate
    ranges = []

    def watched(start: int, stop: int) -> None:
        real(start, stop)
        ranges.append((start, stop))
        populated.set()

    mapped._mapping.populate = watched  # type: ignore[method-assign]
    mapped.prefault(4 * MIB)
    wait_until(populated)
    mapped.prefault(3 * MIB)  # nothing new
    mapped.close()
    server.close()

    assert ranges == [(0, 4 * MIB)]
    assert os.fstat(segment).st_blocks * 512 == 4 * MIB


def test_a_worker_never_maps_beyond_the_arena(segment: int) -> None:
    mapped = MappedArena(segment, 8 * MIB)
    done = threading.Event()
    real = mapped._mapping.populate

    def watched(start: int, stop: int) -> None:
        real(start, stop)
        assert stop <= 8 * MIB
        done.set()

    mapped._mapping.populate = watched  # type: ignore[method-assign]
    mapped.prefault(1 << 40)
    wait_until(done)
    mapped.close()


def test_a_worker_that_cannot_map_ahead_copies_all_the_same(segment: int) -> None:
    mapped = MappedArena(segment, 8 * MIB)
    tried = threading.Event()

    def failing(start: int, stop: int) -> None:
        tried.set()
        raise OSError(errno.ENOMEM, "no")

    mapped._mapping.populate = failing  # type: ignore[method-assign]
    mapped.prefault(MIB)
    wait_until(tried)
    mapped.memory[0:1] = b"y"

    assert mapped.memory[0] == ord("y")
    mapped.close()


class Attendant:
    """Writes down what it is told, and by whom."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.threads: set[str] = set()
        self.enough = threading.Event()

    def mapped(self, address: int, stop: int, size: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.told.append(("mapped", stop))
        if stop == size:
            self.enough.set()

    def unmapping(self, address: int) -> None:
        self.threads.add(threading.current_thread().name)
        ctypes.string_at(address, 1)  # the end of this process, were it not mapped
        self.told.append(("unmapping", 0))


def test_an_attendant_is_told_of_every_slab_also_of_those_from_before_and_of_the_end() -> None:
    descriptor = create_segment(2 * SLAB_BYTES + MIB)
    mapped = MappedArena(descriptor, 2 * SLAB_BYTES + MIB)
    os.close(descriptor)
    attendant, ignored = Attendant(), Attendant()
    mapped.prefault(SLAB_BYTES)
    mapped.attend(attendant)
    mapped.attend(ignored)
    mapped.attend(attendant)
    mapped.prefault(1 << 40)
    wait_until(attendant.enough)
    mapped.close()

    stops = [stop for what, stop in attendant.told if what == "mapped"]
    assert stops == [SLAB_BYTES, 2 * SLAB_BYTES, 2 * SLAB_BYTES + MIB]
    assert attendant.told[-1] == ("unmapping", 0)
    assert attendant.threads == {"lmcache-prefault"}
    assert ignored.told == []


CHILD = """
import os, sys
from lmcache.core.arena import Mapping, create_segment
size = 4 << 20
segment = create_segment(size)
mapping = Mapping(segment, size)
mapping.populate(0, size)
read, write = os.pipe()
child = os.fork()
if child == 0:
    print("maps", sum("lmcache-l1" in line for line in open("/proc/self/maps")), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent", sum("lmcache-l1" in line for line in open("/proc/self/maps")), flush=True)
"""


def test_a_forked_child_does_not_have_the_pages() -> None:
    answer = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)

    assert answer.stdout.split("\n")[:2] == ["maps 0", "parent 1"]


HOLDER = """
import os, sys
from lmcache.core.arena import Mapping, create_segment
size = 64 << 20
segment = create_segment(size)
mapping = Mapping(segment, size)
mapping.populate(0, size)
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_memory_is_gone_with_a_killed_process() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        assert len(shared_memory_of(holder.pid)) == 1
        assert len(arena_descriptors(holder.pid)) == 2  # the segment's, and the mapping's own
        number = Path(f"/proc/{holder.pid}/fd/{arena_descriptors(holder.pid)[0]}").stat().st_ino
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    everywhere = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            everywhere += [line for line in shared_memory_of(int(process.name)) if f" {number} " in line]

    assert everywhere == []
    assert not [name for name in os.listdir("/dev/shm") if "lmcache" in name]  # noqa: PTH208 - names are all we want


# ------------------------------------------------------------------------------------------------------------- backing


class Progress:
    """Waits for a backer's reports."""

    def __init__(self) -> None:
        self._reported = threading.Condition()

    def __call__(self) -> None:
        with self._reported:
            self._reported.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._reported:
            assert self._reported.wait_for(condition, 60)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "SLAB_BYTES", MIB)


@pytest.fixture
def mapping(segment: int) -> Iterator[Mapping]:
    made = Mapping(segment, 8 * MIB)
    yield made
    made.close()


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "available_memory", lambda: MemoryFigure(1 << 40, "a test"))


@pytest.mark.usefixtures("small_slabs", "plenty")
def test_what_is_wanted_is_backed_and_no_more_than_its_slabs(mapping: Mapping) -> None:
    progress = Progress()
    backer = Backer(mapping, 2, progress)
    assert not backer.working
    assert backer.request(MIB + 1)
    progress.wait_for(lambda: backer.backed == 2 * MIB)

    assert not backer.working
    assert not backer.complete
    assert resident_pages(mapping, 0, 8 * MIB) == 2 * MIB // PAGE
    backer.close()


@pytest.mark.usefixtures("small_slabs", "plenty")
def test_asking_for_more_than_the_arena_backs_all_of_it_once(mapping: Mapping) -> None:
    progress = Progress()
    backer = Backer(mapping, 2, progress)
    while backer.request(1 << 40):
        progress.wait_for(lambda: not backer.working)

    assert backer.complete
    assert not backer.request(1 << 40)
    backer.close()


@pytest.mark.usefixtures("small_slabs", "plenty")
def test_slabs_that_are_backed_out_of_order_count_when_those_before_them_are_there(
    mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress()
    second_done, go = threading.Event(), threading.Event()

    def populate(start: int, stop: int) -> None:
        if start == 0:
            assert go.wait(30)
        else:
            second_done.set()

    monkeypatch.setattr(mapping, "populate", populate)
    backer = Backer(mapping, 2, progress)
    backer.request(2 * MIB)
    wait_until(second_done)
    assert backer.backed == 0
    go.set()
    progress.wait_for(lambda: backer.backed == 2 * MIB)
    backer.close()


@pytest.mark.usefixtures("small_slabs")
def test_no_more_is_backed_than_the_host_has_less_what_is_on_its_way(
    mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "available_memory", lambda: MemoryFigure(2 * MIB + 5, "a test"))
    held = threading.Event()
    monkeypatch.setattr(mapping, "populate", lambda start, stop: held.wait(30) and None)
    progress = Progress()
    backer = Backer(mapping, 8, progress)
    assert backer.request(8 * MIB)
    held.set()
    progress.wait_for(lambda: not backer.working)

    assert backer.backed == 2 * MIB
    backer.close()


@pytest.mark.usefixtures("small_slabs")
def test_short_of_memory_nothing_is_started_and_later_it_goes_on(
    mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "available_memory", lambda: MemoryFigure(0, "a test"))
    progress = Progress()
    backer = Backer(mapping, 2, progress)
    assert not backer.request(MIB)
    monkeypatch.setattr(arena, "available_memory", lambda: MemoryFigure(1 << 40, "a test"))

    assert backer.request(MIB)
    progress.wait_for(lambda: backer.backed == MIB)
    backer.close()


@pytest.mark.usefixtures("small_slabs", "plenty")
def test_a_slab_that_fails_is_tried_again_and_those_behind_it_are_not_lost(
    mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once = [True]
    real = mapping.populate

    def populate(start: int, stop: int) -> None:
        if start == 0 and fail_once:
            fail_once.clear()
            raise OSError(errno.ENOMEM, "no")
        real(start, stop)

    monkeypatch.setattr(mapping, "populate", populate)
    progress = Progress()
    backer = Backer(mapping, 1, progress)
    backer.request(MIB)
    progress.wait_for(lambda: not backer.working)
    assert backer.backed == 0
    while backer.request(3 * MIB):
        progress.wait_for(lambda: not backer.working)

    assert backer.backed == 3 * MIB
    backer.close()


@pytest.mark.usefixtures("plenty")
def test_closing_waits_for_the_slab_in_progress_and_starts_no_other(
    mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "SLAB_BYTES", MIB)
    started, go = threading.Event(), threading.Event()
    populated: list[int] = []

    def populate(start: int, stop: int) -> None:
        started.set()
        assert go.wait(30)
        populated.append(start)

    monkeypatch.setattr(mapping, "populate", populate)
    backer = Backer(mapping, 1, lambda: None)
    backer.request(MIB)
    wait_until(started)
    closing = threading.Thread(target=backer.close)
    closing.start()
    go.set()
    closing.join(30)

    assert not closing.is_alive()
    assert populated == [0]
    assert SLAB_BYTES == 64 * MIB
