"""What a disk tier that was closed well leaves for the next start: its entries, so that no file need be looked at.

    offset  bytes  what
         0      8  `LMCDISK` and a line feed
         8     16  xxh3_128 of all entries, in canonical order
        24    36*n entries, the one to evict first coming first: key (20), length (8), time of last use (8, a double)

Numbers are little-endian. It is removed before the folder changes, so it is there only if nothing has happened since;
who finds none, or one that is damaged, looks at the files.
"""

import contextlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import xxhash

from lmcache.core.tier import KEY_DIGITS
from lmcache.plugins.storage.disk_index import Entry

MAGIC = b"LMCDISK\n"
_HEADER = struct.Struct("<8s16s")
_ENTRY = struct.Struct(f"<{KEY_DIGITS // 2}sQd")


def write_catalogue(path: str, entries: Iterable[Entry]) -> None:
    """Write it, whole or not at all; OSError otherwise."""
    body = b"".join(_ENTRY.pack(bytes.fromhex(entry.key), entry.length, entry.used_at) for entry in entries)
    part = f"{path}.part"
    try:
        Path(part).write_bytes(_HEADER.pack(MAGIC, xxhash.xxh3_128_digest(body)) + body)
        os.rename(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def take_catalogue(path: str) -> dict[str, Entry]:
    """Read it and remove it; empty where there is none that can be believed. OSError when it cannot be removed."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return {}
    finally:
        for leaving in (path, f"{path}.part"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(leaving)
    if len(data) < _HEADER.size:
        return {}
    magic, checksum = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if magic != MAGIC or xxhash.xxh3_128_digest(body) != checksum:
        return {}
    found = (Entry(key.hex(), length, used_at) for key, length, used_at in _ENTRY.iter_unpack(body))
    return {entry.key: entry for entry in found}
