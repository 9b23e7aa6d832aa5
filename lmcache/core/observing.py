"""What plugins that observe are told, and the thread that tells them: stores, lookups, evictions, in batches.

The server's thread notes an event in a microsecond, and only where a plugin wants its kind. Everything else happens
beside it: a plugin that is slow or hangs costs events, which are counted, and no request anything.
"""

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from lmcache.core.keys import split_hashes

if TYPE_CHECKING:
    from lmcache.core.index import Namespace, Node
    from lmcache.core.protocol import Lookup

WAITING_EVENTS = 100_000
"""Events that wait to be told, at most: what comes while plugins have not caught up is lost to them."""

PAUSE_SECONDS = 0.1
"""Batches are so far apart."""

CLOSE_SECONDS = 2.0
"""A stopping server waits this long, at most, for plugins to hear the rest."""


@attrs.frozen
class Stored:
    """One KV group of a chunk can be read from L1 from now on: the bytes of all ranks are there.

    Written by an engine or read back from a tier. A chunk has as many of these as it has cached groups; which ones a
    hit needs depends on where it ends.
    """

    namespace: bytes
    """Digest. `lmcache status --json` has it in hex, with the facts behind it."""
    tenant: str
    """Whose store it was; empty for nobody in particular."""
    chunk: bytes
    """Chain hash: stands for the chunk and all before it."""
    parent: bytes
    """Chain hash of the chunk before it; empty at a prompt's beginning."""
    group: int
    """Number of the KV group in the namespace's geometry."""


@attrs.frozen
class LookedUp:
    """A lookup was answered."""

    namespace: bytes
    tenant: str
    chunks: tuple[bytes, ...]
    """Chain hashes of the prompt's whole chunks, from its beginning."""
    limit: int
    """Tokens that the hit could cover at most."""
    hit: int
    """Tokens that it covers."""


@attrs.frozen
class Evicted:
    """A chunk is not in L1 any more, with all that was stored of it: for want of room, or because its time was over.

    A tier may have it still.
    """

    namespace: bytes
    tenant: str
    chunk: bytes


Event = Stored | LookedUp | Evicted

HOOKS: dict[str, type[Event]] = {
    "lmcache_after_store": Stored,
    "lmcache_after_lookup": LookedUp,
    "lmcache_after_evict": Evicted,
}
"""What each hook is told of."""

_Note = tuple[str, tuple[Any, ...]]
"""Hook, and what its event is made of."""

Tell = Callable[[str, Sequence[Event]], None]
"""Tells a hook's plugins of events, in their order. Raises nothing."""


class Observer:
    """Notes events in the server's thread, and tells them in one of its own."""

    def __init__(self, tell: Tell, hooks: Collection[str]) -> None:
        """`hooks` are those that any plugin implements; nothing else is noted."""
        self._tell = tell
        self.stores = "lmcache_after_store" in hooks
        self.lookups = "lmcache_after_lookup" in hooks
        self.evictions = "lmcache_after_evict" in hooks
        self.lost = 0
        """Events that plugins were too slow for."""
        self._notes: queue.SimpleQueue[_Note | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        # a daemon: a plugin that hangs must not keep the process
        self._thread = threading.Thread(target=self._tell_for_ever, name="lmcache-observe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell what waits, and end; give up on plugins that take too long. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._notes.put(None)
            self._thread.join(CLOSE_SECONDS)

    # ---------------------------------------------------------------------------------------- in the server's thread

    def stored(self, node: "Node", group: int) -> None:
        """A group of the chunk can be read."""
        parent = node.parent.hash if node.parent else b""
        self._note("lmcache_after_store", node.namespace.digest, node.tenant, node.hash, parent, group)

    def evicted(self, node: "Node") -> None:
        """The chunk has gone."""
        self._note("lmcache_after_evict", node.namespace.digest, node.tenant, node.hash)

    def looked_up(self, namespace: "Namespace", request: "Lookup", hit: int) -> None:
        """A lookup was answered with `hit` tokens."""
        self._note("lmcache_after_lookup", namespace.digest, request.tenant, request.hashes, request.limit, hit)

    def _note(self, hook: str, *values: Any) -> None:
        if self._notes.qsize() >= WAITING_EVENTS:
            self.lost += 1
        else:
            self._notes.put((hook, values))

    # ----------------------------------------------------------------------------------------- in the observer's own

    def _tell_for_ever(self) -> None:
        open_ended = True
        while open_ended:
            batch = [self._notes.get()]
            self._closing.wait(PAUSE_SECONDS)
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._notes.get_nowait())
            open_ended = None not in batch
            for hook, events in _runs([note for note in batch if note]):
                self._tell(hook, events)


def _runs(notes: Sequence[_Note]) -> Iterator[tuple[str, list[Event]]]:
    """Events of one kind that follow each other: whoever is told in this order knows what is there."""
    for hook, run in itertools.groupby(notes, key=lambda note: note[0]):
        yield hook, [_event(hook, values) for _, values in run]


def _event(hook: str, values: tuple[Any, ...]) -> Event:
    if hook == "lmcache_after_lookup":
        namespace, tenant, hashes, limit, hit = values
        return LookedUp(namespace, tenant, tuple(split_hashes(hashes)), limit, hit)
    return HOOKS[hook](*values)
