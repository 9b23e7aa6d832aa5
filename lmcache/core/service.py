"""What the server does with a request: one method a message, from a registered connection and the cache to a reply.

No sockets here. The server's one thread calls it. It is as long as the protocol has messages.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lmcache import __version__
from lmcache.core.arena import SLAB_BYTES, Backer
from lmcache.core.cache import Cache
from lmcache.core.cells import CellAllocator
from lmcache.core.config import ServerConfig
from lmcache.core.connection import Connection
from lmcache.core.index import Namespace
from lmcache.core.keys import HASH_BYTES, ChainHash, namespace_digest, split_hashes
from lmcache.core.l1_only import Answer, Asked, L1Only
from lmcache.core.policy import EvictionPolicy
from lmcache.core.protocol import (
    MAX_CHUNKS,
    PROTOCOL,
    Abort,
    AskAgain,
    Commit,
    Confirm,
    Confirmed,
    Done,
    Drop,
    ErrorCode,
    Found,
    Lookup,
    Open,
    Opened,
    Peek,
    Peeked,
    Pin,
    Pinned,
    Register,
    Registered,
    Reserve,
    Reserved,
    Role,
    Take,
    Taken,
    Unpin,
)
from lmcache.core.voices import Speakers
from lmcache.errors import GeometryError, Refused
from lmcache.geometry.chunking import chosen_chunk_size
from lmcache.geometry.fingerprint import geometry_facts

if TYPE_CHECKING:  # most servers neither record nor have tiers, and start without what that takes
    from lmcache.core.observing import Observer
    from lmcache.core.recording import Recorder
    from lmcache.core.tiering import Tiering

log = logging.getLogger("lmcache.server")

MAX_FACTS = 1 << 16
"""Characters of one namespace's facts, which are kept as long as it is."""

MAX_TENANT = 256
"""Characters of a tenant's name, which is kept with every chunk."""

LONGEST_PIN = 366 * 24 * 3600
"""Seconds."""

LONGEST_PAUSE = 3600.0
"""Seconds. A TTL may be as long as anybody likes; what waits for events takes no more than 24 days."""

AHEAD_BYTES = 256 << 20
"""Free memory kept behind the arena before anybody asks for it, so that stores rarely wait for the kernel."""


class Service:
    """The cache, the memory behind it, and the rules for who may ask what."""

    def __init__(
        self,
        config: ServerConfig,
        policy: EvictionPolicy,
        backer: Backer,
        epoch: str,
        first_id: int,
        recorder: "Recorder | None" = None,
        observer: "Observer | None" = None,
        speakers: Speakers | None = None,
        make_tiering: "Callable[[Cache], Tiering | L1Only]" = L1Only,
    ) -> None:
        self.config = config
        self.epoch = epoch
        self.cache = Cache(
            *(CellAllocator(config.cells), policy),
            limits=config.limits,
            speakers=speakers,
            first_id=first_id,
        )
        self.tiering = make_tiering(self.cache)
        self.tiering.memory_comes = self._memory_comes
        self._backer = backer
        self._recorder = recorder
        self._observer = observer
        self._watched = recorder is not None or (observer is not None and observer.lookups)
        """Whether anybody wants to hear what became of a lookup that tiers were looked at for."""
        if observer and observer.stores:
            self.cache.on_sealed = observer.stored
        if observer and observer.evictions:
            self.cache.residents.on_evicted = observer.evicted
        self._unrecorded = 0
        self._started = time.monotonic()

    # ---------------------------------------------------------------------------------------------------- registering

    def register(self, connection: Connection, request: Register) -> Registered:
        """Bind the connection to its namespace. Raises Refused, with the geometry's own words."""
        check_version(request.protocol, "")
        if connection.namespace is not None:
            raise Refused("this connection is registered already", code=ErrorCode.MALFORMED, remedy="open another")
        geometry = request.geometry
        if not 0 <= request.rank < geometry.ranks:
            raise Refused(f"rank {request.rank} of {geometry.ranks}", code=ErrorCode.MALFORMED, remedy="count from 0")
        facts = sum(len(name) + len(value) for name, value in request.facts.items())
        if facts > MAX_FACTS:
            raise Refused(f"{facts} characters of facts", code=ErrorCode.MALFORMED, remedy=f"at most {MAX_FACTS}")
        namespace = self._namespace(request)
        connection.namespace, connection.role, connection.rank = namespace, request.role, request.rank
        if request.role is Role.WORKER and not connection.origin:
            self._backer.near(request.node)
        return Registered(
            request.id,
            self.epoch,
            namespace.digest,
            namespace.chunk_size,
            self.config.cell_bytes,
            self.config.arena_bytes,
        )

    def forget_unused(self, used: set[int]) -> None:
        """Drop namespaces that hold nothing and that no client (`used`: by identity) is registered in."""
        for digest, namespace in list(self.cache.namespaces.items()):
            if not namespace.nodes and id(namespace) not in used:
                del self.cache.namespaces[digest]

    def _namespace(self, request: Register) -> Namespace:
        geometry, model = request.geometry, request.facts.get("model", "")
        try:
            chunk_size = chosen_chunk_size(geometry, self.config.chunk_size, model)
            facts = {**request.facts, **geometry_facts(geometry, chunk_size)}
            digest = namespace_digest(facts)
            known = self.cache.namespaces.get(digest)
            if known:
                return known
            namespace = Namespace(digest, facts, geometry, chunk_size, self.config.cell_bytes)
            self._check_size(namespace, model)
        except GeometryError as error:
            raise Refused(error.args[0], code=ErrorCode.GEOMETRY, remedy=error.remedy) from error
        self.cache.namespaces[digest] = namespace
        return namespace

    def _check_size(self, namespace: Namespace, model: str) -> None:
        # half of L1 is the most that one engine's tickets may pin, so a chunk beyond that could never be loaded
        needed = namespace.chunk_cells * 2
        if needed > self.config.cells:
            cell = self.config.cell_bytes
            raise GeometryError(
                f"a chunk of {namespace.chunk_size} tokens of {model or 'this engine'} takes {namespace.chunk_cells} "
                f"cells of {cell >> 10} KiB over all ranks, and L1 has {self.config.cells}",
                remedy=f"give L1 at least {needed * cell / (1 << 30):.3f} GB with --l1-size-gb, or smaller cells with "
                "--l1-cell-kb",
            )

    # -------------------------------------------------------------------------------------------------------- storing

    def reserve(self, connection: Connection, request: Reserve, *, final: bool) -> Reserved | None:
        """None: more memory is being put behind the arena; ask again when it has come, the last time with `final`."""
        namespace = self._worker(connection)
        self._slot(namespace, request.group, request.shard)
        if len(request.parent) not in (0, HASH_BYTES):
            raise _malformed(f"a parent hash of {len(request.parent)} bytes")
        hashes = self._hashes(request.hashes)
        wanted = (
            0 if self._backer.complete else self.cache.cells_lacking(namespace, hashes, request.group, request.shard)
        )
        if self._grow(wanted) and not final:
            return None
        done = self.cache.reserve(
            *(connection.owner, namespace, _tenant(request), request.parent, hashes, request.group, request.shard),
            hints=request.hints,
        )
        self.keep_ahead()
        reply = Reserved(request.id, done.reservation, done.placed, done.cells, self._backed)
        self._record(namespace, request, reply)
        return reply

    def commit(self, connection: Connection, request: Commit) -> Done:
        """Publish what the reservation's owner has written."""
        self.cache.commit(connection.owner, request.reservation)
        return Done(request.id)

    def abort(self, connection: Connection, request: Abort) -> Done:
        """Give a reservation back."""
        self.cache.abort(connection.owner, request.reservation)
        return Done(request.id)

    # -------------------------------------------------------------------------------------------------------- loading

    def lookup(self, connection: Connection, request: Lookup) -> Found:
        """Answer with the longest hit, pinned."""
        namespace = self._registered(connection)
        hashes, limit = self._hashes(request.hashes), max(0, request.limit)
        asked = Asked(
            *(connection.owner, namespace, hashes, limit, _tenant(request)), request.hints, request.prefill_speed
        )
        reply = _found(request.id, self.tiering.lookup(asked))
        if not reply.again:
            self._answered(namespace, request, reply)
        elif self._watched:
            connection.unanswered[reply.ticket] = request
        return reply

    def ask_again(self, connection: Connection, request: AskAgain) -> Found:
        """Answer with what a lookup has come to by now."""
        namespace = self._registered(connection)
        reply = _found(request.id, self.tiering.poll(connection.owner, request.ticket))
        asked = None if reply.again else connection.unanswered.pop(request.ticket, None)
        if asked:
            self._answered(namespace, asked, reply)
        return reply

    def open(self, connection: Connection, request: Open) -> Opened:
        """Tell a worker where its part of a hit lies."""
        namespace = self._worker(connection)
        if request.epoch != self.epoch:
            raise Refused(
                f"ticket {request.ticket} is of server boot {request.epoch}, this is {self.epoch}",
                code=ErrorCode.STALE,
                remedy="look up again",
            )
        hit, cells = self.cache.open(request.ticket, namespace, connection.rank)
        return Opened(request.id, hit.tokens, [needs.start for needs in hit.needs], cells, self._backed)

    def confirm(self, connection: Connection, request: Confirm) -> Confirmed:
        """Say whether a load may count."""
        namespace = self._worker(connection)
        held = request.epoch == self.epoch and self.cache.confirm(request.ticket, namespace, connection.rank)
        return Confirmed(request.id, held)

    def drop(self, connection: Connection, request: Drop) -> Done:
        """End a ticket early."""
        connection.unanswered.pop(request.ticket, None)
        self.tiering.drop(connection.owner, request.ticket)
        self.cache.drop(connection.owner, request.ticket)
        return Done(request.id)

    # ------------------------------------------------------------------------------------------------- other servers

    def peek(self, connection: Connection, request: Peek) -> Peeked:
        """Say which chunks have this shard."""
        namespace = self._worker(connection)
        slot = self._slot(namespace, request.group, request.shard)
        there = bytes(self.cache.holds(namespace, each, slot) for each in self._hashes(request.hashes))
        return Peeked(request.id, there)

    def take(self, connection: Connection, request: Take) -> Taken:
        """Pin one shard for another server, and say where it lies."""
        namespace = self._worker(connection)
        slot = self._slot(namespace, request.group, request.shard)
        if len(request.chain_hash) != HASH_BYTES:
            raise _malformed(f"a chain hash of {len(request.chain_hash)} bytes")
        chain_hash = ChainHash(request.chain_hash)
        ticket = self.cache.take(connection.owner, namespace, chain_hash, slot, connection.rank)
        cells = ticket.held[0].shards[slot] if ticket else None
        return Taken(request.id, ticket.id if ticket else 0, cells or b"")

    @staticmethod
    def _slot(namespace: Namespace, group: int, shard: int) -> int:
        groups = namespace.geometry.groups
        if not (0 <= group < len(groups) and groups[group].cached):
            raise _malformed(f"group {group} is not a cached one of {len(groups)}")
        if not 0 <= shard < groups[group].shards:
            raise _malformed(f"shard {shard} of {groups[group].shards}")
        return namespace.slot(group, shard)

    def owner_gone(self, owner: int) -> None:
        """A connection has ended, and what it held with it."""
        self.tiering.owner_gone(owner)
        self.cache.owner_gone(owner)

    # -------------------------------------------------------------------------------------------------------- pinning

    def pin(self, request: Pin) -> Pinned:
        """Keep a prefix for as long as a user wants it kept."""
        namespace = self.cache.namespaces.get(request.namespace)
        if namespace is None:
            raise Refused(
                f"no engine has registered namespace {request.namespace.hex() or '(none)'}",
                code=ErrorCode.STALE,
                remedy="see the namespaces in lmcache status",
            )
        if not 0 < request.seconds <= LONGEST_PIN:
            raise Refused(
                f"a pin for {request.seconds:g} s", code=ErrorCode.MALFORMED, remedy=f"at most {LONGEST_PIN} s (a year)"
            )
        pin = self.cache.pin(namespace, self._hashes(request.hashes), request.seconds)
        return Pinned(request.id, pin.id, pin.tokens) if pin else Pinned(request.id, 0, 0)

    def unpin(self, request: Unpin) -> Done:
        """Let a prefix go."""
        self.cache.unpin(request.pin)
        return Done(request.id)

    # ----------------------------------------------------------------------------------------------------------- time

    def advance(self) -> None:
        """Tell the cache what time it is. Called before every request, and when `pause` is over."""
        self.cache.advance(time.monotonic())
        self.tiering.advance()

    @property
    def pause(self) -> float | None:
        """Seconds until something ends or expires, or until it is worth asking again; None: nothing will."""
        pause = min(self.cache.next_event - time.monotonic(), self.tiering.pause)
        return None if pause == math.inf else min(max(0.0, pause), LONGEST_PAUSE)

    # --------------------------------------------------------------------------------------------------------- memory

    @property
    def _backed(self) -> int:
        return self.cache.allocator.backed

    def collect_backed(self) -> None:
        """Hand the cells that have got memory to the allocator. Called after the backer has reported progress."""
        if self._take_backed():
            self.keep_ahead()

    def _take_backed(self) -> bool:
        cells = self._backer.backed // self.config.cell_bytes
        more = cells > self._backed
        self.cache.allocator.back(cells)
        return more

    def keep_ahead(self) -> None:
        """Have memory put behind the arena before it is needed."""
        self._grow(AHEAD_BYTES // self.config.cell_bytes)

    def _memory_comes(self, cells: int) -> bool:
        """Whether so many cells are not free yet and will be; what is read after them has memory asked for, too."""
        allocator = self.cache.allocator
        # asked for each object that is read, and what the host has to spare takes a while to find out
        if allocator.free < min(AHEAD_BYTES - SLAB_BYTES, self.config.arena_bytes) // self.config.cell_bytes:
            self.keep_ahead()
        return allocator.free < cells and self._grow(cells)

    def _grow(self, free_cells: int) -> bool:
        """Ask for memory until `free_cells` are free; True when that is not so yet and more is on its way."""
        # the report may still be on its way: what has memory is handed out now, not refused
        self._take_backed()
        missing = free_cells - self.cache.allocator.free
        if missing <= 0 or self._backer.complete:
            return False
        return self._backer.request(self._backer.backed + missing * self.config.cell_bytes)

    # --------------------------------------------------------------------------------------------------------- common

    def _worker(self, connection: Connection) -> Namespace:
        namespace = self._registered(connection)
        if connection.role is Role.SCHEDULER:
            raise Refused(
                "only workers have an arena to copy to and from", code=ErrorCode.MALFORMED, remedy="ask as one"
            )
        return namespace

    def _registered(self, connection: Connection) -> Namespace:
        if connection.namespace is None:
            raise Refused(
                "this connection is not registered", code=ErrorCode.UNREGISTERED, remedy="send Register first"
            )
        return connection.namespace

    def _hashes(self, joined: bytes) -> list[Any]:
        if len(joined) % HASH_BYTES:
            raise _malformed(f"{len(joined)} bytes of hashes, {HASH_BYTES} each")
        if len(joined) > MAX_CHUNKS * HASH_BYTES:
            raise Refused(
                f"{len(joined) // HASH_BYTES} chunks in one request; {MAX_CHUNKS} are allowed",
                code=ErrorCode.MALFORMED,
                remedy="use larger chunks for prompts that long",
            )
        return split_hashes(joined)

    def _answered(self, namespace: Namespace, request: Lookup, reply: Found) -> None:
        """A lookup has its final answer."""
        if self._observer and self._observer.lookups:
            self._observer.looked_up(namespace, request, reply.tokens)
        self._record(namespace, request, reply)

    def _record(self, namespace: Namespace, request: Lookup | Reserve, reply: Found | Reserved) -> None:
        """Have an answered request recorded. Never raises: the request is not to suffer."""
        if self._recorder is None:
            return
        try:
            self._recorder.observe(namespace, request, reply)
        except Exception:
            if not self._unrecorded:
                log.exception("%s could not be recorded; logged once", type(request).__name__)
            self._unrecorded += 1

    def report(self, clients: list[dict[str, Any]]) -> dict[str, Any]:
        """Everything `lmcache status` shows."""
        cache, allocator = self.cache, self.cache.allocator
        cache.counters.records_lost = self._unrecorded + (self._recorder.lost if self._recorder else 0)
        cache.counters.events_lost = self._observer.lost if self._observer else 0
        counters = {name: getattr(cache.counters, name) for name in cache.counters.__slots__ if name != "__weakref__"}
        return {
            "version": __version__,
            "protocol": PROTOCOL,
            "epoch": self.epoch,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "eviction_policy": cache.policy.name,
            "chunk_size": self.config.chunk_size,
            "l1_bytes": self.config.arena_bytes,
            "cell_bytes": self.config.cell_bytes,
            "huge_page_bytes": self.config.huge_page_bytes,
            "gauges": {
                "cells_total": allocator.cells,
                "cells_backed": allocator.backed,
                "cells_used": allocator.used,
                "cells_reserved": sum(
                    len(r) for reservation in cache.reservations.values() for _, _, r in reservation.objects
                )
                // 4,
                "nodes": sum(len(namespace.nodes) for namespace in cache.namespaces.values()),
                "pinned_nodes": len(set().union(*(pins.nodes for pins in cache.pins.values()))),
                "prefix_pins": len(cache.prefix_pins.all),
                "prefix_pin_cells": cache.prefix_pins.cells,
                "tickets": len(cache.tickets),
                "reservations": len(cache.reservations),
                "clients": len(clients),
                "tier_calls": self.tiering.busy,
            },
            "counters": counters,
            "clients": clients,
            "tiers": self.tiering.report(),
            "tenants": [
                {"tenant": a.name, "cells": a.cells, "quota_cells": a.quota, "guaranteed_cells": a.guaranteed}
                for a in cache.residents.accounts.all
                if a.name
            ],
            "prefix_pins": [
                {
                    "pin": pin.id,
                    "namespace": pin.namespace.digest.hex(),
                    "tokens": pin.tokens,
                    "ends_in_s": round(pin.until - cache.residents.now, 3),
                }
                for pin in cache.prefix_pins.all
            ],
            "namespaces": [
                {"digest": n.digest.hex(), "chunk_size": n.chunk_size, "chunks": len(n.nodes), "facts": n.facts}
                for n in cache.namespaces.values()
            ],
        }


def check_version(protocol: int, version: str) -> None:
    """Refuse another protocol version, naming both."""
    if protocol != PROTOCOL:
        raise Refused(
            f"the client{f' (lmcache {version})' if version else ''} speaks protocol {protocol}, this server (lmcache "
            f"{__version__}) speaks {PROTOCOL}",
            code=ErrorCode.VERSION,
            remedy="install the same lmcache version on both sides",
        )


def _malformed(fact: str) -> Refused:
    return Refused(fact, code=ErrorCode.MALFORMED, remedy="use the client of the same lmcache version")


def _found(number: int, answer: Answer) -> Found:
    return Found(number, answer.ticket, answer.tokens, not answer.final)


def _tenant(request: Lookup | Reserve) -> str:
    if len(request.tenant) > MAX_TENANT:
        raise Refused(
            f"a tenant's name of {len(request.tenant)} characters",
            code=ErrorCode.MALFORMED,
            remedy=f"at most {MAX_TENANT}",
        )
    if not request.tenant.isprintable():  # names are shown on terminals
        raise Refused(
            f"a tenant's name with characters that cannot be printed: {request.tenant!r:.80}",
            code=ErrorCode.MALFORMED,
            remedy="use letters, digits, blanks and marks",
        )
    return request.tenant


Handler = Callable[[Service, Connection, Any], Any]

HANDLERS: dict[type, Handler] = {
    Register: Service.register,
    Commit: Service.commit,
    Abort: Service.abort,
    Lookup: Service.lookup,
    AskAgain: Service.ask_again,
    Open: Service.open,
    Confirm: Service.confirm,
    Drop: Service.drop,
    Peek: Service.peek,
    Take: Service.take,
}
"""Requests that need a Unix connection and are answered at once. `Reserve` may have to wait for memory."""
