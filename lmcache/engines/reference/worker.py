"""Adapter, part 3: a worker's half. Copies between the engine's pages and the arena; one per rank.

Stores are copied within the step that computed them: the pages are written by then, and nobody may reuse them before
the step has ended. Loads are copied by a thread, into blocks that nobody else uses until the load has been reported.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from lmcache.core.cells import unpack_cells
from lmcache.core.client import Client, Link
from lmcache.core.keys import HASH_BYTES
from lmcache.core.protocol import Placed
from lmcache.engines.copy import Copier, Pages
from lmcache.engines.reference.blocks import NULL_BLOCK
from lmcache.engines.reference.messages import LoadOrder, StoreOffer
from lmcache.errors import LMCacheError
from lmcache.geometry.chunking import kept_span
from lmcache.geometry.groups import GroupKind
from lmcache.geometry.hits import load_spans
from lmcache.geometry.layout import object_layout

log = logging.getLogger("lmcache.reference")

PATIENCE = 8
"""Steps in which a chunk that could not be placed is offered again, should there be room for it then."""

TURNS = (0.0005, 0.001, 0.002, 0.004)
"""Seconds to wait for the chunk before, where ranks take turns: it must be in the index, though not be written yet."""


@attrs.define
class _Progress:
    """How far one group of one request is stored."""

    chunk: int = 0
    """The first chunk that is not settled."""
    tries: int = 0


class WorkerConnector:
    """One per rank. `client` has the role `WORKER`; `pages` has one entry a group, None for scratch."""

    def __init__(self, client: Client, pages: Sequence[Pages | None]) -> None:
        self._client = client
        self._geometry = client.engine.geometry
        self._rank = client.engine.rank
        self._pages = pages
        self._copiers: dict[tuple[int, int], list[Copier | None]] = {}
        self._progress: dict[tuple[int, int], _Progress] = {}
        self._epoch = ""
        self._orders: queue.SimpleQueue[LoadOrder | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._load_for_ever, name="lmcache-load", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the load in progress and stop. The client is closed by whoever made it."""
        self._orders.put(None)
        self._thread.join()

    # ----------------------------------------------------------------------------------------------------------- loads

    def start_load(self, order: LoadOrder) -> None:
        """Begin to load; returns at once. `finished_loads` tells when it has ended."""
        self._orders.put(order)

    def finished_loads(self) -> list[tuple[int, bool]]:
        """Requests whose load has ended since the last call, and whether it may be used."""
        reports = []
        while not self._reports.empty():
            reports.append(self._reports.get())
        return reports

    def _load_for_ever(self) -> None:
        while (order := self._orders.get()) is not None:
            well = False
            try:
                well = self._load(order)
            except LMCacheError as error:
                log.info("request %d is computed instead of loaded: %s", order.request, error)
            except Exception:  # a load that is never reported would hang its request
                log.exception("loading request %d failed", order.request)
            self._reports.put((order.request, well))

    def _load(self, order: LoadOrder) -> bool:
        link = self._client.link()
        if link.epoch != order.epoch:
            return False  # the server that issued the ticket has gone
        opened = link.open(order.ticket)
        if opened.tokens != order.hit:
            return False
        self._copy_out(link, order, opened.first, opened.cells)
        # only now is it certain that nobody has overwritten the cells while they were read
        return link.confirm(order.ticket)

    def _copy_out(self, link: Link, order: LoadOrder, first: Sequence[int], cells: Sequence[bytes]) -> None:
        with link.copying() as memory:
            arena = np.frombuffer(memory, np.uint8)
            for group, copier in enumerate(self._copiers_for(link)):
                if copier is None:
                    continue
                numbers = unpack_cells(cells[group])
                for span in load_spans(self._geometry.groups[group], link.chunk_size, order.hit, order.computed):
                    start = (span.chunk - first[group]) * copier.layout.cells
                    blocks = [order.tables[group][number] for number in span.blocks]
                    copier.load(arena, numbers[start : start + copier.layout.cells], blocks, span.first)

    # ---------------------------------------------------------------------------------------------------------- stores

    def store(self, offers: Sequence[StoreOffer]) -> None:
        """Store what the step has computed, as far as the server has room. Raises nothing that concerns the server."""
        try:
            link = self._client.link()
            if link.epoch != self._epoch:  # a new server has nothing of what was stored before
                self._epoch = link.epoch
                self._progress.clear()
            for offer in offers:
                if offer.namespace == link.namespace:
                    self._store_request(link, offer)
        except LMCacheError:
            return  # what is not stored is computed again some day

    def forget(self, request: int) -> None:
        """The request has ended."""
        for group in self._geometry.cached_groups:
            self._progress.pop((request, group), None)

    def _store_request(self, link: Link, offer: StoreOffer) -> None:
        # full groups come first where there are any: their chains give the other groups' chunks their parents
        kinds = [group.kind for group in self._geometry.groups]
        for group in sorted(self._geometry.cached_groups, key=lambda number: kinds[number] is not GroupKind.FULL):
            progress = self._progress.setdefault((offer.request, group), _Progress())
            chunks = len(offer.hashes) // HASH_BYTES
            for run in self._runs(link, offer, group, range(progress.chunk, chunks)):
                settled = self._store_run(link, offer, group, run)
                if settled < len(run) and progress.tries < PATIENCE:
                    progress.chunk, progress.tries = run.start + settled, progress.tries + 1
                    break
            else:
                progress.chunk, progress.tries = chunks, 0

    def _runs(self, link: Link, offer: StoreOffer, group: int, chunks: range) -> Iterator[range]:
        """The chunks that this rank is to store and has the blocks of, in runs that one reservation can name."""
        shared = self._geometry.groups[group].shards < self._geometry.ranks
        start = chunks.start
        for chunk in chunks:
            mine = self._geometry.writes(group, self._rank, chunk)
            whole = NULL_BLOCK not in self._blocks(link, offer, group, chunk)
            if not (mine and whole):
                yield from [range(start, chunk)] if start < chunk else []
                start = chunk + 1
            elif shared:
                yield range(chunk, chunk + 1)
                start = chunk + 1
        if start < chunks.stop:
            yield range(start, chunks.stop)

    def _blocks(self, link: Link, offer: StoreOffer, group: int, chunk: int) -> list[int]:
        table = offer.tables[group]
        return [table[number] for number in kept_span(self._geometry.groups[group], link.chunk_size, chunk)]

    def _store_run(self, link: Link, offer: StoreOffer, group: int, run: range) -> int:
        """Reserve, copy, commit. Returns how many chunks of the run are settled: stored, or other people's business."""
        parent = offer.hashes[(run.start - 1) * HASH_BYTES : run.start * HASH_BYTES] if run.start else b""
        hashes = offer.hashes[run.start * HASH_BYTES : run.stop * HASH_BYTES]
        shard = self._geometry.shard_of(group, self._rank)
        reserved = link.reserve(offer.tenant, parent, hashes, group, shard)
        for pause in TURNS if parent and self._geometry.groups[group].shards < self._geometry.ranks else ():
            if reserved.placed:
                break
            time.sleep(pause)
            reserved = link.reserve(offer.tenant, parent, hashes, group, shard)
        if reserved.reservation:
            granted = [run.start + i for i, placed in enumerate(reserved.placed) if placed == Placed.GRANTED]
            try:
                self._copy_in(link, offer, group, granted, reserved.cells)
            except BaseException:
                with contextlib.suppress(LMCacheError):  # the link has ended, and the reservation with it
                    link.abort(reserved.reservation)
                raise
            link.commit(reserved.reservation)
        return len(reserved.placed)

    def _copy_in(self, link: Link, offer: StoreOffer, group: int, chunks: Sequence[int], cells: bytes) -> None:
        copier = self._copiers_for(link)[group]
        if copier is None:
            return
        numbers = unpack_cells(cells)
        with link.copying() as memory:
            arena = np.frombuffer(memory, np.uint8)
            for position, chunk in enumerate(chunks):
                own = numbers[position * copier.layout.cells : (position + 1) * copier.layout.cells]
                copier.store(arena, own, self._blocks(link, offer, group, chunk))

    def _copiers_for(self, link: Link) -> list[Copier | None]:
        """One copier a group: planned once for a chunk size and a cell size, which a new server may have changed."""
        key = link.chunk_size, link.cell_bytes
        if key not in self._copiers:
            self._copiers[key] = [
                Copier(pages, object_layout(group, *key), link.cell_bytes) if pages else None
                for pages, group in zip(self._pages, self._geometry.groups, strict=True)
            ]
        return self._copiers[key]
