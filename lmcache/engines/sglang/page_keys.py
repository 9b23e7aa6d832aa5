"""SGLang's page keys as chain hashes, and which key came before which.

SGLang names a page by the hex SHA-256 of all tokens up to the page's end, rooted in the request's salt and extra key:
a chain hash, only longer than ours. Its first 16 bytes are ours, for a prefix of SHA-256 is as good a digest as any of
that length.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from lmcache.core.keys import HASH_BYTES

KEY_BYTES = 32
"""Of a SHA-256, before SGLang writes it in hex."""

REMEMBERED = 1 << 16
"""Pages whose predecessor is remembered, at most: about 20 MB."""


def chain_hashes(keys: Sequence[str]) -> bytes:
    """Joined chain hashes of these pages, in order. Never raises: any key has one, the same in any process."""
    try:
        whole = bytes.fromhex("".join(keys))
    except ValueError:
        return b"".join(map(_digest, keys))
    if len(whole) != len(keys) * KEY_BYTES or any(len(key) != 2 * KEY_BYTES for key in keys):
        return b"".join(map(_digest, keys))
    return b"".join(whole[start : start + HASH_BYTES] for start in range(0, len(whole), KEY_BYTES))


def _digest(key: str) -> bytes:
    return hashlib.sha256(b"lmcache sglang page key" + key.encode("utf-8", "surrogatepass")).digest()[:HASH_BYTES]


class Lineage:
    """Which page came before which, as far as SGLang's calls have told.

    SGLang hands over pages without their prefix. A page whose predecessor nobody has named is stored as the beginning
    of a chain: found all the same, but evicted on its own, not after what follows it.
    """

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._before: OrderedDict[bytes, bytes] = OrderedDict()

    def learn(self, hashes: bytes) -> None:
        """These joined hashes follow each other."""
        if len(hashes) > HASH_BYTES and self._before.get(hashes[-HASH_BYTES:]) == hashes[-2 * HASH_BYTES : -HASH_BYTES]:
            return  # learnt before: a prompt of a thousand pages is looked up more than once
        for end in range(2 * HASH_BYTES, len(hashes) + 1, HASH_BYTES):
            self._before[hashes[end - HASH_BYTES : end]] = hashes[end - 2 * HASH_BYTES : end - HASH_BYTES]
        while len(self._before) > self._size:
            self._before.popitem(last=False)

    def before(self, first: bytes) -> bytes:
        """The hash before this one; empty if that is unknown, or if it begins a prompt."""
        return self._before.get(first, b"")
