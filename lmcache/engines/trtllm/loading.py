"""A worker's loads: cells to pages, in the step that counts on them or on a thread. Imports no engine, nor torch."""

import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lmcache.core.cells import unpack_cells
from lmcache.core.client import Client, Link
from lmcache.core.protocol import ErrorCode, Opened
from lmcache.engines.copying import CopyPlans, Kernels, ObjectCopier, load_objects, mapped_arena
from lmcache.engines.trtllm.describe import Shape
from lmcache.engines.trtllm.orders import BAD_PAGE, LoadOrder
from lmcache.errors import GeometryError, LMCacheError, LoadFailed, Refused
from lmcache.geometry.hits import LoadSpan, load_spans

log = logging.getLogger(__name__)

_Copy = tuple[ObjectCopier, Sequence[int], Sequence[int], int]
"""Copier, cells of the object, block ids, and the kept position of the first of them."""


class Pages:
    """Fills pages from the cache. For one thread: copiers may have buffers of their own."""

    def __init__(self, client: Client, shape: Shape, plans: CopyPlans) -> None:
        self._client = client
        self._shape = shape
        self._plans = plans

    def fill(self, order: LoadOrder) -> None:
        """Copy; when it returns, the pages hold what was asked for. Raises LoadFailed, and whatever goes wrong."""
        if order.end <= order.start:
            return
        try:
            self._fill(order)
        except LMCacheError as error:
            raise LoadFailed(
                f"tokens {order.start} to {order.end} of request {order.request} were promised to the engine and could "
                f"not be loaded: {error}",
                remedy="start the engine again: TensorRT-LLM cannot compute what it counts as loaded",
            ) from error

    def _fill(self, order: LoadOrder) -> None:
        link = self._client.link()
        if not order.ticket or link.epoch != order.epoch:
            raise Refused("its ticket was given by a server that has gone", code=ErrorCode.STALE)
        opened = link.open(order.ticket)
        groups = self._shape.geometry.cached_groups
        copies = [copy for group in groups for copy in self._copies(link, order, opened, group)]
        with mapped_arena(link) as arena:
            load_objects(arena, copies)
        # the pages count only if the ticket held until the last byte was read
        if not link.confirm(order.ticket):
            raise Refused("its ticket did not hold while it was copied", code=ErrorCode.STALE)

    def _copies(self, link: Link, order: LoadOrder, opened: Opened, group: int) -> Iterator[_Copy]:
        """What to copy of one group. Raises GeometryError, before anything is copied, where there is no page for it."""
        copier, per_object = self._plans.of(link, group)
        cells = unpack_cells(opened.cells[group])
        for span in load_spans(self._shape.geometry.groups[group], link.chunk_size, order.end, order.start):
            start = (span.chunk - opened.first[group]) * per_object
            for first, ids in self._held(order, group, span):
                yield copier, cells[start : start + per_object], ids, first

    def _held(self, order: LoadOrder, group: int, span: LoadSpan) -> Iterator[tuple[int, list[int]]]:
        """Runs of a span's blocks that the engine holds pages for: kept position of the first, and ids."""
        ids = order.blocks[group][span.blocks.start : span.blocks.stop]
        needed = max(0, self._first_needed(order, group) - span.blocks.start)
        if len(ids) != len(span.blocks) or BAD_PAGE in ids[needed:]:
            raise GeometryError(
                f"the engine holds pages {ids} for blocks {span.blocks} of KV group {group}",
                remedy="report it: this TensorRT-LLM counts on blocks that it does not hold",
            )
        run: list[int] = []
        for position, block in enumerate([*ids, BAD_PAGE]):
            # behind the window, where there is no page, nobody reads
            if block == BAD_PAGE and run:
                yield span.first + position - len(run), run
                run = []
            elif block != BAD_PAGE:
                run.append(block)

    def _first_needed(self, order: LoadOrder, group: int) -> int:
        """The first block that a token behind the load reads."""
        window = self._shape.windows[group]
        tokens_per_block = self._shape.geometry.groups[group].tokens_per_block
        return max(0, order.end - window + 1) // tokens_per_block if window else 0


class Loader:
    """Loads of parked requests, on a thread, one after another; remembers what became of each."""

    def __init__(self, pages: Pages, kernels: Kernels) -> None:
        self._pages = pages
        self._kernels = kernels
        self._orders: queue.SimpleQueue[tuple[LoadOrder, Any] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[LoadOrder, BaseException | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def load(self, orders: Iterable[LoadOrder], *streams: Any) -> None:
        """Begin these loads, each when the device has done what was submitted to it before. Does not wait."""
        for order in orders:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lmcache-load", daemon=True)
                self._thread.start()
            self._orders.put((order, self._kernels.mark(*streams)))

    def ended(self) -> Iterator[tuple[LoadOrder, BaseException | None]]:
        """Loads that have ended since the last call, and why they failed."""
        while not self._ended.empty():
            yield self._ended.get()

    def close(self) -> None:
        """Finish the loads that were begun."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()

    def _run(self) -> None:
        with self._kernels.own_stream():
            while (entry := self._orders.get()) is not None:
                order, mark = entry
                failure: BaseException | None = None
                try:
                    self._kernels.reached(mark)
                    self._pages.fill(order)
                except Exception as error:  # noqa: BLE001 - the executor's thread raises it: its requests wait there
                    # frames would keep the arena mapped for as long as nobody asks
                    failure = error.with_traceback(None)
                self._ended.put((order, failure))
