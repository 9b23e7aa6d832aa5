"""One tier as the server uses it: its threads, its record of failures, its counters. Knows chunks, and no tickets."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from lmcache.core.blob import BlobIdentity, BlobStore, Loaded
from lmcache.core.blob_format import ALIGNMENT
from lmcache.core.breaker import FAILURES, CircuitBreaker
from lmcache.core.cells import unpack_cells
from lmcache.core.index import Namespace, Node
from lmcache.core.keys import ChainHash, namespace_digest
from lmcache.core.metrics import TierCounters
from lmcache.core.tier_threads import TierThreads
from lmcache.core.tier_url import TierSettings
from lmcache.geometry.groups import GroupKind

log = logging.getLogger("lmcache.server")

FIRST_LOOK = 16
"""Chunks that a search asks for after the first one and before all others: most prompts that miss do so early."""

FEWEST_READS = 16
"""Before so many, nobody can tell how fast it is."""

BELIEVED_S = 300.0
"""Seconds after which what a tier is known to hold is asked again before the last copy goes for its sake."""

TRY_ANYWAY = 16
"""One hit in so many is read though it seems slower than computing."""

Arena = Callable[[Sequence[int], int], list[memoryview]]
"""The bytes of these cells, as few pieces as may be, cut to a length."""

Missing = Mapping[int, int]
"""Chunk number in a prompt → slots, as bits."""

ThreadsMaker = Callable[[str, int, float, Callable[[], None]], TierThreads]
"""Makes a tier's threads, as `TierThreads` is made."""

NAMESPACES = 1024
"""Namespaces whose facts are remembered as blobs say them."""

KINDS = 64
KIND_CHARACTERS = 200
"""So many kinds of failures are told of, and so much of each is looked at to tell it from others."""

_VARYING = re.compile(r"[0-9a-f]*\d[0-9a-f]*")

T = TypeVar("T")


class Withdrawn(Exception):
    """A call was not made after all."""


class TierInUse:
    """A tier behind L1. All methods are the server thread's; what they start ends in `collect`."""

    def __init__(
        self,
        number: int,
        blobs: BlobStore,
        settings: TierSettings,
        arena: Arena,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        make_threads: ThreadsMaker = TierThreads,
    ) -> None:
        self.number = number
        """Position among the tiers, and in `Node.tiers`."""
        self.blobs = blobs
        self.settings = settings
        self.counters = TierCounters()
        self.threads = make_threads(settings.location.scheme, settings.threads, settings.timeout_s, wake)
        # each has its own: a full redis loads well, and a disk whose index answers may not be readable any more
        self._searching, self._loading, self._saving = CircuitBreaker(), CircuitBreaker(), CircuitBreaker()
        self._arena = arena
        self._clock = clock
        self._spaces: dict[bytes, tuple[bytes, dict[str, str]]] = {}
        self._logged: set[str] = set()
        self.trouble = ""
        """What the last failure said; empty once something of the kind has worked again."""
        self._read_speed = 0.0
        """Bytes a second of one thread, over the last reads."""
        self._estimates = 0

    @property
    def name(self) -> str:
        """As the user wrote it, without options."""
        return str(self.settings.location)

    def usable(self) -> bool:
        """Whether it may be asked for something now."""
        now = self._clock()
        return not (self._searching.open(now) or self._loading.open(now) or self.threads.stuck)

    def writable(self) -> bool:
        """Whether it may be given something now."""
        return not (self._saving.open(self._clock()) or self.threads.stuck)

    def seconds_to_read(self, length: int) -> float:
        """How long reading so many bytes takes, going by the last reads; 0 while that is not known.

        Now and then it says 0 though it is known: a tier that nobody reads would be as slow for ever as it once was.
        """
        if self.counters.loaded < FEWEST_READS:
            return 0.0
        self._estimates += 1
        return 0.0 if self._estimates % TRY_ANYWAY == 0 else length / (self._read_speed * self.settings.threads)

    def holds(self, node: Node, slot: int) -> bool:
        """Whether it is known to have this shard of the chunk."""
        known = node.tiers
        return known is not None and self.number < len(known) and bool(known[self.number] >> slot & 1)

    def forget_old(self, node: Node) -> None:
        """Believe nothing of what tiers hold of the chunk, if that was found out long ago: they drop things, too."""
        if node.tiers is not None and self._clock() - node.tiers_since > BELIEVED_S:
            node.tiers = None

    # ---------------------------------------------------------------------------------------------------------- calling

    def search(
        self, space: Namespace, hashes: Sequence[ChainHash], missing: Missing, then: Callable[[Missing], None]
    ) -> bool:
        """Ask which of the missing shards it has: `then` hears of them as `missing` says them, of nothing on a failure.

        False: it cannot be asked now, and `then` hears nothing.
        """
        wanted = dict(missing)
        self._facts(space)  # the server thread's to remember
        full = sum(1 << slot for slot in range(space.slots) if space.group_of(slot).kind is GroupKind.FULL)
        self.counters.searches += 1
        work = partial(self._look, space, hashes, wanted, full)
        return self._call(work, lambda found: then(found or {}), self._searching)

    def _look(
        self, space: Namespace, hashes: Sequence[ChainHash], wanted: Missing, full: int, deadline: float
    ) -> dict[int, int]:
        """In a thread of the tier. A prompt's chunks are of use only together, so it stops where they end."""
        chunks = sorted(wanted)
        found: dict[int, int] = {}
        for part in (chunks[:1], chunks[1 : 1 + FIRST_LOOK], chunks[1 + FIRST_LOOK :]):
            asked = [(chunk, slot) for chunk in part for slot in _bits(wanted[chunk])]
            identities = [self._identity(space, hashes[chunk], slot, "") for chunk, slot in asked]
            answers = self.blobs.contains(identities, deadline) if asked else ()
            for (chunk, slot), there in zip(asked, answers, strict=True):
                found[chunk] = found.get(chunk, 0) | there << slot
            if any(full & wanted[chunk] & ~found.get(chunk, 0) for chunk in part):
                break
        return {chunk: slots for chunk, slots in found.items() if slots}

    def fetch(self, node: Node, slot: int, cells: Sequence[int], then: Callable[[bool], None]) -> bool:
        """Read one shard into cells, and verify it; `then` hears whether it is there. False: it cannot be asked now."""
        identity, into = self._blob(node, slot, cells)
        length = sum(map(len, into))

        def loaded(answer: tuple[Loaded, float] | None) -> None:
            if answer is None:
                then(False)
                return
            outcome, seconds = answer
            self._count_load(outcome, length, seconds)
            if outcome is Loaded.LOADED:
                self._note(node, slot)
            then(outcome is Loaded.LOADED)

        def work(deadline: float) -> tuple[Loaded, float]:
            started = time.monotonic()
            return self.blobs.load(identity, into, deadline), time.monotonic() - started

        return self._call(work, loaded, self._loading)

    def save(self, node: Node, slot: int, then: Callable[[], None]) -> bool:
        """Store one shard that is committed, unless it is there; its cells must not change until `then` is called.

        False: it cannot be asked now, and `then` is not called.
        """
        packed = node.shards[slot]
        if packed is None:
            raise RuntimeError(f"slot {slot} of {node} is not committed")
        identity, parts = self._blob(node, slot, unpack_cells(packed))

        def work(deadline: float) -> tuple[int | None, float]:
            if self.blobs.contains([identity], deadline)[0]:
                return 0, 0.0
            started = time.monotonic()
            return self.blobs.store(identity, parts, deadline), time.monotonic() - started

        def stored(answer: tuple[int | None, float] | None) -> None:
            written, seconds = answer or (None, 0.0)
            if written is None:
                self.counters.lost += 1
            else:
                self._note(node, slot)
                self.counters.stored += bool(written)
                self.counters.bytes_written += written
                self.counters.write_seconds += seconds
                if self.blobs.tier.evicts and not self._more_comes(node, slot):
                    self.touch(node, [slot])
            then()

        return self._call(work, stored, self._saving, urgent=False)

    def _more_comes(self, node: Node, slot: int) -> bool:
        """Whether a chunk that follows is in L1 and not here yet: it will tell of the whole chain."""
        child = node.first_child
        while child and (child.shards[slot] is None or self.holds(child, slot)):
            child = child.next_sibling
        return child is not None

    def touch(self, tail: Node, slots: Iterable[int]) -> None:
        """Have it keep a chain's beginning for as long as its tail, if the order in which it evicts is its own."""
        if not self.blobs.tier.evicts:
            return
        for slot in slots:
            space, hashes = tail.namespace, [node.hash for node in tail.chain() if self.holds(node, slot)]
            if len(hashes) > 1:
                self._call(partial(self._touch, space, slot, hashes), lambda _: None, self._saving, urgent=False)

    def _touch(self, space: Namespace, slot: int, hashes: Sequence[ChainHash], _: float) -> None:
        """In a thread of the tier."""
        self.blobs.touch([self._identity(space, chain_hash, slot, "") for chain_hash in hashes])

    def _call(
        self,
        work: Callable[[float], T],
        then: Callable[[T | None], None],
        breaker: CircuitBreaker,
        *,
        urgent: bool = True,
    ) -> bool:
        if self.threads.stuck or not breaker.allows(self._clock()):
            self.counters.skipped += 1
            return False

        def ended(outcome: T | Exception) -> None:
            if isinstance(outcome, Withdrawn):
                self.counters.skipped += 1
                then(None)
            elif isinstance(outcome, Exception):
                self._failed(outcome, breaker)
                then(None)
            else:
                self._works(breaker)
                then(outcome)

        self.threads.submit(work, ended, urgent=urgent)
        return True

    # --------------------------------------------------------------------------------------------------- what came back

    def collect(self) -> bool:
        """Hand out what has come back; say which calls are overdue. True when something had come back."""
        now = self._clock()
        for _ in range(self.threads.newly_overdue(now)):
            self.counters.timeouts += 1
            for breaker in (self._searching, self._loading, self._saving):
                breaker.failed(now)
            self._tell(f"a call has not come back after {self.settings.timeout_s:g} s")
        some = False
        for call in self.threads.finished():
            some = True
            call.then(call.outcome)
        if self.threads.stuck:
            # what waits behind calls that hang holds cells, and somebody waits for it
            for call in self.threads.withdraw():
                some = True
                call.then(Withdrawn())
        return some

    def _failed(self, error: Exception, breaker: CircuitBreaker) -> None:
        self.counters.errors += 1
        breaker.failed(self._clock())
        self._tell(str(error) or type(error).__name__)

    def _works(self, breaker: CircuitBreaker) -> None:
        if breaker.failures:
            self.trouble = ""
        if breaker.failures >= FAILURES:
            log.info("the tier %s works again", self.name)
            self._logged.clear()  # what ends and comes back is said again
        breaker.succeeded()

    def _tell(self, text: str) -> None:
        """What is wrong now; the log has it once."""
        self.trouble = text
        # keys, addresses and times differ from call to call, and say nothing new
        kind = _VARYING.sub("", text)[:KIND_CHARACTERS]
        if kind not in self._logged and len(self._logged) < KINDS:
            self._logged.add(kind)
            log.warning("the tier %s: %s; misses until it works again, logged once", self.name, text)

    def _count_load(self, outcome: Loaded, length: int, seconds: float) -> None:
        counters = self.counters
        match outcome:
            case Loaded.LOADED:
                counters.loaded += 1
                counters.bytes_read += length
                counters.read_seconds += seconds
                speed = length / max(seconds, 1e-6)
                self._read_speed += (speed - self._read_speed) * (0.1 if self._read_speed else 1.0)
            case Loaded.ABSENT:
                counters.absent += 1
            case Loaded.DAMAGED:
                counters.damaged += 1
            case Loaded.FOREIGN:
                counters.foreign += 1

    def _note(self, node: Node, slot: int) -> None:
        if node.tiers is None:
            node.tiers, node.tiers_since = [], self._clock()
        node.tiers.extend([0] * (self.number + 1 - len(node.tiers)))
        node.tiers[self.number] |= 1 << slot

    # -------------------------------------------------------------------------------------------------------- its blobs

    def _blob(self, node: Node, slot: int, cells: Sequence[int]) -> tuple[BlobIdentity, list[memoryview]]:
        space = node.namespace
        group, _ = space.group_and_shard(slot)
        # whole pages of the host go straight to a device; the object's last cell has room for them
        whole = -(-space.object_bytes[group] // ALIGNMENT) * ALIGNMENT
        length = min(whole, space.object_cells[group] * space.cell_bytes)
        parent = node.parent.hash if node.parent else b""
        return self._identity(space, node.hash, slot, node.tenant, parent), self._arena(cells, length)

    def _identity(
        self, space: Namespace, chain_hash: ChainHash, slot: int, tenant: str, parent: bytes = b""
    ) -> BlobIdentity:
        digest, facts = self._facts(space)
        group, shard = space.group_and_shard(slot)
        return BlobIdentity(digest, facts, chain_hash, group, shard, tenant, space.chunk_size, parent, space.geometry)

    def _facts(self, space: Namespace) -> tuple[bytes, dict[str, str]]:
        """What blobs say of a namespace. Threads of the tier find what the server's thread has put there."""
        known = self._spaces.get(space.digest)
        if known is None:
            if len(self._spaces) >= NAMESPACES:
                self._spaces.clear()
            # where a page lies in an object depends on the size of cells, which is this server's, not the engine's
            facts = {**space.facts, "cell_bytes": str(space.cell_bytes)}
            known = self._spaces[space.digest] = namespace_digest(facts), facts
        return known


def _bits(slots: int) -> Iterator[int]:
    return (slot for slot in range(slots.bit_length()) if slots >> slot & 1)
