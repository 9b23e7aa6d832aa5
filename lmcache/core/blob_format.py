"""The format of a blob, version 1, byte by byte: this docstring is the document.

A blob is a header and, right behind it, the stored payload: the bytes of one shard of one object, as a codec wrote
them, or as they are. The header is as long as a multiple of 4096, so that cells of the arena lie behind it on the same
boundaries as in memory: they can go to a device and back without a copy. All numbers are little-endian and unsigned.

    offset  bytes  what
         0      8  magic: `LMCBLOB` and a line feed
         8      4  version of this format: 1
        12      4  length of the header in bytes: a multiple of 4096, at most 1 MiB
        16     20  key; a tier knows the blob by its 40 hexadecimal digits
        36     16  digest of the namespace
        52     16  chain hash
        68      4  KV group
        72      4  shard
        76      4  chunk size in tokens
        80      8  payload in bytes
        88      8  stored payload in bytes: what follows the header
        96     32  name of the codec in ASCII, padded with zeros; all zeros if the payload is stored as it is
       128     16  xxh3_128 of the stored payload, in canonical (big-endian) order
       144     16  xxh3_128 of the header with these 16 bytes zero, in canonical order
       160      4  length of the tenant's name in bytes
       164      4  length of the namespace's facts in bytes
       168    256  tenant who stored it first, in UTF-8, cut to fit, padded with zeros
       424         the namespace's facts in clear: a JSON object of strings in ASCII, names in order; then zeros

The key is the first 20 bytes of the SHA-256 of: `lmcache blob 1`, the digest of the namespace, the chain hash, group
and shard (4 bytes each), and the name of the codec. The tenant is no part of it: a chunk is the same whoever stored it.
The codec is: servers with different codecs can share a tier, and each finds what it can read.

The facts are there for people and `lmcache tier`: two servers share bytes if the digest is the same. The checksums find
what devices and networks do to bytes by accident. They are no signature: whoever may write to a tier is trusted with
what is in it, unless a codec authenticates (`aes-gcm`).

Any change to this layout gets another version. A reader leaves blobs of other versions alone.
"""

import enum
import hashlib
import json
import re
import struct
from collections.abc import Mapping

import attrs
import xxhash

from lmcache.core.keys import HASH_BYTES
from lmcache.core.tier import KEY_DIGITS, Buffer
from lmcache.errors import TierError

MAGIC = b"LMCBLOB\n"
VERSION = 1
ALIGNMENT = 4096
"""Headers are as long as a multiple of this."""
MOST_HEADER = 1 << 20
CODEC_BYTES = 32
TENANT_BYTES = 256

_FIXED = struct.Struct("<8sII20s16s16sIIIQQ32s16s16sII256s")
_PREFIX = struct.Struct("<8sII")
_CHECKSUM = slice(144, 160)
_KEY_BYTES = KEY_DIGITS // 2
_CODEC_NAME = re.compile(rb"[!-~]*")


class Finding(enum.Enum):
    """What bytes are that cannot be read as a blob."""

    DAMAGED = "damaged"
    """A blob of ours once: its header, or what follows it, is not as it was written."""
    FOREIGN = "foreign"
    """Not ours, or of another version of the format."""


def blob_key(namespace: bytes, chain_hash: bytes, group: int, shard: int, codec: str) -> str:
    """The key under which a tier keeps this blob."""
    facts = struct.pack("<16s16sII", namespace, chain_hash, group, shard)
    return hashlib.sha256(b"lmcache blob 1" + facts + codec.encode()).hexdigest()[:KEY_DIGITS]


def encode_facts(facts: Mapping[str, str]) -> bytes:
    """Facts as they stand in a header: equal for equal facts."""
    return json.dumps(dict(facts), sort_keys=True, separators=(",", ":")).encode("ascii")


def header_bytes(facts: bytes) -> int:
    """Length of the header of every blob whose namespace has these encoded facts; TierError if there are too many."""
    length = _padded(len(facts))
    if length > MOST_HEADER:
        raise TierError(f"{len(facts)} bytes of namespace facts do not fit in the header of a blob")
    return length


def _padded(facts_bytes: int) -> int:
    return -(-(_FIXED.size + facts_bytes) // ALIGNMENT) * ALIGNMENT


@attrs.frozen
class BlobHeader:
    """What the header of a blob says."""

    key: str
    namespace: bytes
    chain_hash: bytes
    group: int
    shard: int
    chunk_size: int
    """Tokens."""
    raw_bytes: int
    """Of the payload as it is in L1."""
    stored_bytes: int
    """Of what follows the header."""
    codec: str
    checksum: bytes
    """xxh3_128 of the stored payload."""
    tenant: str
    facts: bytes
    """The namespace's facts as `encode_facts` writes them."""

    @property
    def header_bytes(self) -> int:
        """Length of this header."""
        return header_bytes(self.facts)

    @property
    def blob_bytes(self) -> int:
        """Length of the whole blob."""
        return self.header_bytes + self.stored_bytes

    def facts_in_clear(self) -> dict[str, str]:
        """The facts by name; empty if whoever wrote them did not write them as documented."""
        try:
            facts = json.loads(self.facts)
        except (ValueError, RecursionError):
            return {}
        return {str(name): str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}

    def write_into(self, buffer: memoryview) -> None:
        """Fill `buffer`, which is `header_bytes` long, with this header."""
        tenant = _cut(self.tenant)
        _FIXED.pack_into(
            buffer,
            0,
            MAGIC,
            VERSION,
            len(buffer),
            bytes.fromhex(self.key),
            self.namespace,
            self.chain_hash,
            self.group,
            self.shard,
            self.chunk_size,
            self.raw_bytes,
            self.stored_bytes,
            self.codec.encode("ascii"),
            self.checksum,
            b"",
            len(tenant),
            len(self.facts),
            tenant,
        )
        end = _FIXED.size + len(self.facts)
        buffer[_FIXED.size : end] = self.facts
        buffer[end:] = bytes(len(buffer) - end)
        buffer[_CHECKSUM] = xxhash.xxh3_128_digest(buffer)


def claimed_header_bytes(start: Buffer) -> int:
    """How long the header that begins with `start` says that it is; 0 if that is no header of this version."""
    if len(start) < _PREFIX.size:
        return 0
    magic, version, length = _PREFIX.unpack_from(start)
    if magic != MAGIC or version != VERSION or length % ALIGNMENT or not ALIGNMENT <= length <= MOST_HEADER:
        return 0
    return int(length)


def read_header(data: Buffer) -> BlobHeader | Finding:
    """The header at the beginning of `data`, which must hold all of it, or what is wrong. Any bytes may be given."""
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        return Finding.DAMAGED if view and MAGIC.startswith(bytes(view[:8])) else Finding.FOREIGN
    magic, version, length = _PREFIX.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        return Finding.FOREIGN
    if not claimed_header_bytes(view) or length > len(view) or not _intact(view[:length]):
        return Finding.DAMAGED
    return _fields(view[:length])


def _fields(view: memoryview) -> BlobHeader | Finding:
    fields = _FIXED.unpack_from(view)
    key, namespace, chain_hash, group, shard, chunk_size, raw, stored, codec, checksum = fields[3:13]
    tenant_bytes, facts_bytes, tenant = fields[14:]
    end = _FIXED.size + facts_bytes
    codec = codec.rstrip(b"\0")
    # whoever writes a right checksum under wrong fields is a program that is not ours, or means us harm
    if tenant_bytes > TENANT_BYTES or not _CODEC_NAME.fullmatch(codec) or _padded(facts_bytes) != len(view):
        return Finding.DAMAGED
    header = BlobHeader(
        key.hex(),
        namespace,
        chain_hash,
        group,
        shard,
        chunk_size,
        raw,
        stored,
        codec.decode("ascii"),
        checksum,
        tenant[:tenant_bytes].decode("utf-8", "replace"),
        bytes(view[_FIXED.size : end]),
    )
    return header if header.key == blob_key(namespace, chain_hash, group, shard, header.codec) else Finding.DAMAGED


def _intact(header: memoryview) -> bool:
    state = xxhash.xxh3_128(header[: _CHECKSUM.start])
    state.update(bytes(HASH_BYTES))
    state.update(header[_CHECKSUM.stop :])
    return state.digest() == header[_CHECKSUM]


def _cut(tenant: str) -> bytes:
    """The beginning of a name that fits, without half a character at its end."""
    encoded = tenant.encode("utf-8", "replace")
    if len(encoded) <= TENANT_BYTES:
        return encoded
    return encoded[:TENANT_BYTES].decode("utf-8", "ignore").encode()
