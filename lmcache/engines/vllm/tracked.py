"""What the scheduler's half knows of each request, and as much of the client as it uses."""

from typing import Protocol

import attrs

from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.keys import ChainHasher
from lmcache.core.protocol import Found
from lmcache.engines.vllm.content import Content, EngineRequest

BlockTable = tuple[list[int], ...]
"""A request's block ids, one list for each KV group."""


class PendingLookup(Protocol):
    """As much of `core.pending_hit.PendingHit` as is used here."""

    @property
    def promised(self) -> int: ...

    def poll(self, patience: float = 0.0) -> Found | None: ...


class SchedulerLink(Protocol):
    """As much of `core.link.Link` as a scheduler uses."""

    epoch: str
    namespace: bytes
    chunk_size: int

    def lookup(
        self, tenant: str, hashes: bytes, limit: int, hints: Hints = NO_HINTS, prefill_speed: float = 0.0
    ) -> PendingLookup: ...
    def drop(self, ticket: int) -> None: ...


class SchedulerClient(Protocol):
    """As much of `core.client.Client` as a scheduler uses."""

    def link(self) -> SchedulerLink: ...
    def close(self) -> None: ...


@attrs.frozen
class Askable:
    """Not looked up, or not since it was preempted."""


@attrs.frozen
class Settled:
    """Hit used, missed, or not to be had: vLLM computes the rest."""


@attrs.frozen
class Asked:
    """The answer is awaited."""

    link: SchedulerLink
    pending: PendingLookup
    fresh: bool = True
    """Whether nobody has looked for the answer yet."""


@attrs.frozen
class Held:
    """A hit, and the ticket that pins it."""

    link: SchedulerLink
    ticket: int
    tokens: int


@attrs.define
class Tracked:
    """What the scheduler knows of one request."""

    request: EngineRequest
    content: Content
    state: Askable | Asked | Held | Settled = Askable()
    asked_after: int = 0
    """Store orders that had gone out when it was looked up."""
    turn: int = -1
    """Number of preemptions when vLLM first wanted to schedule it in its present life."""
    computed: int = 0
    """Tokens that vLLM held itself when it last asked."""
    hasher: ChainHasher | None = None
    chunk_size: int = 0
    """Of `hasher`."""
    offered: int = 0
    """Chunks that workers were told to store."""
    offered_in: tuple[str, int] = ("", 0)
    """Epoch and number of preemptions that `offered` counts in."""

    def hashes(self, chunk_size: int) -> bytes:
        """Chain hashes of all whole chunks of the tokens known so far."""
        if self.hasher is None or self.chunk_size != chunk_size:
            self.chunk_size = chunk_size
            self.hasher = ChainHasher(self.content.root, chunk_size, self.content.items)
        return self.hasher.extend_to(self.request.all_token_ids)
