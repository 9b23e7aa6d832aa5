"""Whether files still hold what this process has read from them, told by stat calls alone.

An engine reads an adapter's files at moments that nobody is told: when it is first used, and again after it was
dropped. But it read nothing before its process began; and whoever changes a file, a link or a folder's entries moves
its ctime, which no user can set. What has not changed since the beginning was therefore the same at every moment from
then to the last look, and that is what the engine holds, whenever it read it.
"""

import fnmatch
import functools
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs

TICK_NS = 20_000_000
"""File times and process times are told by a clock that moves every 1 to 10 ms."""
COARSE_NS = 2_000_000_000
"""Some file systems keep whole seconds."""
FOREIGN_NS = 10_000_000_000
"""How far the clock of a file server is trusted to be from this host's."""
STEP_NS = 500_000_000
"""A clock that was set back by less than this goes unnoticed."""
LINKS = 40
"""As many symlinks as the kernel follows."""

LOCAL_FILE_SYSTEMS = frozenset(
    [
        "bcachefs",
        "btrfs",
        "erofs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "jfs",
        "overlay",
        "ramfs",
        "squashfs",
        "tmpfs",
        "xfs",
    ]
)
"""Those whose file times are told by this host's clock."""


@attrs.frozen
class Mount:
    """One line of the kernel's list of mounts."""

    point: str
    kind: str
    line: str


@attrs.frozen
class Beginning:
    """When a process began, and what was mounted when it first asked."""

    ns: int
    """Nanoseconds since 1970."""
    boot_ns: int
    """The same moment on the clock that runs since the boot, which cannot be set."""
    mounts: frozenset[Mount]


NEVER = Beginning(0, 0, frozenset())
"""Of a process that cannot be asked: nothing is older, so nothing that it has read is certain."""


@attrs.frozen
class Entry:
    """A file, or something on the way to one."""

    path: str
    whole: bool
    """Whether any change of it counts. Of a folder on the way only its place does: others come and go in it."""
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    def holds(self) -> bool:
        """Whether it is still so. Raises OSError when it is gone."""
        now = os.lstat(self.path)
        if (now.st_ino, now.st_dev) != (self.inode, self.device):
            return False
        return not self.whole or (now.st_ctime_ns, now.st_mtime_ns, now.st_size) == (
            self.ctime_ns,
            self.mtime_ns,
            self.size,
        )


@attrs.frozen
class Sight:
    """What was found on a path at one moment. A plain value, which other processes can compare with what they see."""

    given: str
    """The path as the engine was given it."""
    asked: str = ""
    """The same, absolute."""
    files: tuple[tuple[str, Entry], ...] = ()
    """The files in the folder, by name."""
    entries: tuple[Entry, ...] = ()
    """All that led to them and they themselves, the root of the file system first."""

    def holds(self) -> bool:
        """Whether all of it is still so, seen from this process. Stat calls only; raises nothing."""
        try:
            # another process may stand in another folder, where a relative path leads elsewhere
            return bool(self.entries) and absolute(self.given) == self.asked and all(map(Entry.holds, self.entries))
        except (OSError, ValueError):
            return False


def absolute(given: str) -> str:
    """A path as engines make it absolute."""
    if given.startswith("~"):
        return os.path.expanduser(given)  # noqa: PTH111 - which leaves alone what it does not know
    # absolute ones are left alone: taking out `..` by text is not what the kernel does after a symlink
    return given if given.startswith("/") else os.path.abspath(given)  # noqa: PTH100 - by text, as engines do


def look(given: str, patterns: Sequence[str]) -> Sight:
    """Look at the folder `given`, those files in it whose names match, and all that leads to them. Raises OSError."""
    asked = absolute(given)
    seen: dict[str, os.stat_result] = {}
    folder = _follow(asked, seen)
    found = {}
    for name in sorted(entry.name for entry in Path(folder).iterdir()):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            file = _follow(f"{folder}/{name}", seen)
            if stat.S_ISREG(seen[file].st_mode):
                found[name] = file
    whole = {folder, *found.values(), *(path for path, status in seen.items() if stat.S_ISLNK(status.st_mode))}
    entries = {path: _entry(path, status, whole=path in whole) for path, status in seen.items()}
    return Sight(given, asked, tuple((name, entries[file]) for name, file in found.items()), tuple(entries.values()))


def _follow(path: str, seen: dict[str, os.stat_result]) -> str:
    """Where `path` really is; notes every folder and link on the way. Raises OSError."""
    at, ahead, links = "/", path.split("/")[::-1], 0
    seen[at] = os.lstat(at)
    while ahead:
        part = ahead.pop()
        if part == "..":
            at = _above(at)
        elif part not in ("", "."):
            here = f"{at.rstrip('/')}/{part}"
            seen[here] = os.lstat(here)
            if stat.S_ISLNK(seen[here].st_mode):
                links += 1
                if links > LINKS:
                    raise OSError(f"too many symlinks on {path}")
                target = str(Path(here).readlink())
                at = "/" if target.startswith("/") else at
                ahead += target.split("/")[::-1]
            else:
                at = here
    return at


def _above(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _entry(path: str, status: os.stat_result, *, whole: bool) -> Entry:
    return Entry(path, whole, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def process_beginning() -> Beginning:
    """When this process began. The mounts are those of the first call in it. Raises nothing."""
    try:
        return _beginning(os.getpid())
    except OSError:
        return NEVER


@functools.cache
def _beginning(process: int) -> Beginning:
    # asked for by number, for a forked child began later than its parent did
    ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return Beginning(boot_ns + _clock_offset(), boot_ns, _mounts())


def _clock_offset() -> int:
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _mounts() -> frozenset[Mount]:
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        mounts.append(Mount(point, fields[fields.index("-") + 1], line))
    return frozenset(mounts)


def changed_since(sight: Sight, beginning: Beginning, *, places: bool = True) -> str:
    """Why what was seen may not be what the process has read, or nothing when it certainly is. Raises OSError.

    To be asked at the first sight: from then on it is enough that the sight holds. Without `places` it is taken for
    granted that no folder above was exchanged as a whole: good for what is read once, soon after the beginning.
    """
    if _clock_offset() < beginning.ns - beginning.boot_ns - STEP_NS:
        return "the host's clock was set back"
    mounts = _mounts()
    before = {
        entry.path: beginning.ns - (0 if _kind(entry.path, mounts) in LOCAL_FILE_SYSTEMS else FOREIGN_NS)
        for entry in sight.entries
    }
    later = [entry for entry in sight.entries if not _was(entry.ctime_ns, before[entry.path])]
    for entry in later:
        if entry.whole:
            return f"{entry.path} has changed"
    return _moved(sight, later, before, mounts ^ beginning.mounts) if places else ""


def _moved(sight: Sight, later: Sequence[Entry], before: Mapping[str, int], mounts: Iterable[Mount]) -> str:
    """Which folder on the way may have been exchanged as a whole since those times."""
    for mount in mounts:
        if any(_within(entry.path, mount.point) for entry in sight.entries):
            return f"something was mounted or unmounted at {mount.point}"
    by_path = {entry.path: entry for entry in sight.entries}
    # what has not changed is in its place, too: a rename moves the ctime of what it moves. In the others something
    # came or went at least; they stand where they stood if nothing came or went in the folder above
    for path in (entry.path for entry in later if entry.path != "/"):
        if not _was(by_path[_above(path)].mtime_ns, before[path]):
            return f"{path} may have been put in another one's place"
    return ""


def _was(time_ns: int, before: int) -> bool:
    return time_ns + (TICK_NS if time_ns % 1_000_000_000 else COARSE_NS) < before


def _within(path: str, point: str) -> bool:
    return path == point or path.startswith(f"{point.rstrip('/')}/")


def _kind(path: str, mounts: frozenset[Mount]) -> str:
    """The file system that holds `path`."""
    return max((m for m in mounts if _within(path, m.point)), key=lambda m: len(m.point)).kind
