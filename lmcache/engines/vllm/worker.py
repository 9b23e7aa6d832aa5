"""A worker's half: copies its rank's pages to the cache within a step, and back on a thread.

Imports neither vLLM nor torch.
"""

import contextlib
import logging
import queue
import struct
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs
import numpy as np

from lmcache.core.client import Client, Link
from lmcache.core.keys import HASH_BYTES
from lmcache.core.protocol import ErrorCode, Opened, Placed
from lmcache.engines.copy import Bytes
from lmcache.engines.vllm.orders import LoadOrder, StoreOrder
from lmcache.errors import LMCacheError, Refused
from lmcache.geometry.chunking import kept_span
from lmcache.geometry.groups import Geometry
from lmcache.geometry.hits import LoadSpan, load_spans
from lmcache.geometry.layout import ObjectLayout, object_layout

log = logging.getLogger(__name__)


class ObjectCopier(Protocol):
    """`engines.copy.Copier`, or whatever reaches the pages of another kind of memory."""

    def store(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int]) -> None: ...
    def load(self, arena: Bytes, cells: Sequence[int], block_ids: Sequence[int], first: int = 0) -> None: ...


MakeCopier = Callable[[ObjectLayout, int], ObjectCopier]
"""Makes the copier of one group for a layout and a cell size in bytes."""


class Kernels(Protocol):
    """How to wait for what the engine has submitted to its device."""

    def settle(self) -> None: ...
    def mark(self) -> Any: ...
    def reached(self, mark: Any) -> None: ...
    def own_stream(self) -> AbstractContextManager[Any]: ...


class NoKernels:
    """An engine whose steps are done when they return, as on CPU."""

    def settle(self) -> None:
        """Nothing to wait for."""

    def mark(self) -> None:
        """Nothing to wait for later."""

    def reached(self, mark: None) -> None:
        """It is done."""

    def own_stream(self) -> AbstractContextManager[None]:
        """There are no streams."""
        return contextlib.nullcontext()


class CopyPlans:
    """A copier for each cached group, for the chunk size and the cells of the server that a link leads to.

    Not shared between threads: a copier may have buffers of its own.
    """

    def __init__(self, geometry: Geometry, makers: Mapping[int, MakeCopier]) -> None:
        self._geometry = geometry
        self._makers = makers
        self._made: dict[tuple[int, int, int], tuple[ObjectCopier, int]] = {}

    def of(self, link: Link, group: int) -> tuple[ObjectCopier, int]:
        """The copier, and how many cells one object of the group takes."""
        key = (link.chunk_size, link.cell_bytes, group)
        if key not in self._made:
            layout = object_layout(self._geometry.groups[group], link.chunk_size, link.cell_bytes)
            self._made[key] = self._makers[group](layout, link.cell_bytes), layout.cells
        return self._made[key]


@attrs.define
class _Stored:
    """What a worker knows of the chunks of one running request."""

    tenant: str
    epoch: str
    """Boot of the server that `done` counts in."""
    hashes: bytearray
    blocks: tuple[list[int], ...]
    done: dict[int, int]
    """For each cached group, the number of chunks that need no more offering."""


class Storer:
    """Stores chunks while their step still holds their blocks, so that nobody can change them meanwhile."""

    def __init__(self, client: Client, geometry: Geometry, rank: int, plans: CopyPlans, kernels: Kernels) -> None:
        self._client = client
        self._geometry = geometry
        self._rank = rank
        self._kernels = kernels
        self._plans = plans
        self._stored: dict[str, _Stored] = {}

    def store(self, orders: Sequence[StoreOrder], namespace: bytes) -> None:
        """Offer what the orders name, and what earlier ones named of the same requests and could not be stored.

        Called in every step, after the forward pass. Raises nothing: what cannot be stored is a later miss.
        """
        for order in orders:
            self._remember(order)
        if not orders:
            return
        try:
            link = self._client.link()
            if link.namespace == namespace:
                self._kernels.settle()
                for order in orders:
                    self._store_request(link, self._stored[order.request])
        except LMCacheError as error:
            log.debug("lmcache: stores wait: %s", error)
        except Exception:  # noqa: BLE001 - the engine must answer its users whatever is wrong with the cache
            log.error("lmcache: a store failed; the engine goes on\n%s", traceback.format_exc())  # noqa: TRY400 - below

    def forget(self, requests: Iterable[str]) -> None:
        """These requests have ended: their blocks are no longer theirs."""
        for request in requests:
            self._stored.pop(request, None)

    def _remember(self, order: StoreOrder) -> None:
        stored = self._stored.get(order.request)
        if stored is None or order.first == 0:
            stored = self._stored[order.request] = _Stored(
                order.tenant, "", bytearray(), tuple([] for _ in order.blocks), {}
            )
        stored.hashes += order.hashes
        for ids, more in zip(stored.blocks, order.blocks, strict=True):
            ids.extend(more)

    def _store_request(self, link: Link, stored: _Stored) -> None:
        if stored.epoch != link.epoch:
            stored.epoch, stored.done = link.epoch, dict.fromkeys(self._geometry.cached_groups, 0)
        for group in self._geometry.cached_groups:
            # ranks with the same bytes take turns by prompt, not by chunk: a chain has one writer, so that no rank
            # has to wait for another to store the chunk before
            if self._geometry.writes(group, self._rank, int.from_bytes(stored.hashes[:4], "little")):
                self._store_group(link, stored, group)

    def _store_group(self, link: Link, stored: _Stored, group: int) -> None:
        first = stored.done[group]
        placed = self._offer(link, stored, group, first)
        if first and not placed:
            # the chunk before is gone, or there is no room: only the former is helped by starting at the root
            stored.done[group] = self._offer(link, stored, group, 0)
        else:
            stored.done[group] = first + placed

    def _offer(self, link: Link, stored: _Stored, group: int, first: int) -> int:
        """Offer all chunks from number `first` on; returns how many of them were placed."""
        parent = bytes(stored.hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES]) if first else b""
        shard = self._geometry.shard_of(group, self._rank)
        reserved = link.reserve(stored.tenant, parent, bytes(stored.hashes[first * HASH_BYTES :]), group, shard)
        if reserved.reservation:
            granted = [first + i for i, placed in enumerate(reserved.placed) if placed == Placed.GRANTED]
            try:
                self._copy_out(link, stored, group, granted, reserved.cells)
            except BaseException:
                with contextlib.suppress(LMCacheError):
                    link.abort(reserved.reservation)
                raise
            link.commit(reserved.reservation)
        return len(reserved.placed)

    def _copy_out(self, link: Link, stored: _Stored, group: int, chunks: Sequence[int], packed: bytes) -> None:
        copier, per_object = self._plans.of(link, group)
        cells = _unpack(packed)
        kv_group = self._geometry.groups[group]
        with _arena(link) as arena:
            for position, chunk in enumerate(chunks):
                span = kept_span(kv_group, link.chunk_size, chunk)
                own = cells[position * per_object : (position + 1) * per_object]
                copier.store(arena, own, stored.blocks[group][span.start : span.stop])


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
        spans = {
            group: load_spans(self._geometry.groups[group], link.chunk_size, order.hit, order.computed)
            for group in self._geometry.cached_groups
        }
        with _arena(link) as arena:
            for group, of_group in spans.items():
                self._copy_in(link, order, opened, group, of_group, arena)
        # the pages count only if the ticket held until the last byte was read
        if not link.confirm(order.ticket):
            raise Refused("its ticket did not hold while it was copied", code=ErrorCode.STALE)
        return True

    def _copy_in(
        self, link: Link, order: LoadOrder, opened: Opened, group: int, spans: Sequence[LoadSpan], arena: Bytes
    ) -> None:
        copier, per_object = self._plans.of(link, group)
        cells = _unpack(opened.cells[group])
        for span in spans:
            start = (span.chunk - opened.first[group]) * per_object
            ids = order.blocks[group][span.blocks.start : span.blocks.stop]
            copier.load(arena, cells[start : start + per_object], ids, span.first)


class WorkerSide:
    """One rank. vLLM's worker thread calls it; the loads run on the loader's thread."""

    def __init__(
        self,
        client: Client,
        geometry: Geometry,
        rank: int,
        makers: Mapping[int, MakeCopier],
        kernels: Kernels | None = None,
    ) -> None:
        kernels = kernels or NoKernels()
        self._client = client
        self._loader = Loader(client, geometry, CopyPlans(geometry, makers), kernels)
        self._storer = Storer(client, geometry, rank, CopyPlans(geometry, makers), kernels)

    def load(self, orders: Iterable[LoadOrder]) -> None:
        """Begin loads; called after the step's forward pass was submitted."""
        self._loader.load(orders)

    def store(self, orders: Sequence[StoreOrder], namespace: bytes) -> None:
        """Store within the step; called when its forward pass is done."""
        self._storer.store(orders, namespace)

    def outcomes(self, ended: Iterable[str]) -> tuple[set[str], set[str]]:
        """Loads that have ended since the last call, and the failed ones among them. `ended` requests are forgotten."""
        self._storer.forget(ended)
        return self._loader.outcomes()

    def close(self) -> None:
        """The engine ends."""
        self._loader.close()
        self._client.close()


@contextlib.contextmanager
def _arena(link: Link) -> Iterator[Bytes]:
    with link.copying() as memory:
        arena = np.frombuffer(memory, np.uint8)
        try:
            yield arena
        finally:
            del arena


def _unpack(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))
