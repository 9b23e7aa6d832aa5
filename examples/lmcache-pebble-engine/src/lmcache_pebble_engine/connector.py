"""The adapter: keeps Pebble's KV in an lmcache server. Both halves in one object, for Pebble is one process."""

import contextlib
import functools

import attrs

from lmcache.core.cells import unpack_cells
from lmcache.core.client import Client, ClientSettings, Engine, Link, ServerAddress
from lmcache.core.keys import HASH_BYTES, ChainHasher, chain_root, tenant_of
from lmcache.core.pending_hit import PendingHit
from lmcache.core.protocol import Found, Role
from lmcache.engines.copy import Copier, Pages
from lmcache.engines.copying import CopyPlans, NoKernels, mapped_arena
from lmcache.engines.storing import StoreOrder, Storer
from lmcache.engines.versions import warn_of_version
from lmcache.errors import LMCacheError
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup
from lmcache.geometry.hits import load_spans
from lmcache_pebble_engine.adapter import PebbleAdapter
from lmcache_pebble_engine.engine import BLOCK, VERSION, Pebble, Request


@attrs.define
class _Known:
    """What is remembered of one request."""

    link: Link
    hasher: ChainHasher
    pending: PendingHit | None = None
    found: Found | None = None
    offered: int = 0  # chunks, to be stored


class LMCache:
    """Set it as `Pebble.cache`, close it with the engine. At `server` there is one, or will be some day."""

    def __init__(self, engine: Pebble, server: ServerAddress, settings: ClientSettings) -> None:
        warn_of_version(PebbleAdapter, VERSION)
        pages = engine.pages()
        self._geometry = Geometry((KVGroup(GroupKind.FULL, BLOCK, tuple(layer.shape[1] for layer in pages)),))
        facts = {"engine": "pebble", "model": "pebble", "weights": f"seed {engine.seed}", "dtype": "float32"}
        self._scheduler = Client(server, Engine(facts, self._geometry, Role.SCHEDULER), settings)
        self._worker = Client(server, Engine(facts, self._geometry, Role.WORKER), settings)
        self._plans = CopyPlans(self._geometry, {0: functools.partial(Copier, Pages(pages))})
        self._storer = Storer(self._worker, self._geometry, 0, self._plans, NoKernels(), no_block=-1)
        self._known: dict[str, _Known] = {}
        self._abandoned: list[_Known] = []
        self.clients = (self._scheduler, self._worker)
        for client in self.clients:
            client.start(wait=settings.deadline)

    def close(self) -> None:
        """Leave the server."""
        for client in self.clients:
            client.close()

    def arrived(self, request: Request) -> None:
        """Ask what the server has."""
        with contextlib.suppress(LMCacheError):  # no server: do without
            link = self._scheduler.link()
            root = chain_root({"salt": request.salt} if request.salt else {})
            known = self._known[request.name] = _Known(link, ChainHasher(root, link.chunk_size))
            hashes = known.hasher.extend_to(request.tokens)
            known.pending = link.lookup(tenant_of(request.salt), hashes, len(request.tokens) - 1)

    def hit(self, request: Request) -> int | None:
        """What the answer says, once it has come; its deadline ends the waiting."""
        if (known := self._known.get(request.name)) and self._is_open(known):
            return None
        return known.found.tokens if known and known.found else 0

    def _is_open(self, known: _Known) -> bool:
        with contextlib.suppress(LMCacheError):
            known.found = known.pending.poll() if known.pending else known.found
            if known.pending and not known.found:
                return True
        known.pending = None
        return False

    def load(self, request: Request, hit: int) -> bool:
        """Copy the hit into the blocks of the request that Pebble does not hold itself."""
        known = self._known[request.name]
        with contextlib.suppress(LMCacheError):  # what fails is computed instead, and its ticket dropped
            link = self._worker.link()
            if not known.found or known.link.epoch != link.epoch:
                return False
            opened, (copier, size) = link.open(known.found.ticket), self._plans.of(link, 0)
            cells = unpack_cells(opened.cells[0])
            with mapped_arena(link) as arena:
                for span in load_spans(self._geometry.groups[0], link.chunk_size, hit, request.computed):
                    start = (span.chunk - opened.first[0]) * size
                    copier.load(arena, cells[start:][:size], [request.table[n] for n in span.blocks], span.first)
            if link.confirm(known.found.ticket):
                known.found = None  # the ticket has ended with the confirmation
        return known.found is None

    def computed(self, request: Request) -> None:
        """Store the chunks that have become whole."""
        if (known := self._known.get(request.name)) is None:
            return
        self._drop(known)  # Pebble has not loaded it, or not well
        first, size = known.offered, known.link.chunk_size
        known.offered = last = request.computed // size
        if last > first:
            hashes = known.hasher.extend_to(request.tokens)[first * HASH_BYTES : last * HASH_BYTES]
            blocks = request.table[first * size // BLOCK : last * size // BLOCK]
            order = StoreOrder(request.name, tenant_of(request.salt), first, hashes, (blocks,))
            self._storer.store([order], known.link.namespace)

    def ended(self, request: Request) -> None:
        """Give back what was not used; what was asked for can still bring a ticket."""
        self._abandoned += filter(None, [self._known.pop(request.name, None)])
        self._storer.forget([request.name])

    def step(self) -> None:
        """Drop the tickets that nobody wants any more."""
        for known in self._abandoned:
            if not self._is_open(known):
                self._drop(known)
        self._abandoned = [known for known in self._abandoned if known.pending]

    def busy(self) -> bool:
        """Whether such tickets may still come."""
        return bool(self._abandoned)

    def _drop(self, known: _Known) -> None:
        if known.found and known.found.ticket:
            known.link.drop(known.found.ticket)
        known.found = None
