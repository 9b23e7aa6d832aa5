"""One tier and its codec, seen from the cache: payloads out of the arena and back into it, and never a wrong byte.

Everything that a tier gives back is verified before it is called loaded: `blob_format` says what stands where. Called
by tiering's threads, and by `lmcache tier`; blocks.
"""

import enum
import mmap
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import attrs
import xxhash

from lmcache.core.blob_format import ALIGNMENT, BlobHeader, Finding, blob_key, encode_facts, header_bytes, read_header
from lmcache.core.codec import Codec
from lmcache.core.tier import Buffer, StorageTier
from lmcache.errors import CodecError
from lmcache.geometry.groups import Geometry

_NAMESPACES = 1024
"""Namespaces whose encoded facts are remembered: more would be a client that sends a new one each time."""

_FOREIGN = 1 << 16
"""Keys of foreign blobs that are remembered."""


class Loaded(enum.Enum):
    """What became of a load."""

    LOADED = "loaded"
    """The payload is in the buffers, every byte of it verified."""
    ABSENT = "absent"
    """The tier has no such blob."""
    DAMAGED = "damaged"
    """What was there was not what had been stored. It is deleted."""
    FOREIGN = "foreign"
    """What is there is not ours to read: encrypted with another key or, in a tier that is shared, somebody else's value
    or another version's. It is left alone until a store replaces it; to this BlobStore it is no longer there."""


@attrs.frozen
class BlobIdentity:
    """Which shard of which object a blob is, and what else its header says of it."""

    namespace: bytes
    """Digest of the facts."""
    facts: Mapping[str, str] = attrs.field(eq=False, repr=False)
    """The namespace in clear."""
    chain_hash: bytes
    group: int
    shard: int
    tenant: str = attrs.field(eq=False)
    chunk_size: int = attrs.field(eq=False)
    """Tokens."""
    parent: bytes = attrs.field(default=b"", eq=False)
    """Chain hash of the chunk before, for stores that know chunks; empty where there is none, or to read."""
    geometry: Geometry | None = attrs.field(default=None, eq=False, repr=False)
    """Of the namespace, for stores that know chunks."""

    @property
    def key(self) -> str:
        """What a tier without a codec knows it by. Never of the tenant: a chunk is the same whoever stored it."""
        return blob_key(self.namespace, self.chain_hash, self.group, self.shard, "")


class BlobStore:
    """One tier and its codec. Thread-safe; every method blocks, and raises what the tier raises: OSError, as a rule.

    Without a codec payloads go from and into the caller's buffers; with one they pass through a buffer for each thread,
    which is as large as the largest blob that it has seen.
    """

    in_order = False
    """Whether a chunk can be stored only once the one before it has been: then one store at a time is begun."""

    def __init__(self, tier: StorageTier, codec: Codec | None = None) -> None:
        self.tier = tier
        self.codec = codec
        self._codec_name = codec.name if codec else ""
        self._facts: dict[bytes, bytes] = {}
        self._foreign: dict[str, None] = {}
        self._scratch = _Scratch()

    def key(self, identity: BlobIdentity) -> str:
        """What the tier knows this blob by: `identity.key` without a codec."""
        return blob_key(identity.namespace, identity.chain_hash, identity.group, identity.shard, self._codec_name)

    def begin(self, epoch: str) -> None:
        """The server of this boot is about to be served by this store. Does not wait, and raises nothing."""

    def store(self, identity: BlobIdentity, payload: Sequence[memoryview], deadline: float) -> int | None:
        """Keep `payload`, all of it or nothing; returns the bytes that the blob takes in the tier.

        None: the store does not want it, which is no failure, and does not have it.

        `payload` must not change meanwhile. Raises TierError, or OSError, when it is not kept.
        """
        key, raw = self.key(identity), sum(map(len, payload))
        stored: Sequence[Buffer] = payload
        if self.codec is not None:
            stored = [self._encode(self.codec, payload, key, raw)]
        header = BlobHeader(
            key,
            identity.namespace,
            identity.chain_hash,
            identity.group,
            identity.shard,
            identity.chunk_size,
            raw,
            sum(map(len, stored)),
            self._codec_name,
            _checksum(stored),
            identity.tenant,
            self._encoded_facts(identity),
        )
        head = self._scratch.header(header.header_bytes)
        header.write_into(head)
        self.tier.store(key, [head, *stored], deadline)
        self._foreign.pop(key, None)
        return header.blob_bytes

    def load(self, identity: BlobIdentity, into: Sequence[memoryview], deadline: float) -> Loaded:
        """Fill `into`, which together must be as long as the payload that was stored, and verify it.

        Unless the answer is LOADED, anything may be in the buffers. Raises TierError, or OSError, when the tier could
        not read; whatever the tier holds then is left as it is.
        """
        key, raw = self.key(identity), sum(map(len, into))
        head = self._scratch.header(header_bytes(self._encoded_facts(identity)))
        body = list(into) if self.codec is None else [self._scratch.payload(_most_stored(raw))]
        checksum, length = _RunningChecksum(body), 0
        for length in self.tier.load_in_pieces(key, [head, *body], deadline):
            checksum.advance(length - len(head))
        if not length:
            return Loaded.ABSENT
        answer = self._verified(key, raw, head[:length], body, length, checksum)
        if isinstance(answer, BlobHeader):
            if self.codec is None or self._decoded(self.codec, body[0][: answer.stored_bytes], into, key):
                return Loaded.LOADED
            return self._is_foreign(key)
        if answer is Finding.FOREIGN and self.tier.shared:
            return self._is_foreign(key)
        self.tier.delete([key], deadline)
        return Loaded.DAMAGED

    def contains(self, identities: Sequence[BlobIdentity], deadline: float) -> list[bool]:
        """For each, whether the tier has a blob under its key that was not found to be foreign.

        `load` alone tells whether it is whole.
        """
        keys = [self.key(identity) for identity in identities]
        there = self.tier.contains(keys, deadline)
        # who is told that it is there loads it again and again, and never stores what would replace it
        return [found and key not in self._foreign for key, found in zip(keys, there, strict=True)]

    def delete(self, identities: Sequence[BlobIdentity], deadline: float) -> None:
        """Make the tier forget these."""
        self.tier.delete([self.key(identity) for identity in identities], deadline)

    def touch(self, identities: Sequence[BlobIdentity]) -> None:
        """Tell the tier that these have been used as one prompt, from its tail to its beginning."""
        self.tier.touch([self.key(identity) for identity in identities])

    def _is_foreign(self, key: str) -> Loaded:
        if len(self._foreign) >= _FOREIGN:
            self._foreign.clear()
        self._foreign[key] = None
        return Loaded.FOREIGN

    def _encoded_facts(self, identity: BlobIdentity) -> bytes:
        facts = self._facts.get(identity.namespace)
        if facts is None:
            if len(self._facts) >= _NAMESPACES:
                self._facts.clear()
            facts = self._facts[identity.namespace] = encode_facts(identity.facts)
        return facts

    @staticmethod
    def _verified(
        key: str, raw: int, head: memoryview, body: Sequence[memoryview], length: int, checksum: "_RunningChecksum"
    ) -> BlobHeader | Finding:
        """The header of what was read, if everything about it is right."""
        header = read_header(head)
        if isinstance(header, Finding):
            return header
        right = (
            header.key == key
            and header.raw_bytes == raw
            # a header of another length would have shifted the payload in its buffers
            and header.header_bytes == len(head)
            and header.blob_bytes == length
            and header.stored_bytes <= sum(map(len, body))
            # of all that was read behind the header: that is the payload, by what has been said before
            and header.checksum == checksum.digest()
        )
        return header if right else Finding.DAMAGED

    @staticmethod
    def _encode(codec: Codec, payload: Sequence[memoryview], key: str, raw: int) -> bytes:
        stored = codec.encode(payload, bytes.fromhex(key))
        if len(stored) > _most_stored(raw):
            # no reader would make room for it
            raise CodecError(f"the codec {codec.name} makes {len(stored)} bytes of {raw}, too many to be read back")
        return stored

    @staticmethod
    def _decoded(codec: Codec, stored: memoryview, into: Sequence[memoryview], key: str) -> bool:
        try:
            codec.decode(stored, into, bytes.fromhex(key))
        except CodecError:
            # these are the bytes that were stored, so it is we who lack what it takes to read them: another's key
            return False
        return True


def _most_stored(raw: int) -> int:
    """Bytes that a codec may make of `raw` bytes that it cannot make fewer."""
    return raw + raw // 64 + ALIGNMENT


def _checksum(parts: Sequence[Buffer]) -> bytes:
    """xxh3_128 of `parts` joined."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


class _RunningChecksum:
    """The same, of buffers that are being filled from the first byte on: what is there is hashed at once."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._state = xxhash.xxh3_128()
        self._rest = deque(parts)
        self._done = 0

    def advance(self, count: int) -> None:
        """The first `count` bytes are there, or all, if they are fewer."""
        new = count - self._done
        while new > 0 and self._rest:
            part = self._rest.popleft()
            if len(part) > new:
                self._rest.appendleft(part[new:])
                part = part[:new]
            self._state.update(part)
            self._done += len(part)
            new -= len(part)

    def digest(self) -> bytes:
        """Of what has come so far."""
        return self._state.digest()


class _Scratch(threading.local):
    """Page-aligned buffers of each thread, so that tiers with direct I/O need not copy. Their contents are anything."""

    def __init__(self) -> None:
        self._header = self._payload = memoryview(b"")

    def header(self, length: int) -> memoryview:
        """For a header."""
        if len(self._header) < length:
            self._header = _aligned(length)
        return self._header[:length]

    def payload(self, length: int) -> memoryview:
        """For a stored payload."""
        if len(self._payload) < length:
            self._payload = _aligned(length)
        return self._payload[:length]


def _aligned(length: int) -> memoryview:
    return memoryview(mmap.mmap(-1, -(-length // ALIGNMENT) * ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
