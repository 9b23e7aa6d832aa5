"""Recording what engines ask, to a file that `lmcache simulate` replays. Hashes, sizes, times, tenants; never tokens.

A recording is JSON lines, one event each; this docstring is the format document. Every part can be read alone.

    {"event": "recording", "format": 1, "recording": "5f…", "part": 1, "policy": "LRU", "cells": …, "cell_bytes": …}
        at the start of a part, and whenever a server begins to write to it
    {"event": "namespace", "namespace": 0, "digest": "a1…", "model": "…", "chunk_size": 256, "geometry": {…}}
        before the first event of that number in a part, or in a server's share of it
    {"event": "lookup", "timestamp": 1790000000123, "input_length": 5041, "output_length": 0, "hash_ids": [7, 8, …],
     "namespace": 0, "tenant": "", "hit_length": 4864}
    {"event": "store", "timestamp": …, "input_length": 0, "output_length": 0, "hash_ids": […], "namespace": 0,
     "tenant": "", "parent": 6, "groups": [0]}

A `hash_id` stands for a chunk and all before it in its prompt: 53 bits of the chain hash, a number that every JSON
reader keeps. Lookups alone are a trace in the format of public ones: timestamps in ms, lengths in tokens. A lookup's
`input_length` is one more than the hit may cover. A store names what one worker offered, of these KV groups: chunks
that follow `parent`, or that start the prompt where it is null. Of ranks with bytes of their own, the first is heard.

What a request says of its chunks stands in either, where it says anything: `"ttl_s": 3600`, `"priority": "high"`,
`"session_end": true`.
"""

import contextlib
import logging
import queue
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.index import Namespace
from lmcache.core.keys import HASH_BYTES
from lmcache.core.protocol import Found, Lookup, Reserve, Reserved
from lmcache.core.record_file import RecordFile

log = logging.getLogger("lmcache.server")

FORMAT = 1

_ID_MASK = (1 << 53) - 1

WAITING_BYTES = 32 << 20
"""Hashes that wait to be written, at most: what comes while a slow disk has not caught up is not recorded."""

PAUSE_SECONDS = 0.25
"""Events are written in batches this far apart; so much a server that is killed does not get to write."""

CLOSE_SECONDS = 2.0
"""A stopping server waits this long, at most, for the disk."""


def hash_ids(hashes: bytes) -> list[int]:
    """What a recording calls chunks, given their joined chain hashes."""
    # of each hash's two words the first
    words = struct.unpack(f"<{len(hashes) // 8}Q", hashes)[:: HASH_BYTES // 8]
    return [word & _ID_MASK for word in words]


@attrs.frozen
class _Event:
    """A lookup, or what one worker offered of some groups."""

    timestamp: int
    namespace: Namespace
    tenant: str
    hashes: bytes
    parent: bytes = b""
    groups: tuple[int, ...] = ()
    """Empty for a lookup."""
    input_length: int = 0
    hit_length: int = 0
    hints: Hints = NO_HINTS

    def also(self, other: "_Event") -> "_Event | None":
        """This event with another's groups, if both offer the same chunks."""
        if not (self.groups and other.groups) or attrs.evolve(self, groups=(), timestamp=0) != attrs.evolve(
            other, groups=(), timestamp=0
        ):
            return None
        return attrs.evolve(self, groups=self.groups + other.groups)

    def line(self, number: int) -> dict[str, Any]:
        """As it is written; `number` is the namespace's in this part."""
        line: dict[str, Any] = {
            "event": "store" if self.groups else "lookup",
            "timestamp": self.timestamp,
            "input_length": self.input_length,
            "output_length": 0,
            "hash_ids": hash_ids(self.hashes),
            "namespace": number,
            "tenant": self.tenant,
            **_hinted(self.hints),
        }
        if self.groups:
            return {**line, "parent": next(iter(hash_ids(self.parent)), None), "groups": list(self.groups)}
        return {**line, "hit_length": self.hit_length}


class Recorder:
    """Takes note of requests in the server's thread, and writes in one of its own. Make it before the server.

    Raises ConfigError when the file cannot be had. From then on nothing that the disk does reaches a request: what
    cannot be written is counted, and said once in the log.
    """

    def __init__(self, path: str, limit_bytes: int, about: Mapping[str, object]) -> None:
        """Both parts of the file take `limit_bytes` at most; `about` tells what serves: policy and sizes."""
        self._file = RecordFile(Path(path), limit_bytes // 2, FORMAT)
        self._about = about
        self._numbers: dict[bytes, int] = {}
        """Namespaces that this part knows."""
        self._begun = False
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        # each of these is written by one thread only
        self._noted_bytes = 0
        self._settled_bytes = 0
        self._refused = 0
        self._failed = 0
        self._closing = threading.Event()
        # a daemon: a disk that hangs must not keep the process
        self._thread = threading.Thread(target=self._write_for_ever, name="lmcache-record", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Events that were not recorded."""
        return self._refused + self._failed

    def close(self) -> None:
        """Write what waits, and end; where the disk hangs, the file is closed once it goes on. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._events.put(None)
        self._thread.join(CLOSE_SECONDS)

    # ---------------------------------------------------------------------------------------- in the server's thread

    def observe(self, namespace: Namespace, request: Lookup | Reserve, reply: Found | Reserved) -> None:
        """A request was answered. Takes microseconds, whatever the disk does."""
        if isinstance(request, Reserve) and request.shard:
            return  # ranks with bytes of their own offer the same chunks, a moment apart
        if self._noted_bytes - self._settled_bytes > WAITING_BYTES:
            self._refused += 1
            return
        self._noted_bytes += len(request.hashes)
        self._events.put(_event(namespace, request, reply))

    # ----------------------------------------------------------------------------------------- in the recorder's own

    def _write_for_ever(self) -> None:
        open_ended = True
        while open_ended:
            batch = [self._events.get()]
            self._closing.wait(PAUSE_SECONDS)
            while not self._events.empty():
                batch.append(self._events.get())
            open_ended = None not in batch
            self._write([event for event in batch if event])
        self._file.close()

    def _write(self, events: list[_Event]) -> None:
        try:
            for event in _merged(events):
                self._file.append(self._lines(event))
                # the server may want to run now: what a batch takes must not be what one of its requests waits
                time.sleep(0)
            self._file.flush()
        except OSError as error:
            if not self._failed:
                log.warning("%s cannot be written: %s; counted as records_lost from now on", self._file.path, error)
            self._lost(events)
        except Exception:  # whatever it is, it must not end the thread
            if not self._failed:
                log.exception("%s cannot be written; counted as records_lost from now on", self._file.path)
            self._lost(events)
        self._settled_bytes += sum(len(event.hashes) for event in events)

    def _lost(self, events: list[_Event]) -> None:
        self._failed += len(events)
        self._file.forget()
        self._begin_again()

    def _lines(self, event: _Event) -> bytes:
        """An event as it is written, after what has to be known for reading it."""
        line = self._encoded(event)
        if not self._file.has_room(len(line)):
            self._file.rotate()
            self._begin_again()
            line = self._encoded(event)
        self._begun = True
        self._numbers.setdefault(event.namespace.digest, len(self._numbers))
        return line

    def _encoded(self, event: _Event) -> bytes:
        lines: list[dict[str, Any]] = []
        if not self._begun:
            lines.append({"event": "recording", **self._file.header, **self._about})
        known = event.namespace.digest in self._numbers
        number = self._numbers[event.namespace.digest] if known else len(self._numbers)
        lines += [] if known else [_described(event.namespace, number)]
        return b"".join(msgspec.json.encode(line) + b"\n" for line in [*lines, event.line(number)])

    def _begin_again(self) -> None:
        self._begun = False
        self._numbers.clear()


def _hinted(hints: Hints) -> dict[str, Any]:
    """What a request says of its chunks, as far as it says anything."""
    said: dict[str, Any] = {}
    if hints.ttl_s is not None:
        said["ttl_s"] = hints.ttl_s
    if hints.priority is not None:
        said["priority"] = hints.priority.name.lower()
    if hints.ends_session:
        said["session_end"] = True
    return said


def _event(namespace: Namespace, request: Lookup | Reserve, reply: Found | Reserved) -> _Event:
    now = time.time_ns() // 1_000_000
    if isinstance(request, Reserve):
        return _Event(
            now, namespace, request.tenant, request.hashes, request.parent, (request.group,), hints=request.hints
        )
    hit = reply.tokens if isinstance(reply, Found) else 0
    return _Event(
        *(now, namespace, request.tenant, request.hashes),
        input_length=request.limit + 1,
        hit_length=hit,
        hints=request.hints,
    )


def _merged(events: list[_Event]) -> Iterator[_Event]:
    """Events in order, what a worker offered of one group after another in one."""
    last: _Event | None = None
    for event in events:
        both = last.also(event) if last else None
        if last and not both:
            yield last
        last = both or event
    if last:
        yield last


def _described(namespace: Namespace, number: int) -> dict[str, Any]:
    # layer names are used in messages only
    groups = tuple(attrs.evolve(group, layers=()) for group in namespace.geometry.groups)
    return {
        "event": "namespace",
        "namespace": number,
        "digest": namespace.digest.hex(),
        "model": namespace.facts.get("model", ""),
        "chunk_size": namespace.chunk_size,
        "geometry": msgspec.to_builtins(attrs.evolve(namespace.geometry, groups=groups)),
    }


@contextlib.contextmanager
def recording(path: str, limit_bytes: int, about: Mapping[str, object]) -> Iterator[Recorder]:
    """A recorder for the length of the block."""
    recorder = Recorder(path, limit_bytes, about)
    try:
        yield recorder
    finally:
        recorder.close()
