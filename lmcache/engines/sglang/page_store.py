"""What both doors do with pages: ask what can be restored, load, store. Imports neither SGLang nor torch.

Nothing here raises, and nothing waits longer than a request's deadline: whatever goes wrong, SGLang computes.
"""

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from lmcache.core.cells import unpack_cells
from lmcache.core.client import Client, Link
from lmcache.core.keys import HASH_BYTES
from lmcache.core.pending_hit import PendingHit
from lmcache.core.protocol import Found, Opened, Placed
from lmcache.engines.copying import (
    CopyPlans,
    Kernels,
    MakeCopier,
    NoKernels,
    ObjectCopier,
    load_objects,
    mapped_arena,
    store_objects,
)
from lmcache.engines.sglang.page_keys import Lineage
from lmcache.errors import LMCacheError, ServerUnavailable
from lmcache.geometry.groups import Geometry, GroupKind
from lmcache.geometry.layout import object_bytes, object_cells

log = logging.getLogger(__name__)

T = TypeVar("T")

_Copy = tuple[ObjectCopier, Sequence[int], Sequence[int], int]
"""Copier, cells of the object, block ids, and the kept position of the first of them."""

MOST_ENDS = 8
"""Lengths that a lookup tells of where not every length can be restored: SGLang's ranks agree on one of them."""

WASTEFUL = 0.5
"""Pages that fill less of their cells are warned of."""

MOST_PROMOTIONS = 64
"""Lookups that go on at the server after SGLang has stopped waiting for them."""


@attrs.frozen
class Pages:
    """Pages of one pool, one after another."""

    first: int
    """Number of the first one, among the pages that the call is about."""
    blocks: Sequence[int]
    """Which pages of the pool they are."""


class PageStore:
    """The pages of one rank. Any thread may call."""

    def __init__(
        self,
        client: Client,
        geometry: Geometry,
        rank: int,
        makers: Mapping[int, MakeCopier],
        kernels: Kernels | None = None,
        *,
        tenant: str = "",
        stream: Any = None,
    ) -> None:
        """`geometry.own_chunk` is SGLang's page; `makers` make the copiers of each group.

        `stream` is what SGLang submits forward passes to, where that is not the stream of whoever loads.
        """
        self._stream = stream
        self._client = client
        self._geometry = geometry
        self._rank = rank
        self._kernels = kernels or NoKernels()
        self._tenant = tenant
        self._page = geometry.own_chunk
        self._lineage = Lineage()
        # copiers may have buffers of their own, so those of each direction are one thread's at a time
        self._loads, self._stores = CopyPlans(geometry, makers), CopyPlans(geometry, makers)
        self._loading, self._storing = threading.Lock(), threading.Lock()
        self._promotions: list[tuple[Link, PendingHit]] = []
        self._full = all(group.kind is GroupKind.FULL for group in geometry.groups)
        self._told: set[str] = set()

    @property
    def linked(self) -> bool:
        """Whether a server is there."""
        return self._client.linked

    def close(self) -> None:
        """The engine ends."""
        self._client.close()

    # ------------------------------------------------------------------------------------------------------ looking up

    def restorable(self, hashes: bytes, *, patience: float | None = None, longest: bool = False) -> list[int]:
        """Lengths, in pages, of prefixes of these pages that every rank can restore, in ascending order.

        All of them where any length will do; else the longest ones, for trailing pools hold what some lengths need
        only. With `longest` it is one at most. `patience` is how long the server's tiers are waited for, in seconds:
        None for as long as the server itself does.
        """
        return self._safely(lambda: self._restorable(hashes, patience, longest=longest), "lookup") or []

    def _restorable(self, hashes: bytes, patience: float | None, *, longest: bool) -> list[int]:
        self._lineage.learn(hashes)
        link = self._link()
        ends: list[int] = []
        most = len(hashes) // HASH_BYTES
        while most and len(ends) < (1 if longest or self._full else MOST_ENDS):
            with self._found(link, hashes[: most * HASH_BYTES], patience) as found:
                most = found.tokens // self._page if found else 0
            if most:
                ends.insert(0, most)
                most -= 1
        if self._full and not longest and ends:
            return list(range(1, ends[0] + 1))
        return ends

    @contextlib.contextmanager
    def _found(self, link: Link, hashes: bytes, patience: float | None) -> Iterator[Found | None]:
        """The answer to a lookup, if it comes in time; its ticket ends with the block."""
        pending = link.lookup(self._tenant, hashes, len(hashes) // HASH_BYTES * self._page)
        found = pending.wait() if patience is None else self._await(link, pending, patience)
        try:
            yield found
        finally:
            if found is not None and found.ticket:
                link.drop(found.ticket)

    def _await(self, link: Link, pending: PendingHit, patience: float) -> Found | None:
        """The answer, unless it takes the tiers too long: they go on, so that a later request finds it in memory."""
        self._sweep()
        found = pending.wait_at_most(patience)
        if found is None and len(self._promotions) < MOST_PROMOTIONS:
            self._promotions.append((link, pending))
        return found

    def _sweep(self) -> None:
        """Drop the tickets of promotions that have ended meanwhile."""
        waiting, self._promotions = self._promotions, []
        for link, pending in waiting:
            with contextlib.suppress(LMCacheError):
                found = pending.poll()
                if found is None:
                    self._promotions.append((link, pending))
                elif found.ticket:
                    link.drop(found.ticket)

    # --------------------------------------------------------------------------------------------------------- loading

    def load(self, hashes: bytes, wanted: Mapping[int, Pages], *, whole: bool, patience: float | None = None) -> int:
        """Fill pages of each group in `wanted` with what is stored of `hashes`; returns how many of these it can be.

        With `whole` a prefix will not do: all of them, or 0. What has been copied counts only as far as the number
        that is returned; beyond it, pages hold anything. `patience` is as in `restorable`.
        """
        with self._loading:
            return self._safely(lambda: self._load(hashes, wanted, patience, whole=whole), "load") or 0

    def _load(self, hashes: bytes, wanted: Mapping[int, Pages], patience: float | None, *, whole: bool) -> int:
        link = self._link()
        pages = len(hashes) // HASH_BYTES
        with self._found(link, hashes, patience) as found:
            covered = found.tokens // self._page if found else 0
            if found is None or not covered or (whole and covered < pages):
                return 0
            opened = link.open(found.ticket)
            copies = [copy for group, to in wanted.items() for copy in self._copies(link, opened, group, to, covered)]
            if None in copies:
                return 0  # SGLang reads more of a pool than a hit of that length needs
            # what the engine did to these pages before they were freed comes first
            with self._kernels.behind_step(self._stream), mapped_arena(link) as arena:
                load_objects(arena, [copy for copy in copies if copy is not None])
            # the pages count only if the ticket held until the last byte was read
            return covered if link.confirm(found.ticket) else 0

    def _copies(self, link: Link, opened: Opened, group: int, to: Pages, covered: int) -> Iterator[_Copy | None]:
        """What to copy of one group; None for a page that the hit has nothing for."""
        copier, per_object = self._loads.of(link, group)
        cells = unpack_cells(opened.cells[group])
        for page, block in zip(range(to.first, covered), to.blocks, strict=False):
            start = (page - opened.first[group]) * per_object
            there = start >= 0 and start + per_object <= len(cells)
            yield (copier, cells[start : start + per_object], [block], 0) if there else None

    # --------------------------------------------------------------------------------------------------------- storing

    def store(self, group: int, hashes: bytes, blocks: Sequence[int], parent: bytes = b"") -> bool:
        """Store these pages of one group, and return when they are there; False: not all of them are.

        What is stored already is left alone. `parent` is the page before, if the caller knows it.
        """
        with self._storing:
            return self._safely(lambda: self._store(group, hashes, blocks, parent), "store") or False

    def _store(self, group: int, hashes: bytes, blocks: Sequence[int], parent: bytes) -> bool:
        self._lineage.learn(parent + hashes)
        link = self._link()
        parent = parent or self._lineage.before(hashes[:HASH_BYTES])
        shard = self._geometry.shard_of(group, self._rank)
        reserved = link.reserve(self._tenant, parent, hashes, group, shard)
        if parent and not reserved.placed:
            # the page before is not there: this one begins a chain of its own, and is found all the same
            reserved = link.reserve(self._tenant, b"", hashes, group, shard)
        if reserved.reservation:
            granted = [i for i, placed in enumerate(reserved.placed) if placed == Placed.GRANTED]
            try:
                self._copy_out(link, group, [blocks[i] for i in granted], reserved.cells)
            except BaseException:
                with contextlib.suppress(LMCacheError):
                    link.abort(reserved.reservation)
                raise
            link.commit(reserved.reservation)
        return len(reserved.placed) == len(blocks)

    def _copy_out(self, link: Link, group: int, blocks: Sequence[int], packed: bytes) -> None:
        copier, per_object = self._stores.of(link, group)
        cells = unpack_cells(packed)
        objects = ((cells[at * per_object : (at + 1) * per_object], [block]) for at, block in enumerate(blocks))
        with mapped_arena(link) as arena:
            store_objects(copier, arena, objects)

    # ---------------------------------------------------------------------------------------------------------- common

    def _link(self) -> Link:
        link = self._client.link()
        if link.chunk_size != self._page:
            raise ServerUnavailable(
                f"the server keeps chunks of {link.chunk_size} tokens for this engine, whose keys are those of pages "
                f"of {self._page}",
                remedy="install the same lmcache version on both sides",
            )
        self._warn_of_waste(link)
        return link

    def _warn_of_waste(self, link: Link) -> None:
        """Say once that most of the server's memory would stay empty: SGLang's pages are of one token by default."""
        if "waste" in self._told:
            return
        self._told.add("waste")
        sizes = (self._page, link.cell_bytes)
        used = sum(object_bytes(group, *sizes) for group in self._geometry.groups)
        taken = sum(object_cells(group, *sizes) for group in self._geometry.groups) * link.cell_bytes
        if used < WASTEFUL * taken:
            log.warning(
                "lmcache: a page of %d tokens fills %.0f %% of the server's cells of %d KiB; start SGLang with a larger"
                " --page-size, or the server with a smaller --l1-cell-kb",
                *(self._page, 100 * used / taken, link.cell_bytes >> 10),
            )

    def _safely(self, work: Callable[[], T], what: str) -> T | None:
        """The result, or None whatever goes wrong: an exception here would end SGLang's scheduler."""
        try:
            return work()
        except LMCacheError as error:
            if type(error).__name__ not in self._told:
                self._told.add(type(error).__name__)
                log.warning("lmcache: a %s did not work out; SGLang goes on without it: %s", what, error)
            log.debug("lmcache: a %s did not work out: %s", what, error)
        except Exception:  # noqa: BLE001 - the engine must answer its users whatever is wrong with the cache
            # as text: a log record with the exception itself would keep its frames, and with them the arena, mapped
            log.error("lmcache: a %s failed; SGLang goes on without it\n%s", what, traceback.format_exc())  # noqa: TRY400
        return None
