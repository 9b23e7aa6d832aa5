"""`codec=zstd-bf16`: Zstandard over separated bytes, for pages of 16-bit numbers. Needs the extra `zstd`.

Of a bfloat16 number one byte holds sign and exponent, which in a KV cache take few values, and the other the mantissa,
which is noise. Next to each other they spoil each other's statistics; apart, the first shrinks and the second is passed
over quickly. Pages of 8-bit numbers gain nothing by it and lose nothing but the time.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache.core.codec import Codec
from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import Buffer
from lmcache.plugins.codecs.zstd import Zstd, fill

if TYPE_CHECKING:
    import zstandard

_BLOCK = 256 << 10
"""Bytes whose halves are separated at a time: each half fills one block of Zstandard, which has statistics of its own.

It is the unit of the format, too, and must not change.
"""


class ZstdBf16(Zstd):
    """As `zstd`, but of each 262,144 bytes of the payload those at even places come first, then those at odd ones."""

    name = "zstd-bf16"

    def _pieces(self, parts: Sequence[Buffer]) -> Iterator[Buffer]:
        for block in _blocks(parts):
            yield block[0::2]
            yield block[1::2]

    def _fill(self, reader: "zstandard.ZstdDecompressionReader", into: Sequence[memoryview]) -> None:
        views = [view for view in into if len(view)]
        length = sum(map(len, views))
        while length:
            size = min(_BLOCK, length)
            planes = bytearray(size)
            fill(reader, memoryview(planes))
            block = bytearray(size)
            half = -(-size // 2)
            block[0::2] = planes[:half]
            block[1::2] = planes[half:]
            views = _spread(memoryview(block), views)
            length -= size


def _blocks(parts: Sequence[Buffer]) -> Iterator[bytes]:
    """The payload in blocks; the last may be shorter."""
    pieces: list[memoryview] = []
    size = 0
    for part in parts:
        view = memoryview(part)
        while view:
            piece = view[: _BLOCK - size]
            view = view[len(piece) :]
            pieces.append(piece)
            size += len(piece)
            if size == _BLOCK:
                yield b"".join(pieces)
                pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)


def _spread(block: memoryview, views: list[memoryview]) -> list[memoryview]:
    """Copy a block into the first views; returns what is left of them."""
    while block:
        view = views[0]
        piece = block[: len(view)]
        view[: len(piece)] = piece
        block = block[len(piece) :]
        views = [view[len(piece) :], *views[1:]] if len(piece) < len(view) else views[1:]
    return views


@hookimpl
def lmcache_register_codecs() -> list[type[Codec]]:
    """Offer the codec to `codec=zstd-bf16` in the URL of a tier."""
    return [ZstdBf16]
