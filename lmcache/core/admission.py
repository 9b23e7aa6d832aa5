"""Who may speak on whether chunks are stored at all, and on how long they stay: admission and retention policies.

Any number of them, chosen with `--admission NAME` and `--retention NAME`. They advise; the cache decides, by two rules:
of admissions the shortest counts, so each has a veto; of retention hints the strictest of each kind counts, the
request's own among them. None of them is asked when room is made: a veto keeps new chunks out, and never keeps old ones
in, so it cannot make a store wait or fail that would otherwise succeed.

They run in the server's one thread, inside a request: every call must return quickly, without I/O, and must not raise.
One that raises, or answers nonsense, has not spoken: it is counted, and logged once.
"""

import abc
from collections.abc import Hashable, Sequence
from typing import ClassVar

import attrs

from lmcache.core.hints import Hints


@attrs.frozen
class Offer:
    """Chunks of one prompt, in chain order, that a request stores or has hit."""

    keys: Sequence[Hashable]
    """As `ChunkNode.key`: equal for the same chunk whenever it comes again, and for no other."""
    depth: int
    """Chunks of the prompt before the first of them."""
    tenant: str
    """In clear; empty when the engine names nobody."""
    model: str
    chunk_size: int
    """Tokens of a chunk."""
    chunk_bytes: int
    """Arena bytes of a chunk, over all KV groups and ranks."""
    hints: Hints
    """What the request says itself."""


class AdmissionPolicy(abc.ABC):
    """Decides which chunks are worth storing. Set `name`, return it from `lmcache_register_admission_policies`.

    The server makes one, without arguments, before it serves.
    """

    name: ClassVar[str]
    """What users write after `--admission`; matched without regard to case."""

    @abc.abstractmethod
    def admit(self, offer: Offer) -> int:
        """How many of the offered chunks to store, none of which is cached: the first so many, as chains have no gaps.

        Asked once about a chunk that a request wants to store. What was refused is not asked again until another
        request looks it up, or for a minute: so an answer holds for all KV groups and ranks of that request.
        """


class RetentionPolicy(abc.ABC):
    """Gives hints for requests that give none. Set `name`, return it from `lmcache_register_retention_policies`.

    The server makes one, without arguments, before it serves.
    """

    name: ClassVar[str]
    """What users write after `--retention`; matched without regard to case."""

    @abc.abstractmethod
    def advise(self, offer: Offer) -> Hints:
        """What to say of these chunks; `Hints()` says nothing. Asked whenever a request stores chunks or hits some."""
