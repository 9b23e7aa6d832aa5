"""A worker's stores: pages to cells, within the step that computed them. For any engine; imports none, nor torch."""

import contextlib
import logging
import traceback
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Protocol

import attrs

from lmcache.core.cells import unpack_cells
from lmcache.core.client import Client, Link
from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.keys import HASH_BYTES
from lmcache.core.protocol import Placed
from lmcache.engines.copying import CopyPlans, Kernels, mapped_arena, store_objects
from lmcache.errors import GeometryError, LMCacheError, ServerUnavailable
from lmcache.geometry.chunking import kept_blocks
from lmcache.geometry.groups import Geometry, GroupKind

log = logging.getLogger(__name__)


class Evidence(Protocol):
    """Something that a worker can find to be so, or not."""

    def holds(self) -> bool: ...


@attrs.frozen
class StoreOrder:
    """Offer chunks of a request that are whole by the end of this step."""

    request: str
    tenant: str
    first: int
    """Number of the first of these chunks. 0 starts the request over: earlier orders for it mean nothing any more."""
    hashes: bytes
    """Joined chain hashes of these chunks."""
    blocks: tuple[list[int], ...]
    """For each group, the ids of the blocks that these chunks keep (`geometry.chunking.kept_span`), chunk after chunk.

    The storer's `no_block` where the engine holds none: behind a window, or where there is no state snapshot. Empty for
    scratch. Ids of `fleeting` groups are good for this step only: the engine may give such blocks to others before the
    next one.
    """
    evidence: Evidence | None = None
    """What has to hold after this step, or its KV may be of other LoRA weights than the hashes say."""
    hints: Hints = NO_HINTS
    """How long the request wants its chunks kept."""


@attrs.define
class _Stored:
    """What a worker knows of the chunks of one running request."""

    tenant: str
    epoch: str
    """Boot of the server that `done` counts in."""
    hashes: bytearray
    blocks: tuple[list[int], ...]
    """As in the orders, of all chunks; of fleeting groups, only those from `fresh` on are still true."""
    done: dict[int, int]
    """For each group whose blocks stay, the number of chunks that need no more offering."""
    fresh: int = 0
    """First chunk of the last order."""
    hints: Hints = NO_HINTS

    @property
    def chunks(self) -> int:
        """How many chunks were ordered so far."""
        return len(self.hashes) // HASH_BYTES


class Storer:
    """Stores chunks while their step still holds their blocks, so that nobody can change them meanwhile."""

    def __init__(
        self,
        client: Client,
        geometry: Geometry,
        rank: int,
        plans: CopyPlans,
        kernels: Kernels,
        *,
        no_block: int,
        fleeting: Container[int] | None = None,
    ) -> None:
        """`no_block` is what the engine writes in a block table where it holds nothing.

        `fleeting` are the groups whose blocks may be another request's in the next step: all that are not full, if it
        is left out.
        """
        self._client = client
        self._geometry = geometry
        self._rank = rank
        self._kernels = kernels
        self._plans = plans
        self._no_block = no_block
        self._fleeting = fleeting if fleeting is not None else _not_full(geometry)
        self._stored: dict[str, _Stored] = {}
        self._doubted: set[str] = set()
        self._told: set[tuple[type[Exception], str, int | None]] = set()
        # those that stay first, where there are any: their chunks are the parents of all others
        self._order = sorted(geometry.cached_groups, key=lambda group: group in self._fleeting)
        # ranks with the same bytes take turns; but where a rank has to store one group and not another, the chunks of
        # the other might not be there yet to be its parents, so every rank offers all, and the first one writes
        self._turns = len({geometry.groups[group].shards for group in geometry.cached_groups}) == 1

    def store(self, orders: Sequence[StoreOrder], namespace: bytes, *streams: Any) -> None:
        """Offer what the orders name, and what earlier ones named of the same requests and could not be stored.

        Called in every step, after the forward pass, which was submitted to the current stream and `streams`. Raises
        nothing: what cannot be stored is a later miss.
        """
        orders = [order for order in orders if self._certain(order)]
        for order in orders:
            self._remember(order)
        if not orders:
            return
        try:
            link = self._client.link()
            if link.namespace == namespace:
                with self._kernels.behind_step(*streams):
                    for order in orders:
                        self._store_safely(link, self._stored[order.request])
        except LMCacheError as error:
            log.debug("lmcache: stores wait: %s", error)
        except Exception as error:  # noqa: BLE001 - the engine must answer its users whatever is wrong with the cache
            self._tell(error)

    def _store_safely(self, link: Link, stored: _Stored) -> None:
        """What is wrong with one request's pages says nothing about the next one's; a link that has ended does."""
        try:
            self._store_request(link, stored)
        except ServerUnavailable:
            raise
        except LMCacheError as error:
            log.debug("lmcache: a store waits: %s", error)
        except Exception as error:  # noqa: BLE001 - as above
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        """Once for each kind and place: a fault that comes with every step would fill the engine's log."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = (type(error), place.filename, place.lineno)
        # as text: a log record with the exception itself would keep its frames, and with them the arena, mapped
        text = "".join(traceback.format_exception(error))
        level = logging.DEBUG if kind in self._told else logging.ERROR
        log.log(level, "lmcache: a store failed; the engine goes on (said once)\n%s", text)
        self._told.add(kind)

    def forget(self, requests: Iterable[str]) -> None:
        """These requests have ended: their blocks are no longer theirs."""
        for request in requests:
            self._stored.pop(request, None)
            self._doubted.discard(request)

    def _certain(self, order: StoreOrder) -> bool:
        """Whether the KV is of the LoRA weights that its hashes say. Once it is not, the request is left alone."""
        # the forward pass is done: whatever the engine has read in order to compute this KV, it has read by now
        if order.evidence is not None and not order.evidence.holds():
            self._doubted.add(order.request)
        return order.request not in self._doubted

    def _remember(self, order: StoreOrder) -> None:
        stored = self._stored.get(order.request)
        if stored is None or order.first == 0:
            stored = self._stored[order.request] = _Stored(
                order.tenant, "", bytearray(), tuple([] for _ in order.blocks), {}, hints=order.hints
            )
        stored.fresh = order.first
        stored.hashes += order.hashes
        for ids, more in zip(stored.blocks, order.blocks, strict=True):
            ids.extend(more)

    def _store_request(self, link: Link, stored: _Stored) -> None:
        if stored.epoch != link.epoch:
            stored.epoch, stored.done = link.epoch, dict.fromkeys(self._geometry.cached_groups, 0)
        for group in self._order:
            if self._mine(stored, group):
                store = self._store_fresh if group in self._fleeting else self._store_all
                store(link, stored, group)

    def _mine(self, stored: _Stored, group: int) -> bool:
        # by prompt, not by chunk: a chain has one writer, so that no rank waits for another to store the chunk before
        turn = int.from_bytes(stored.hashes[:4], "little")
        return not self._turns or self._geometry.writes(group, self._rank, turn)

    def _store_all(self, link: Link, stored: _Stored, group: int) -> None:
        """All that is not stored yet: the blocks of such a group stay the request's until it ends."""
        first = stored.done[group]
        placed = self._offer(link, stored, group, range(first, stored.chunks))
        if first and not placed:
            # the chunk before is gone, or there is no room: only the former is helped by starting at the root
            stored.done[group] = self._offer(link, stored, group, range(stored.chunks))
        else:
            stored.done[group] = first + placed

    def _store_fresh(self, link: Link, stored: _Stored, group: int) -> None:
        """What this step has completed: the engine may give its blocks to others before the next one."""
        for run in self._held_runs(link, stored, group):
            self._offer(link, stored, group, run)

    def _held_runs(self, link: Link, stored: _Stored, group: int) -> Iterator[range]:
        """Runs of the fresh chunks whose blocks the engine still holds."""
        start = stored.fresh
        for chunk in range(stored.fresh, stored.chunks):
            if self._no_block in self._blocks(link, stored, group, chunk):
                if start < chunk:
                    yield range(start, chunk)
                start = chunk + 1
        if start < stored.chunks:
            yield range(start, stored.chunks)

    def _blocks(self, link: Link, stored: _Stored, group: int, chunk: int) -> list[int]:
        kept = kept_blocks(self._geometry.groups[group], link.chunk_size)
        return stored.blocks[group][chunk * kept : (chunk + 1) * kept]

    def _offer(self, link: Link, stored: _Stored, group: int, chunks: range) -> int:
        """Offer these chunks; returns how many of them, from the first on, were placed."""
        parent = (
            bytes(stored.hashes[(chunks.start - 1) * HASH_BYTES : chunks.start * HASH_BYTES]) if chunks.start else b""
        )
        hashes = bytes(stored.hashes[chunks.start * HASH_BYTES : chunks.stop * HASH_BYTES])
        shard = self._geometry.shard_of(group, self._rank)
        reserved = link.reserve(stored.tenant, parent, hashes, group, shard, stored.hints)
        if reserved.reservation:
            granted = [chunks.start + i for i, placed in enumerate(reserved.placed) if placed == Placed.GRANTED]
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
        cells = unpack_cells(packed)
        objects = (
            (cells[position * per_object : (position + 1) * per_object], self._held_blocks(link, stored, group, chunk))
            for position, chunk in enumerate(chunks)
        )
        with mapped_arena(link) as arena:
            store_objects(copier, arena, objects)

    def _held_blocks(self, link: Link, stored: _Stored, group: int, chunk: int) -> list[int]:
        ids = self._blocks(link, stored, group, chunk)
        if self._no_block in ids:
            raise GeometryError(
                f"the engine holds no block for some tokens of chunk {chunk} in KV group {group}",
                remedy="report it: this engine frees blocks of this group that lmcache thinks it keeps",
            )
        return ids


def _not_full(geometry: Geometry) -> frozenset[int]:
    return frozenset(number for number, group in enumerate(geometry.groups) if group.kind is not GroupKind.FULL)
