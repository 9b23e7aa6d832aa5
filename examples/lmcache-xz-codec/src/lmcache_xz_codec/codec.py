"""The plugin: a codec made of Python's own lzma module, and the hook that offers it."""

import lzma
from collections.abc import Mapping, Sequence
from typing import ClassVar

from lmcache.core.codec import Codec
from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import Buffer
from lmcache.errors import CodecError, ConfigError

_MOST_MEMORY = 32 << 20
"""Bytes that a reader may need for its dictionary: more than preset 4, the largest that we write with, needs."""


class Xz(Codec):
    """What is written is an .xz stream. Slow, and small."""

    name = "xz"
    options: ClassVar[Mapping[str, str]] = {"preset": "from 0 (fastest; unless said otherwise) to 4"}

    def __init__(self, options: Mapping[str, str]) -> None:
        preset = options.get("preset", "0")
        if preset not in set("01234"):
            raise ConfigError(f"codec=xz has preset={preset}", remedy="use a number from 0 to 4")
        self._preset = int(preset)

    def encode(self, parts: Sequence[Buffer], about: bytes) -> bytes:
        """One stream, whatever the parts."""
        compressor = lzma.LZMACompressor(preset=self._preset, check=lzma.CHECK_NONE)
        written = [compressor.compress(part) for part in parts]
        return b"".join([*written, compressor.flush()])

    def decode(self, stored: Buffer, into: Sequence[memoryview], about: bytes) -> None:
        """No more is decompressed than fits: `stored` may be anybody's."""
        decompressor = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_MOST_MEMORY)
        data: Buffer = stored
        try:
            for view in into:
                while view:
                    piece = decompressor.decompress(data, max_length=len(view))
                    data = b""
                    if not piece and (decompressor.eof or decompressor.needs_input):
                        raise CodecError("an .xz stream ends too early")
                    view[: len(piece)] = piece
                    view = view[len(piece) :]  # noqa: PLW2901  # what is left to fill
            if not decompressor.eof and decompressor.decompress(data, max_length=1):
                raise CodecError("an .xz stream goes on behind its end")
        except (EOFError, lzma.LZMAError) as error:
            raise CodecError(f"no .xz stream of this length: {error}") from error
        if not decompressor.eof or decompressor.unused_data:
            raise CodecError("an .xz stream is cut off, or something follows it")


@hookimpl
def lmcache_register_codecs() -> list[type[Codec]]:
    """Offer the codec to `codec=xz` in the URL of a tier."""
    return [Xz]
