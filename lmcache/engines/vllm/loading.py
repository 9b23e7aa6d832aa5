"""A worker's loads: cells to pages, on a thread of its own.

Imports neither vLLM nor torch.
"""

import logging
import queue
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lmcache.core.cells import unpack_cells
from lmcache.core.client import Client, Link
from lmcache.core.protocol import ErrorCode, Opened
from lmcache.engines.copying import CopyPlans, Kernels, ObjectCopier, load_objects, mapped_arena
from lmcache.engines.vllm.orders import NULL_BLOCK, LoadOrder
from lmcache.errors import GeometryError, LMCacheError, Refused
from lmcache.geometry.groups import Geometry
from lmcache.geometry.hits import load_spans

log = logging.getLogger(__name__)

_Copy = tuple[ObjectCopier, Sequence[int], Sequence[int], int]
"""Copier, cells of the object, block ids, and the kept position of the first of them."""


class Loader:
    """Loads on a thread of its own, one order after another, and remembers what became of each."""

    def __init__(self, client: Client, geometry: Geometry, plans: CopyPlans, kernels: Kernels) -> None:
        self._client = client
        self._geometry = geometry
        self._plans = plans
        self._kernels = kernels
        self._orders: queue.SimpleQueue[tuple[LoadOrder, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._succeeded: set[str] = set()
        self._failed: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="lmcache-load", daemon=True)
        self._thread.start()

    def load(self, orders: Iterable[LoadOrder]) -> None:
        """Begin these loads, each when the device has done what was submitted to it before. Does not wait."""
        for order in orders:
            self._orders.put((order, self._kernels.mark()))

    def outcomes(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call: all of them, and those whose load failed."""
        with self._lock:
            succeeded, failed = self._succeeded, self._failed
            self._succeeded, self._failed = set(), set()
        return succeeded | failed, failed

    def close(self) -> None:
        """Finish the load in progress; drop the others."""
        while True:
            try:
                self._orders.get_nowait()
            except queue.Empty:
                break
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._kernels.own_stream():
            while (entry := self._orders.get()) is not None:
                order, mark = entry
                held = self._load_or_fail(order, mark)
                with self._lock:
                    (self._succeeded if held else self._failed).add(order.request)

    def _load_or_fail(self, order: LoadOrder, mark: Any) -> bool:
        """Whether the request's blocks hold what was asked for. Raises nothing: vLLM waits for an outcome."""
        try:
            self._kernels.reached(mark)
            return self._load(order)
        except LMCacheError as error:
            log.warning("lmcache: a load failed, its request is computed instead: %s", error)
        except Exception:  # noqa: BLE001 - the request must not hang whatever is wrong with the cache
            # as text: a log record with the exception itself would keep its frames, and with them the arena, mapped
            log.error("lmcache: a load failed, its request is computed instead\n%s", traceback.format_exc())  # noqa: TRY400
        return False

    def _load(self, order: LoadOrder) -> bool:
        link = self._client.link()
        if not order.ticket or link.epoch != order.epoch:
            raise Refused("its ticket was given by a server that has gone", code=ErrorCode.STALE)
        opened = link.open(order.ticket)
        copies = [copy for group in self._geometry.cached_groups for copy in self._copies(link, order, opened, group)]
        self._copy_in(link, copies)
        # the pages count only if the ticket held until the last byte was read
        if not link.confirm(order.ticket):
            raise Refused("its ticket did not hold while it was copied", code=ErrorCode.STALE)
        return True

    def _copy_in(self, link: Link, copies: Iterable[_Copy]) -> None:
        with mapped_arena(link) as arena:
            load_objects(arena, copies)

    def _copies(self, link: Link, order: LoadOrder, opened: Opened, group: int) -> Iterator[_Copy]:
        """What to copy of one group. Raises GeometryError before anything is, where vLLM has no block for a page."""
        copier, per_object = self._plans.of(link, group)
        cells = unpack_cells(opened.cells[group])
        for span in load_spans(self._geometry.groups[group], link.chunk_size, order.hit, order.computed):
            ids = order.blocks[group][span.blocks.start : span.blocks.stop]
            if len(ids) != len(span.blocks) or NULL_BLOCK in ids:
                raise GeometryError(
                    f"vLLM gave {ids} for blocks {span.blocks} of KV group {group}, "
                    f"which a hit of {order.hit} tokens fills",
                    remedy="report it: this vLLM reads other blocks after a hit than lmcache thinks",
                )
            start = (span.chunk - opened.first[group]) * per_object
            yield copier, cells[start : start + per_object], ids, span.first
