"""What a codec is: how the payload of a blob is written into a tier, and read back."""

import abc
from collections.abc import Mapping, Sequence
from typing import ClassVar

from lmcache.core.tier import Buffer


class Codec(abc.ABC):
    """Turns payloads into what is stored, and back, without loss. Selected with `codec=NAME` in a tier's URL.

    The server makes one for each tier that names it, before it serves. Called by a tier's threads, several at once.
    `plugins.testing.CodecSuite` checks a codec against everything said here.
    """

    name: ClassVar[str]
    """What users write; goes into the header of every blob, so it must never change its meaning."""

    options: ClassVar[Mapping[str, str]] = {}
    """Its own options in the tier's URL: name → a sentence."""

    @abc.abstractmethod
    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises ConfigError for a value that cannot be honoured: a key file that is not there."""

    @abc.abstractmethod
    def encode(self, parts: Sequence[Buffer], about: bytes) -> bytes:
        """What is stored for the payload that is `parts` joined.

        `about` identifies the blob; a codec that authenticates binds the payload to it, so that no other blob can
        be passed off as this one.
        """

    @abc.abstractmethod
    def decode(self, stored: Buffer, into: Sequence[memoryview], about: bytes) -> None:
        """Fill `into` with the payload whose `encode` was `stored`: exactly as many bytes.

        Raises CodecError for anything else, whatever `stored` is, without using more than a few times the memory of
        `into`: it may come from a disk that flips bits, or from somebody else.
        """
