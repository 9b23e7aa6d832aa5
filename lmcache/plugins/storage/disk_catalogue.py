"""What a disk tier leaves for the next start, so that few files need be looked at, however this one ends.

`lmcache.index` holds all entries as they were at one time:

    offset  bytes  what
         0      8  `LMCDISK` and a line feed
         8     16  xxh3_128 of everything behind, in canonical order
        24     16  generation: a random name
        40    36*n entries: key (20), length (8), time of last use (8, a double)

`lmcache.log-GENERATION` holds what has happened since to the entries of the index of that generation:

    offset  bytes  what
         0      8  `LMCDLOG` and a line feed
         8     16  id of the boot of the host in which it is written
        24    40*n records: as an entry, then xxh32 (4) of it. A length of 0: a blob is about to get this key

Numbers are little-endian. A blob gets its name only after its record is in the log, so what is in the index and not in
the log is as the index says, if it is there at all: which names there are is asked the file system at every start. A
tier that is closed well leaves an index, the entry to evict first coming first, and no log. A log of another boot may
lack what the host had not written: then, and where index or log is damaged, all files are looked at.
"""

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path

import attrs
import xxhash

from lmcache.core.tier import KEY_DIGITS
from lmcache.plugins.storage.disk_index import Entry

INDEX = "lmcache.index"
LOG = "lmcache.log-"
MAGIC = b"LMCDISK\n"
LOG_MAGIC = b"LMCDLOG\n"
FEWEST_RECORDS = 4096
"""A log of so many is not yet too long; nor is one of an eighth as many as there are entries."""

_HEADER = struct.Struct("<8s16s16s")
_ENTRY = struct.Struct(f"<{KEY_DIGITS // 2}sQd")
_LOG_HEADER = struct.Struct("<8s16s")
_RECORD = struct.Struct(f"<{KEY_DIGITS // 2}sQdI")


@attrs.frozen
class Remembered:
    """What the last tier has left word of."""

    entries: dict[str, Entry] = attrs.Factory(dict)
    """By key, the one to evict first coming first."""
    unsure: set[str] = attrs.Factory(set)
    """Keys of files that have to be looked at all the same."""
    generation: bytes = b""
    """Empty if nothing can be believed."""


class Catalogue:
    """Index and log of one folder that is ours. Not thread-safe: `DiskTier` holds its lock, but for `write`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._logs: list[bytes] = []
        """Their generations: two while a new index is being written. Opened for each record, and not held open, so that
        an administrator can make the file system read-only."""
        self._records = 0
        """In the newest log."""

    def read(self) -> Remembered:
        """What was left; whatever belongs to no index is removed."""
        remembered = self._believed()
        own = f"{LOG}{remembered.generation.hex()}"
        for name in os.listdir(self._folder):
            if (name.startswith(LOG) and name != own) or (name.startswith(f"{INDEX}-") and name.endswith(".part")):
                os.unlink(f"{self._folder}/{name}")
        return remembered

    def begin(self, remembered: Remembered, entries: Iterable[Entry]) -> None:
        """From now on everything is written down, beginning with `entries` unless what was remembered still stands.

        Never raises: where nothing can be written there will be no index, and the next start looks at all files.
        """
        try:
            if remembered.generation:
                self._open_log(remembered.generation)
                self._records = len(remembered.unsure)
            else:
                generation = self.begin_anew()
                self.write(generation, entries)
                self.replace(generation)
        except OSError:
            self._give_up()

    # ---------------------------------------------------------------------------------------------------- while serving

    def storing(self, key: str) -> None:
        """A file is about to get this key. OSError when the next start would not know of it."""
        if self._logs:
            self._append(key, 0, 0.0)
        if not self._logs:
            # what there is says nothing of this
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._folder}/{INDEX}")

    def used(self, entry: Entry) -> None:
        """An entry's time of last use has changed."""
        if self._logs:
            self._append(entry.key, entry.length, entry.used_at)

    def too_long(self, entries: int) -> bool:
        """Whether it is time for another index. Says so once."""
        due = len(self._logs) == 1 and self._records >= max(FEWEST_RECORDS, entries // 8)
        if due:
            self._records = 0
        return due

    def begin_anew(self) -> bytes:
        """Log for an index that is to hold what there is at this moment, too; returns its generation."""
        generation = os.urandom(16)
        self._open_log(generation)
        self._records = 0
        return generation

    def write(self, generation: bytes, entries: Iterable[Entry]) -> None:
        """Write that index, under another name: it may take a while. OSError when there is no room."""
        body = b"".join(_ENTRY.pack(bytes.fromhex(entry.key), entry.length, entry.used_at) for entry in entries)
        digest = xxhash.xxh3_128_digest(generation + body)
        part = os.open(self._part_path(generation), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(part, "wb") as file:
            file.write(_HEADER.pack(MAGIC, digest, generation) + body)

    def replace(self, generation: bytes) -> None:
        """Put it in place of the one that is there, whose logs go: whenever this is killed, one of the two is there."""
        os.rename(self._part_path(generation), f"{self._folder}/{INDEX}")
        for old in [each for each in self._logs if each != generation]:
            self._end_log(old)

    def abandon(self, generation: bytes) -> None:
        """There will be no index of that generation."""
        with contextlib.suppress(OSError):
            os.unlink(self._part_path(generation))
        if generation in self._logs:
            self._end_log(generation)

    def close(self, entries: Iterable[Entry]) -> None:
        """Leave an index that needs no log, the entry to evict first coming first; without room, what there is."""
        generation = os.urandom(16)
        try:
            self.write(generation, entries)
            self.replace(generation)
        except OSError:
            self.abandon(generation)
        self._logs.clear()

    # -------------------------------------------------------------------------------------------------------- the files

    def _append(self, key: str, length: int, used_at: float) -> None:
        entry = _ENTRY.pack(bytes.fromhex(key), length, used_at)
        record = entry + xxhash.xxh32_intdigest(entry).to_bytes(4, "little")
        self._records += 1
        try:
            for generation in self._logs:
                self._write(generation, record, os.O_WRONLY)
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """Nothing can be written down any more, so nothing must be believed."""
        self._logs.clear()
        with contextlib.suppress(OSError):
            os.unlink(f"{self._folder}/{INDEX}")

    def _open_log(self, generation: bytes) -> None:
        if not os.path.exists(self._log_path(generation)):
            self._write(generation, _LOG_HEADER.pack(LOG_MAGIC, _boot()), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            # an index without a log is believed, also after the host has lost power
            for path, kind in ((self._log_path(generation), 0), (self._folder, os.O_DIRECTORY)):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | kind)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        self._logs.append(generation)

    def _write(self, generation: bytes, data: bytes, flags: int) -> None:
        """Append to a log; OSError if not all of it could be."""
        log = os.open(self._log_path(generation), flags | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if os.write(log, data) < len(data):
                raise OSError("there is no room for a record")
        finally:
            os.close(log)

    def _end_log(self, generation: bytes) -> None:
        self._logs.remove(generation)
        with contextlib.suppress(OSError):
            os.unlink(self._log_path(generation))

    def _part_path(self, generation: bytes) -> str:
        return f"{self._folder}/{INDEX}-{generation.hex()}.part"

    def _log_path(self, generation: bytes) -> str:
        return f"{self._folder}/{LOG}{generation.hex()}"

    def _believed(self) -> Remembered:
        try:
            data = Path(self._folder, INDEX).read_bytes()
        except FileNotFoundError:
            return Remembered()
        if len(data) < _HEADER.size or (len(data) - _HEADER.size) % _ENTRY.size:
            return Remembered()
        magic, digest, generation = _HEADER.unpack_from(data)
        if magic != MAGIC or xxhash.xxh3_128_digest(memoryview(data)[24:]) != digest:
            return Remembered()
        found = (
            Entry(key.hex(), length, used_at)
            for key, length, used_at in _ENTRY.iter_unpack(memoryview(data)[_HEADER.size :])
        )
        entries = {entry.key: entry for entry in found}
        records = self._log(generation)
        if records is None:
            return Remembered()
        return _brought_up_to_date(entries, records, generation)

    def _log(self, generation: bytes) -> list[tuple[str, int, float]] | None:
        """Its records; none where there is no log, None where there is one that cannot be believed."""
        try:
            data = Path(self._log_path(generation)).read_bytes()
        except FileNotFoundError:
            return []
        whole = len(data) - (len(data) - _LOG_HEADER.size) % _RECORD.size
        if len(data) < _LOG_HEADER.size or _LOG_HEADER.unpack_from(data) != (LOG_MAGIC, _boot()):
            return None
        if whole < len(data):  # nothing came of a record that was not written to its end
            os.truncate(self._log_path(generation), whole)
        records = list(_records(memoryview(data)[_LOG_HEADER.size : whole]))
        return None if None in records else [record for record in records if record]


def _records(data: memoryview) -> Iterator[tuple[str, int, float] | None]:
    for at in range(0, len(data), _RECORD.size):
        key, length, used_at, check = _RECORD.unpack_from(data, at)
        right = xxhash.xxh32_intdigest(data[at : at + _ENTRY.size]) == check
        yield (key.hex(), length, used_at) if right else None


def _brought_up_to_date(
    entries: dict[str, Entry], records: list[tuple[str, int, float]], generation: bytes
) -> Remembered:
    unsure = {key for key, length, _ in records if not length}
    for key, length, used_at in records:
        if length and key in entries:
            entries[key].used_at = used_at
    if len(unsure) < len(records):  # there may be some that were used
        entries = {entry.key: entry for entry in sorted(entries.values(), key=attrgetter("used_at"))}
    return Remembered(entries, unsure, generation)


def _boot() -> bytes:
    """Of the host: another one each time it starts."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):  # no way to tell: no log is believed
        return os.urandom(16)
