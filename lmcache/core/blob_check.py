"""What is in a tier, blob by blob, without knowing what was stored there: for `lmcache tier`.

A blob says itself what it is, so its header is enough to tell whether it is whole. Whether its payload can be decoded
is not looked at: that takes the codec, and perhaps its key.
"""

import enum

import attrs
import xxhash

from lmcache.core.blob_format import ALIGNMENT, BlobHeader, Finding, claimed_header_bytes, read_header
from lmcache.core.tier import StorageTier


class Condition(enum.StrEnum):
    """How a blob is."""

    WHOLE = "whole"
    """As it was written, as far as was looked."""
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    """Not ours, or of another version of the format, in a tier that others write to."""
    GONE = "gone"
    """It was there when the tier was asked for its keys."""
    UNREADABLE = "unreadable"
    """The tier could not read it; it may be whole."""


@attrs.frozen
class BlobReport:
    """What was found under one key."""

    key: str
    condition: Condition
    length: int = 0
    """Bytes."""
    header: BlobHeader | None = None
    """Of a whole blob."""
    cause: str = ""
    """Why it is unreadable."""


def look_at_header(tier: StorageTier, key: str, deadline: float) -> BlobReport:
    """Read one blob's header only."""
    return _report(tier, key, deadline, ALIGNMENT, whole=False)


def check_blob(tier: StorageTier, key: str, length: int, deadline: float) -> BlobReport:
    """Read one blob, of `length` bytes as far as is known, and verify all of it."""
    return _report(tier, key, deadline, length, whole=True)


def _report(tier: StorageTier, key: str, deadline: float, size: int, whole: bool) -> BlobReport:
    try:
        buffer = memoryview(bytearray(size))
        length = tier.load(key, [buffer], deadline)
        wanted = length if whole else min(length, claimed_header_bytes(buffer))
        if wanted > size:
            buffer = memoryview(bytearray(wanted))
            length = tier.load(key, [buffer], deadline)
    except OSError as error:
        return BlobReport(key, Condition.UNREADABLE, cause=str(error))
    if not length:
        return BlobReport(key, Condition.GONE)
    found = read_header(buffer[:length])
    if isinstance(found, BlobHeader) and _is_right(found, key, buffer, length, whole):
        return BlobReport(key, Condition.WHOLE, length, found)
    if found is Finding.FOREIGN and tier.shared:
        return BlobReport(key, Condition.FOREIGN, length)
    return BlobReport(key, Condition.DAMAGED, length)


def _is_right(header: BlobHeader, key: str, buffer: memoryview, length: int, whole: bool) -> bool:
    if header.key != key or header.blob_bytes != length:
        return False
    return not whole or xxhash.xxh3_128_digest(buffer[header.header_bytes : length]) == header.checksum
