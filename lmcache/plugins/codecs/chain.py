"""Several codecs, one after the other: `codec=zstd+aes-gcm` compresses, then encrypts. No plugin: made of plugins'."""

import struct
from collections.abc import Sequence

from lmcache.core.codec import Codec
from lmcache.core.tier import Buffer
from lmcache.errors import CodecError

_LENGTH = struct.Struct("<Q")


class Chain(Codec):
    """Codecs in the order in which payloads go through them.

    What each link but the first writes has 8 bytes before it: the length of what it was given, little-endian.
    """

    name = ""
    """Of an instance: its links' names, joined by a plus sign."""

    def __init__(self, links: Sequence[Codec]) -> None:
        self._links = tuple(links)
        self.name = "+".join(link.name for link in links)  # type: ignore[misc]  # a chain is made, not offered

    def encode(self, parts: Sequence[Buffer], about: bytes) -> bytes:
        """Through every link."""
        first, *others = self._links
        stored = first.encode(parts, about)
        for link in others:
            stored = _LENGTH.pack(len(stored)) + link.encode([stored], about)
        return stored

    def decode(self, stored: Buffer, into: Sequence[memoryview], about: bytes) -> None:
        """Through every link from the last to the first."""
        raw = sum(map(len, into))
        first, *others = self._links
        data = memoryview(stored)
        for link in reversed(others):
            data = self._undo(link, data, about, raw + raw // 16 + 4096)
        first.decode(data, into, about)

    @staticmethod
    def _undo(link: Codec, data: memoryview, about: bytes, most: int) -> memoryview:
        if len(data) < _LENGTH.size:
            raise CodecError("what a chain of codecs wrote is cut off")
        (length,) = _LENGTH.unpack_from(data)
        if length > most:  # whoever wrote that wants us to run out of memory
            raise CodecError(f"a chain of codecs claims {length} bytes, and at most {most} can be right")
        inner = memoryview(bytearray(length))
        link.decode(data[_LENGTH.size :], [inner], about)
        return inner
