"""What a storage tier is: a place behind L1 that keeps blobs, each under a key, and gives them back whole.

A *blob* is one shard of one object as `core/blob.py` frames it: a header, then the payload. A tier sees bytes and a
key of a fixed length; what they mean, whether they are intact and whether they may be used is decided elsewhere, by
reading the header of every blob that comes back. So a tier cannot make a hit wrong: at worst it is slow, or empty.

Tiers block. `core/tiering.py` calls them from threads of its own, several at once, never from the server's: it submits,
polls and gives up on them. Whatever they raise is a miss or a store that did not happen, and is counted.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs

if TYPE_CHECKING:
    from lmcache.core.blob import BlobStore

Buffer = bytes | bytearray | memoryview

DEFAULT_THREADS = 4
"""Calls of a tier that are in progress at once, as a rule."""

KEY_DIGITS = 40
"""Every key has so many lower-case hexadecimal digits."""


@attrs.frozen
class TierLocation:
    """Where a tier is, read from the URL after `--l2`."""

    scheme: str
    host: str = ""
    port: int | None = None
    path: str = ""
    """With its leading slash; percent-escapes are resolved."""
    options: Mapping[str, str] = attrs.field(factory=dict)
    """The tier's own options, from the URL's query. Only names that its class lists in `options` come through."""
    secrets: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """Values that must not be printed, by the option's name without `_env` or `_file`: the caller has read them."""

    def __str__(self) -> str:
        """As the user wrote it, without options and secrets: fit for logs."""
        port = f":{self.port}" if self.port else ""
        return f"{self.scheme}://{self.host}{port}{self.path}"


@attrs.frozen
class TierUsage:
    """What a tier holds, as far as it knows; None where only asking the other side would tell."""

    blobs: int | None = None
    bytes: int | None = None
    """Bytes that the blobs take, headers included."""
    limit_bytes: int | None = None
    """Bytes that it may take; it makes room by itself."""
    evicted: int = 0
    """Blobs that it has dropped to make room, since it was opened."""


class StorageTier(abc.ABC):
    """Blobs under keys. Subclass it, set `scheme`, return the class from `lmcache_register_storage_tiers`.

    The server makes one for each `--l2 URL` of that scheme, before it serves. `plugins.testing.StorageTierSuite` checks
    a tier against everything said here.

    Every method but `close` may be called by several threads at once. Those with a `deadline` (`time.monotonic`) should
    raise TierError when it has passed; one that does not come back in time is not waited for, and its buffers are not
    touched by anybody until it has.
    """

    scheme: ClassVar[str]
    """What stands before `://` after `--l2`; matched without regard to case."""

    options: ClassVar[Mapping[str, str]] = {}
    """The tier's own options in the URL's query: name → a sentence for the documentation and for error messages."""

    secrets: ClassVar[Mapping[str, str]] = {}
    """Options whose value is a secret: written `NAME_env=VARIABLE` or `NAME_file=PATH`, never in the URL itself."""

    threads: ClassVar[int] = DEFAULT_THREADS
    """Calls that are in progress at once unless the URL says otherwise: as many as the other side answers as fast."""

    shared: bool = True
    """Whether others write to it, too, so that it must be asked what it holds. False: only this server does."""

    evicts: bool = False
    """Whether it makes room by itself, and wants to hear by `touch` what belongs together."""

    alignment: int = 1
    """Buffers whose address, and length, are multiples of this are moved without a copy; others may cost one."""

    @abc.abstractmethod
    def __init__(self, location: TierLocation) -> None:
        """Open the tier, in a second or less.

        Raises ConfigError when what the user wrote cannot work: a folder that is not there, an option out of range. A
        server that is down is no such thing: it may come back.
        """

    @abc.abstractmethod
    def store(self, key: str, parts: Sequence[Buffer], deadline: float) -> None:
        """Keep the blob that is `parts` joined, in place of whatever was there under `key`.

        All or nothing, whenever the process or the host dies: a reader finds the old blob, this one, or none. Makes
        room first where the tier is bounded. Raises TierError, or OSError, when it is not kept.
        """

    @abc.abstractmethod
    def load(self, key: str, into: Sequence[memoryview], deadline: float) -> int:
        """Fill the writable buffers, in order, with the blob; returns its length in bytes, 0 if there is none.

        A blob longer than the buffers together is cut to them: the length returned is still all of it. Bytes of
        buffers behind a shorter blob's end may be changed. Raises TierError, or OSError, when it could not be read.
        """

    def load_in_pieces(self, key: str, into: Sequence[memoryview], deadline: float) -> Iterator[int]:
        """As `load`, for who has work to do with what is there while the rest is read.

        Gives the number of bytes, from the blob's start, that are in the buffers by then, as often as it likes, and
        last of all what `load` returns. A tier that reads in one go need not define it.
        """
        yield self.load(key, into, deadline)

    @abc.abstractmethod
    def contains(self, keys: Sequence[str], deadline: float) -> list[bool]:
        """For each key, whether there is a blob under it, as far as can be told without reading it."""

    @abc.abstractmethod
    def delete(self, keys: Sequence[str], deadline: float) -> None:
        """Forget these blobs. Keys without one are no error."""

    @abc.abstractmethod
    def keys(self) -> Iterator[tuple[str, int]]:
        """Every blob's key and length, in any order, for `lmcache tier`. May take as long as it takes."""

    def touch(self, keys: Sequence[str]) -> None:  # noqa: B027  # most tiers leave that to the other side
        """These blobs are of one prompt, the tail first, its beginning last, and have been used as one.

        Without its beginning a prompt's tail is of no use to anybody, so what comes last should stay longest. Called
        for tiers that say `evicts`, once a prompt's tail has been stored or read. Keys without a blob are no error.
        """

    def store_of_chunks(self) -> "BlobStore | None":
        """What is to be used in its place, by a tier that knows chunks as servers do, and no blobs under keys."""
        return None

    def usage(self) -> TierUsage:
        """What it holds. Called for `lmcache status`, by the server's thread: returns at once, without I/O."""
        return TierUsage()

    def close(self) -> None:  # noqa: B027  # some tiers hold nothing
        """Give back what it holds open. No other call is in progress or follows, but calls that were given up on."""
