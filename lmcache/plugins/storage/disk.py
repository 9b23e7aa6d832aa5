"""`disk:///folder?size_gb=100`: blobs in files of one folder, on this host.

*What holds after a crash.* A blob is written under a name of its own in its sub-folder, then renamed to its key: a
reader finds the old blob, the new one or none, whenever the process is killed. Nothing is flushed to the device by
default: should the host lose power, a file may be there whose bytes are not, and is found out and deleted when it is
read, since every blob is verified then. `sync=on` flushes a blob before it gets its name, and the name after.

*What is counted.* Files in blocks of 4096 bytes, those that are being written included: they never take more than the
limit. Before a blob is written, as many go as must; the order is an eviction policy's. An index of all of them, and a
log of what has been stored since it was written, are there for the next start, however this one ends: only the files
that the log names are looked at then. The order of use is kept, after a crash to a minute. After a crash of the host
all files are looked at.

*Who may use the folder.* One server at a time, which holds a lock on it.
"""

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from lmcache.core.hookspecs import hookimpl
from lmcache.core.interpreter import collector_off
from lmcache.core.tier import Buffer, StorageTier, TierLocation, TierUsage
from lmcache.core.tier_url import choice, positive_number
from lmcache.errors import ConfigError, TierError
from lmcache.plugins.storage import disk_file
from lmcache.plugins.storage.disk_folder import DiskFolder
from lmcache.plugins.storage.disk_index import BLOCK, DiskIndex, Entry, blocks_of, make_policy

log = logging.getLogger("lmcache.tier")

_USE_IS_NOTED = 60.0
"""Seconds: a blob's time of modification is brought up to date by a load when it is older than that."""

_EVICTIONS = 3
"""For one store, of as much as it takes: where that does not help, more would not, and all would go for nothing."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_OF_NO_USE = {errno.EIO, errno.EINVAL, errno.ELOOP}
"""What is said of a file that the drive cannot read, or that is no file but a pipe or a link."""


class DiskTier(StorageTier):
    """Blobs in files of one folder, bounded by bytes."""

    scheme = "disk"
    threads = 8
    shared = False
    evicts = True
    options: ClassVar[Mapping[str, str]] = {
        "size_gb": "GB (2^30 bytes) that the blobs may take on the disk",
        "policy": "which blob goes when there is no room: one of lmcache's own eviction policies; LRU unless said "
        "otherwise",
        "sync": "on: a stored blob is on the device before it counts as stored; off, unless said otherwise: the last "
        "ones may be lost when the host, not the server, crashes",
        "direct": "off: read and write through the page cache; auto, unless said otherwise: only where it must be",
        "mode": "serve, unless said otherwise; read: change nothing, take no lock; repair: delete, but store nothing",
    }

    def __init__(self, location: TierLocation) -> None:
        self._name = str(location)
        if location.host or location.port:
            raise ConfigError(
                f"--l2 {location} names a host", remedy=f"write disk:///{location.host}{location.path} for a folder"
            )
        options = location.options
        self._mode = choice(self.scheme, "mode", options.get("mode", "serve"), ("serve", "read", "repair"))
        self._sync = choice(self.scheme, "sync", options.get("sync", "off"), ("on", "off")) == "on"
        direct = choice(self.scheme, "direct", options.get("direct", "auto"), ("auto", "off")) == "auto"
        self._index = DiskIndex(make_policy(options.get("policy", "LRU")), self._limit(options))
        self._folder = DiskFolder(location.path)
        self._lock = threading.Lock()
        """Around the index, and whatever makes it and the folder differ: a name given to a file or taken from it.

        But for blobs that make room: to unlink one takes a drive as long as to write it, and nobody waits for that.
        """
        self._leaving: set[str] = set()
        """Keys of blobs that are no longer in the index, and whose files are about to go."""
        self._gone = threading.Condition(self._lock)
        """Told when one of them has gone, or stays after all."""
        self._full = threading.Lock()
        """Held by the one store that evicts because others have filled the file system."""
        self._numbers = itertools.count()
        self._evicted = 0
        self._closed = False
        if self._mode != "read":
            self._folder.lock()
        try:
            self._open(direct)
        except BaseException:
            self._folder.close()
            raise

    def store(self, key: str, parts: Sequence[Buffer], deadline: float) -> None:
        """Write a file, then give it its name; room is made before. TierError with the cause when it is not kept."""
        if self._mode != "serve":
            raise TierError(f"{self._name} is open to {self._mode}, not to store")
        length = sum(map(len, parts))
        path = self._folder.part_path(key, next(self._numbers))
        with self._failures(f"store {key}"), self._room_for(path, blocks_of(length)):
            try:
                self._write(path, key, parts, deadline)
                self._publish(path, Entry(key, length, time.time()), deadline)
            except BaseException:
                _unlink(path)
                raise

    def load(self, key: str, into: Sequence[memoryview], deadline: float) -> int:
        """Read a file. One that is gone, or was not here when the tier was opened, is no blob."""
        length = 0
        for length in self.load_in_pieces(key, into, deadline):  # noqa: B007  # the last one counts
            pass
        return length

    def load_in_pieces(self, key: str, into: Sequence[memoryview], deadline: float) -> Iterator[int]:
        """Read a file, some megabytes at a time."""
        with self._lock:
            entry = self._index.get(key)
        length = 0
        if entry is None:
            yield length
            return
        with self._failures(f"load {key}"):
            try:
                for length in self._read(entry, into, deadline):
                    yield length
            except OSError as error:
                if error.errno in _OF_NO_USE:
                    self._give_up(entry)
                raise
            if not length:
                self._give_up(entry)

    def contains(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """Answered from memory."""
        with self._lock:
            return [self._index.get(key) is not None for key in keys]

    def touch(self, keys: Sequence[str]) -> None:
        """A prompt's beginning is used whenever its tail is: it goes last."""
        now = time.time()
        with self._lock:
            found = [entry for entry in map(self._index.get, dict.fromkeys(keys)) if entry is not None]
            self._index.touch_all(found)
            for entry in found if self._mode == "serve" and not self._closed else ():
                if now - entry.used_at > _USE_IS_NOTED:
                    entry.used_at = now
                    self._folder.catalogue.used(entry)

    def delete(self, keys: Sequence[str], deadline: float) -> None:
        """Remove files."""
        if self._mode == "read":
            raise TierError(f"{self._name} is open to read, not to delete")
        for key in keys:
            with self._failures(f"delete {key}"), self._lock:
                entry = self._index.get(key)
                if entry is not None:
                    self._remove(entry)

    def keys(self) -> Iterator[tuple[str, int]]:
        """Those that are there now."""
        with self._lock:
            found = [(entry.key, entry.length) for entry in self._index]
        return iter(found)

    def usage(self) -> TierUsage:
        """Exact, in blocks of the filesystem."""
        index = self._index
        limit = None if index.limit is None else index.limit * BLOCK
        return TierUsage(len(index), index.used * BLOCK, limit, self._evicted)

    def close(self) -> None:
        """Leave word of what there is, and let another server have the folder."""
        if self._mode != "read":
            with contextlib.suppress(OSError), self._lock:  # without it the next start looks at the files
                self._closed = True
                self._folder.catalogue.close(self._index.by_age())
        self._folder.close()

    # ------------------------------------------------------------------------------------------------------ at opening

    def _limit(self, options: Mapping[str, str]) -> int | None:
        if "size_gb" not in options:
            if self._mode == "serve":
                raise ConfigError(f"--l2 {self._name} has no size_gb", remedy="say what it may take: ?size_gb=100")
            return None
        limit = int(positive_number(self.scheme, "size_gb", options["size_gb"]) * 2**30) // BLOCK
        if not limit:
            raise ConfigError(f"--l2 {self._name} has size_gb={options['size_gb']}, less than a block of {BLOCK} bytes")
        return limit

    def _open(self, direct: bool) -> None:
        try:
            with collector_off():  # a hundred thousand new entries would start it again and again
                self._index.restore(self._folder.scan(mine=self._mode != "read"))
            refusal = self._folder.direct_io() if direct and self._mode == "serve" else None
            self._unlink_all(self._make_room(0))
        except OSError as error:
            raise ConfigError(f"--l2 {self._name}: the folder cannot be used: {error}") from error
        self._direct = direct and (refusal is None or refusal.errno in _NO_ROOM)
        self.alignment = disk_file.ALIGNMENT if self._direct else 1
        if refusal and not self._direct:
            log.info("%s has no direct I/O (%s): blobs go through the page cache", self._name, refusal.strerror)
        usage = self.usage()
        log.info("%s holds %d blobs, %d bytes of at most %s", self._name, usage.blobs, usage.bytes, usage.limit_bytes)
        if self._mode == "serve":
            self._compare_with_the_disk(usage)

    def _compare_with_the_disk(self, usage: TierUsage) -> None:
        """Warn when the file system will be full before the tier is."""
        system = os.statvfs(self._folder.path)
        room = (usage.bytes or 0) + system.f_bavail * system.f_frsize
        if system.f_blocks and usage.limit_bytes and usage.limit_bytes > room:  # 0: one that does not count, like ramfs
            log.warning(
                "--l2 %s has size_gb=%.4g, more than its file system has room for, %.4g GB: whoever else writes to it "
                "takes room from the blobs; set size_gb to less, or free space",
                *(self._name, usage.limit_bytes / 2**30, room / 2**30),
            )

    @contextlib.contextmanager
    def _room_for(self, path: str, blocks: int) -> Iterator[None]:
        """Blocks that a file may take while it is written and has no name."""
        with self._lock:
            leaving = self._make_room(blocks)
            self._index.reserve(path, blocks)
        try:
            # before anything is written: the files never take more than the limit
            self._unlink_all(leaving)
            yield
        finally:
            with self._lock:
                self._index.release(path)

    def _make_room(self, blocks: int) -> list[Entry]:
        """Take out of the index what has to go; the lock is held. `_unlink_all` is called once it is not."""
        leaving = []
        while self._index.lacks(blocks):
            victim = self._take_out()
            if not victim:
                raise TierError("there is nothing left to evict")
            leaving.append(victim)
        return leaving

    def _take_out(self) -> Entry | None:
        self._check_open()
        victim = self._index.victim()
        if victim:
            self._index.remove(victim)
            self._leaving.add(victim.key)
        return victim

    def _unlink_all(self, leaving: Sequence[Entry]) -> None:
        """Remove the files of what was taken out. What cannot be removed is a blob as before."""
        for number, entry in enumerate(leaving):
            try:
                self._check_open()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._folder.blob_path(entry.key))
            except OSError:
                with self._lock:
                    self._index.restore(leaving[number:])
                    self._no_longer_leaving(leaving[number:])
                raise
            with self._lock:
                self._evicted += 1
                self._no_longer_leaving([entry])

    def _no_longer_leaving(self, entries: Sequence[Entry]) -> None:
        self._leaving.difference_update(entry.key for entry in entries)
        self._gone.notify_all()

    def _write(self, path: str, key: str, parts: Sequence[Buffer], deadline: float) -> None:
        try:
            self._write_once(path, parts, deadline)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            _unlink(path)
            self._write_evicting(path, key, parts, deadline)

    def _write_evicting(self, path: str, key: str, parts: Sequence[Buffer], deadline: float) -> None:
        """Others fill the file system, too: its end comes before the limit."""
        # one after the other, or what one evicts for its blob is taken by the half of another that fails, too
        if not self._full.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TierError("the deadline has passed")
        blocks = blocks_of(sum(map(len, parts)))
        try:
            for tries in itertools.count(1):
                try:
                    return self._write_once(path, parts, deadline)
                except OSError as error:
                    _unlink(path)
                    if error.errno not in _NO_ROOM or tries > _EVICTIONS or not self._shrink(blocks):
                        raise
                log.info("%s: others fill its file system, too; evicted some blobs for %s", self._name, key)
        finally:
            self._full.release()

    def _write_once(self, path: str, parts: Sequence[Buffer], deadline: float) -> None:
        try:
            fd = disk_file.open_new(path, parts, self._direct)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), 0o700)
            fd = disk_file.open_new(path, parts, self._direct)
        try:
            disk_file.write(fd, parts, deadline)
            if self._sync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _shrink(self, blocks: int) -> bool:
        """Evict as many blocks, as far as there are any; whether anything went."""
        leaving: list[Entry] = []
        with self._lock:
            while sum(entry.blocks for entry in leaving) < blocks and (victim := self._take_out()):
                leaving.append(victim)
        self._unlink_all(leaving)
        return bool(leaving)

    def _publish(self, path: str, entry: Entry, deadline: float) -> None:
        final = self._folder.blob_path(entry.key)
        with self._lock:
            # what has had this key until now must not take the new file with it
            if not self._gone.wait_for(lambda: entry.key not in self._leaving, max(0.0, deadline - time.monotonic())):
                raise TierError("the deadline has passed")
            self._check_open()
            self._folder.catalogue.storing(entry.key)
            os.rename(path, final)
            # in one step: who looks for room in between would count the file twice, and evict for nothing
            self._index.release(path)
            self._index.add(entry)
        self._keep_the_log_short()
        if self._sync:
            folder = os.open(os.path.dirname(final), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _keep_the_log_short(self) -> None:
        """Write another index when it is time. A failure leaves the one that there is."""
        catalogue = self._folder.catalogue
        with self._lock:
            if self._closed or not catalogue.too_long(len(self._index)):
                return
            try:
                generation = catalogue.begin_anew()
            except OSError:
                return
            entries = list(self._index)
        try:
            catalogue.write(generation, entries)
            with self._lock:
                self._check_open()
                catalogue.replace(generation)
        except OSError:
            with self._lock:
                catalogue.abandon(generation)

    def _check_open(self) -> None:
        """Calls that were given up on may come back when the folder is another server's."""
        if self._closed:
            raise TierError("the tier is closed")

    def _remove(self, entry: Entry) -> None:
        self._check_open()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder.blob_path(entry.key))
        self._index.remove(entry)

    def _read(self, entry: Entry, into: Sequence[memoryview], deadline: float) -> Iterator[int]:
        try:
            fd = disk_file.open_old(self._folder.blob_path(entry.key), into, self._direct)
        except FileNotFoundError:
            yield 0
            return
        try:
            yield from disk_file.read(fd, into, deadline)
            self._used(entry, fd)
        finally:
            os.close(fd)

    def _used(self, entry: Entry, fd: int) -> None:
        with self._lock:
            self._index.touch(entry)
        now = time.time()
        if self._mode == "serve" and now - entry.used_at > _USE_IS_NOTED:
            entry.used_at = now
            with contextlib.suppress(OSError):  # the next start will think it older than it is
                os.utime(fd)
            with self._lock:
                if self._index.get(entry.key) is entry and not self._closed:
                    self._folder.catalogue.used(entry)

    def _give_up(self, entry: Entry) -> None:
        """A blob that is gone, empty or cannot be read would be said to be there, and fail, each time it is wanted."""
        if self._mode == "serve":
            with contextlib.suppress(OSError), self._lock:
                if self._index.get(entry.key) is entry:
                    self._remove(entry)

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """Whatever the operating system says inside the block becomes a TierError that says what was tried."""
        try:
            yield
        except OSError as error:
            cause = error if isinstance(error, TierError) else error.strerror or error
            raise TierError(f"{self._name} cannot {what}: {cause}") from error


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


@hookimpl
def lmcache_register_storage_tiers() -> list[type[StorageTier]]:
    """Offer the tier to `--l2 disk:///folder?size_gb=…`."""
    return [DiskTier]
