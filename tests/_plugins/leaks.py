"""Fails a test that leaves something behind: threads, descriptors, mapped shared memory, processes, /dev/shm names.

What is there when a test, a module or the session begins must be all that is there when it has ended and its fixtures
are gone. Things end in their own time, so a leftover is looked at again for a while before it counts. A resource that
lives for a module is made by a module's fixture; nothing else has to be said. `@pytest.mark.may_leave("reason")` takes
a test or a module (`pytestmark`) out, for real engines that keep things for the process.
"""

import contextlib
import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PATIENCE_S = 30.0
"""How long a leftover may take to go away: a large engine that was killed, on a busy host."""

_PR_SET_CHILD_SUBREAPER = 36
_SHM = Path("/dev/shm")

_settled: set[str] = set()
"""Leftovers that have been reported or excused once: whoever comes later is not blamed for them."""


def pytest_configure() -> None:
    # a grandchild whose parent was killed becomes our child instead of init's, so that it is seen
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture(scope="session", autouse=True)
def _session_leaves_nothing() -> Iterator[None]:
    yield from _watch("the session")


@pytest.fixture(scope="module", autouse=True)
def _module_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _watch_unless_excused(request, request.node.name)


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _watch_unless_excused(request, "this test")


@contextlib.contextmanager
def kept_for_the_process() -> Iterator[None]:
    """What is opened in here is nobody's leak: a library keeps it until the process ends."""
    before = _inventory()
    yield
    _settled.update(_inventory() - before)


def _watch_unless_excused(request: pytest.FixtureRequest, who: str) -> Iterator[None]:
    excuse = request.node.get_closest_marker("may_leave")
    if excuse is None:
        yield from _watch(who)
        return
    if not (excuse.args and isinstance(excuse.args[0], str)):
        pytest.fail("may_leave needs its reason, a string", pytrace=False)
    before = _inventory()
    yield
    _settled.update(_inventory() - before)


def _watch(who: str) -> Iterator[None]:
    before = _inventory()
    yield
    left = _left_after_patience(before)
    _settled.update(left)
    if left:
        pytest.fail(f"{who} left behind:\n  " + "\n  ".join(map(_described, left)), pytrace=False)


def _left_after_patience(before: set[str]) -> list[str]:
    end = time.monotonic() + PATIENCE_S
    pause = 0.01
    while left := _inventory() - before - _settled:
        gc.collect()  # what only garbage keeps alive is no leak
        _reap_zombies(left)
        left = {item for item in left if not _held_by_strangers(item)} & _inventory()
        if not left or time.monotonic() > end:
            break
        time.sleep(pause)
        pause = min(pause * 2, 0.25)
    return sorted(left)


def _inventory() -> set[str]:
    """Everything that could leak, one line each, so that two inventories can be subtracted."""
    return {*_threads(), *_descriptors(), *_mappings(), *_children(), *_shm_names()}


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        yield f"thread {thread.name} ({thread.ident})"


def _descriptors() -> Iterator[str]:
    own = str(Path(f"/proc/{os.getpid()}/fd"))
    for name in os.listdir(own):  # noqa: PTH208 - iterdir would make a Path of each, at every test
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
            target = os.readlink(f"{own}/{name}")  # noqa: PTH115 - as above
            if target != own:
                yield f"descriptor {name} -> {target}"


def _mappings() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line or "/dev/shm/" in line:
            yield f"mapping {line.split()[0]} of {line.split(maxsplit=5)[5]}"


def _children() -> Iterator[str]:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            for pid in (task / "children").read_text().split():
                yield f"process {pid}"


def _shm_names() -> Iterator[str]:
    for name in os.listdir(_SHM) if _SHM.is_dir() else ():  # noqa: PTH208 - as above
        yield f"shared memory {_SHM / name}"


def _described(item: str) -> str:
    """An item as a report shows it: a process by its command line, too, which is no part of what it is."""
    if not item.startswith("process "):
        return item
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{item.split()[1]}/cmdline").read_bytes()
        return f"{item}: {command.replace(bytes(1), b' ').decode(errors='replace').strip()}"
    return item


def _reap_zombies(left: set[str]) -> None:
    """Collect new children that have ended: adopted ones have nobody else to do so, and an ended process is no leak."""
    for item in left:
        if item.startswith("process "):
            with contextlib.suppress(OSError):  # `Popen` copes with a child that somebody else has collected
                os.waitpid(int(item.split()[1]), os.WNOHANG)


def _held_by_strangers(item: str) -> bool:
    """Whether this is shared memory that a process outside this test run has open: other people's work on the host."""
    if not item.startswith("shared memory "):
        return False
    path = item.removeprefix("shared memory ")
    family = _family()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) not in family and _has_open(process, path):
            return True
    return not Path(path).exists()


def _has_open(process: Path, path: str) -> bool:
    with contextlib.suppress(OSError):
        if path in (process / "maps").read_text(errors="replace"):
            return True
        return any(str(entry.readlink()) == path for entry in (process / "fd").iterdir())
    return False


def _family() -> set[int]:
    """This process and its descendants."""
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (process / "stat").read_text()
            parents[int(process.name)] = int(stat.rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family and pid not in family}:
        family |= grown
    return family
