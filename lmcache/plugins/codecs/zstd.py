"""`codec=zstd`: payloads as one Zstandard frame. Needs the extra `zstd`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from lmcache.core.codec import Codec
from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import Buffer
from lmcache.errors import CodecError, ConfigError, with_extra

if TYPE_CHECKING:
    import zstandard

_MOST_WINDOW = 8 << 20
"""Bytes of history that a reader keeps at most; the levels that we write with need less."""


class Zstd(Codec):
    """What is written is one frame of the Zstandard format (RFC 8878) that says how long its content is."""

    name = "zstd"
    options: ClassVar[Mapping[str, str]] = {
        "level": "how hard zstd tries, from 1 (fastest; unless said otherwise) to 9",
    }

    def __init__(self, options: Mapping[str, str]) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError(
                f"codec={self.name} needs the package zstandard: {error}",
                remedy=with_extra("zstd"),
            ) from error
        self._zstandard = zstandard
        level = options.get("level", "1")
        if level not in set("123456789"):
            raise ConfigError(f"codec={self.name} has level={level}", remedy="use a number from 1 to 9")
        self._level = int(level)

    def encode(self, parts: Sequence[Buffer], about: bytes) -> bytes:
        """Piece by piece, so that no copy of the whole payload is made."""
        # a compressor serves one thread at a time; making one costs microseconds
        frame = self._zstandard.ZstdCompressor(level=self._level, write_checksum=False).compressobj(
            size=sum(map(len, parts))
        )
        written = [frame.compress(piece) for piece in self._pieces(parts)]
        return b"".join([*written, frame.flush()])

    def decode(self, stored: Buffer, into: Sequence[memoryview], about: bytes) -> None:
        """Straight into the buffers."""
        length = sum(map(len, into))
        try:
            if self._zstandard.frame_content_size(bytes(stored[:32])) != length:
                raise CodecError(f"a zstd frame has not the {length} bytes that it should have")
            decompressor = self._zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
            with decompressor.stream_reader(stored, read_across_frames=True) as reader:
                self._fill(reader, into)
                if reader.read(1):
                    raise CodecError("a zstd frame goes on behind its end")
        except self._zstandard.ZstdError as error:
            raise CodecError(f"no zstd frame: {error}") from error

    def _pieces(self, parts: Sequence[Buffer]) -> Iterator[Buffer]:
        """The payload as it is compressed."""
        return iter(parts)

    def _fill(self, reader: "zstandard.ZstdDecompressionReader", into: Sequence[memoryview]) -> None:
        """Fill the buffers with the payload."""
        for view in into:
            fill(reader, view)


def fill(reader: "zstandard.ZstdDecompressionReader", view: memoryview) -> None:
    """Fill one buffer with what is decompressed next; CodecError if there is less."""
    while view:
        count = reader.readinto(view)
        if not count:
            raise CodecError("a zstd frame ends too early")
        view = view[count:]


@hookimpl
def lmcache_register_codecs() -> list[type[Codec]]:
    """Offer the codec to `codec=zstd` in the URL of a tier."""
    return [Zstd]
