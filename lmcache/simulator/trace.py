"""What is replayed: events in order, and what their chunks are made of. Pure values, the same for every replay."""

from collections.abc import Mapping, Sequence

import attrs

from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.index import Namespace
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.geometry.hits import longest_hit

NO_LOOKUP = -1


@attrs.frozen
class Event:
    """A request, or one half of it where a server has recorded lookup and store by themselves."""

    namespace: int
    """Position in `Trace.namespaces`."""
    tenant: str
    hashes: Sequence[ChainHash]
    """Chunks in chain order: all that are looked up, or those that are stored."""
    limit: int = NO_LOOKUP
    """Tokens that a hit may cover at most; `NO_LOOKUP` for a store."""
    groups: tuple[int, ...] = ()
    """KV groups that are stored, as far as they are not there; empty for a lookup."""
    parent: ChainHash | None = None
    """What the first chunk follows; None where it starts the prompt."""
    hints: Hints = NO_HINTS
    """What the request said of its chunks."""
    at: float = 0.0
    """Seconds, in a recording: what a TTL is counted from."""


@attrs.frozen
class TraceNamespace:
    """What chunks of one engine are, and how they hang together."""

    digest: NamespaceDigest
    geometry: Geometry
    chunk_size: int
    """Tokens."""
    parents: Mapping[ChainHash, ChainHash | None]
    """For each chunk of the trace, the one before it in its prompt; without those whose beginning was not recorded."""

    def chain(self, last: ChainHash) -> list[ChainHash]:
        """The chunks from the start of a prompt to `last`; empty if that start is not known."""
        chain: list[ChainHash] = []
        at: ChainHash | None = last
        while at is not None:
            if at not in self.parents:
                return []
            chain.append(at)
            at = self.parents[at]
        return chain[::-1]

    def fresh(self, cell_bytes: int) -> Namespace:
        """An empty namespace of the cache."""
        return Namespace(self.digest, {}, self.geometry, self.chunk_size, cell_bytes)


@attrs.frozen
class Recorded:
    """What the server that was recorded has itself answered."""

    policy: str
    l1_bytes: int
    tokens_hit: int
    tokens_asked: int


@attrs.frozen
class Trace:
    """A trace as it is replayed."""

    name: str
    """Its file, as the user wrote it."""
    events: Sequence[Event]
    namespaces: Sequence[TraceNamespace]
    cell_bytes: int
    """Bytes of the cells that chunks are made of."""
    sized: bool
    """Whether `cell_bytes` means anything: a plain trace does not say how large its chunks are."""
    recorded: Recorded | None = None

    @property
    def requests(self) -> int:
        """Lookups."""
        return sum(event.limit != NO_LOOKUP for event in self.events)

    @property
    def chunks_asked(self) -> int:
        """Chunks that lookups name, each as often as it is named."""
        return sum(len(event.hashes) for event in self.events if event.limit != NO_LOOKUP)

    def stored(self) -> dict[tuple[int, ChainHash], int]:
        """For each distinct chunk that is ever stored, by namespace and hash, the groups (bit g) that it is stored of.

        That is what a cache holds in the end that never evicts.
        """
        kept: dict[tuple[int, ChainHash], int] = {}
        for event in self.events:
            _keep(kept, event)
        return kept

    def tokens_with_everything_kept(self) -> int:
        """Tokens that hit where nothing is ever evicted."""
        kept: dict[tuple[int, ChainHash], int] = {}
        tokens = 0
        for event in self.events:
            if event.limit != NO_LOOKUP:
                space = self.namespaces[event.namespace]
                sealed = [kept.get((event.namespace, chunk), 0) for chunk in event.hashes]
                tokens += longest_hit(space.geometry, space.chunk_size, sealed, event.limit).tokens
            _keep(kept, event)
        return tokens

    @property
    def tokens_asked(self) -> int:
        """Tokens in whole chunks that lookups ask for, as the server counts them."""
        sizes = [space.chunk_size for space in self.namespaces]
        return sum(len(e.hashes) * sizes[e.namespace] for e in self.events if e.limit != NO_LOOKUP)


def _keep(kept: dict[tuple[int, ChainHash], int], event: Event) -> None:
    bits = sum(1 << group for group in event.groups)
    if bits:
        for chunk in event.hashes:
            kept[event.namespace, chunk] = kept.get((event.namespace, chunk), 0) | bits


def plain_geometry(chunk_size: int, chunk_bytes: int) -> Geometry:
    """What a trace is taken to be of that says nothing about it: full attention, one page and one cell a chunk."""
    return Geometry((KVGroup(GroupKind.FULL, chunk_size, (chunk_bytes,)),))
