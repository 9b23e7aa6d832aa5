"""The two keys of the cache: who may share bytes (namespace digest) and which tokens they stand for (chain hashes).

Both are plain digests of plain facts: equal in any process, on any host, under any `PYTHONHASHSEED`.
"""

import array
import hashlib
import itertools
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import NewType

import attrs

ChainHash = NewType("ChainHash", bytes)
"""128 bits: a prompt's tokens up to a chunk's end, and everything besides tokens that changes their KV."""
NamespaceDigest = NewType("NamespaceDigest", bytes)
"""128 bits: everything about an engine that gives the same tokens other bytes."""

HASH_BYTES = 16

_ONE = struct.Struct(f"{HASH_BYTES}s")
_SIXTY_FOUR = struct.Struct(_ONE.format * 64)


def _digest(domain: bytes, facts: Mapping[str, str]) -> bytes:
    """Hash a mapping so that no two mappings collide by concatenation: every part is preceded by its length."""
    state = hashlib.sha256(domain)
    for name, value in sorted(facts.items()):
        # whatever a user may send is hashed, lone surrogates included
        for part in (name.encode("utf-8", "surrogatepass"), value.encode("utf-8", "surrogatepass")):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.digest()[:HASH_BYTES]


def namespace_digest(facts: Mapping[str, str]) -> NamespaceDigest:
    """Name the namespace that `facts` (model, weights, dtype, layout, geometry, chunk size, …) describe."""
    return NamespaceDigest(_digest(b"lmcache namespace 1", facts))


def chain_root(content: Mapping[str, str]) -> ChainHash:
    """Where a prompt's chain starts: the content, besides tokens, that changes the KV of all of them.

    Keys an adapter uses: `salt`, `lora` (a digest of the adapter's weights). Never names of things that can change.
    """
    return ChainHash(_digest(b"lmcache chain 1", content))


def tenant_of(salt: str) -> str:
    """The name under which the server counts the requests of a salt: never the salt itself, which is a secret."""
    if not salt:
        return ""
    return hashlib.sha256(b"lmcache tenant 1" + salt.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_BYTES]


@attrs.frozen
class ContentItem:
    """Something that is not tokens (an image, say) and stands at token positions [start, stop) of a prompt."""

    start: int
    stop: int
    digest: bytes
    """Full-width digest of its content."""


class ChainHasher:
    """Hashes a prompt chunk by chunk as its tokens become known. One per request, in the scheduler process."""

    def __init__(self, root: ChainHash, chunk_size: int, items: Sequence[ContentItem] = ()) -> None:
        self._chunk_size = chunk_size
        self._items = tuple(items)
        self._last = bytes(root)
        self._hashes = bytearray()

    def __len__(self) -> int:
        """Whole chunks hashed so far."""
        return len(self._hashes) // HASH_BYTES

    def extend_to(self, tokens: Sequence[int]) -> bytes:
        """Hash every whole chunk of `tokens` (the prompt so far) that is not hashed yet; return all hashes joined.

        `tokens` must begin with the tokens of earlier calls. Token ids are 32-bit.
        """
        for chunk in range(len(self), len(tokens) // self._chunk_size):
            start = chunk * self._chunk_size
            self._last = self._link(start, tokens[start : start + self._chunk_size])
            self._hashes += self._last
        return bytes(self._hashes)

    def _link(self, start: int, tokens: Sequence[int]) -> bytes:
        state = hashlib.sha256(self._last)
        words = array.array("I", tokens)
        if sys.byteorder == "big":
            words.byteswap()
        state.update(words)
        for item in self._items:
            if item.start < start + self._chunk_size and item.stop > start:
                # signed: an item may begin before the chunk; its position is content, as is its full-width digest
                state.update(b"item" + (item.start - start).to_bytes(8, "little", signed=True))
                state.update(len(item.digest).to_bytes(8, "little") + item.digest)
        return state.digest()[:HASH_BYTES]


def split_hashes(joined: bytes) -> list[ChainHash]:
    """Cut joined hashes into single ones, in order. Raises struct.error for a length that is no multiple of theirs."""
    # called for every lookup: three times as fast as slicing
    whole = len(joined) // _SIXTY_FOUR.size * _SIXTY_FOUR.size
    hashes = list(itertools.chain.from_iterable(_SIXTY_FOUR.iter_unpack(joined[:whole])))
    hashes.extend(itertools.chain.from_iterable(_ONE.iter_unpack(joined[whole:])))
    return hashes
