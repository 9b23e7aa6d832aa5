"""What tests of tiering share: an engine's two halves in a few words, whose bytes tell whose they are."""

import hashlib
from collections.abc import Sequence

from core_stand import SETTINGS, wait_until

from lmcache.core.cells import unpack_cells
from lmcache.core.client import Client, Engine, Link, ServerAddress
from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.keys import HASH_BYTES
from lmcache.core.protocol import Placed, Role
from lmcache.geometry.groups import Geometry


class TinyEngine:
    """A scheduler and one worker a rank. Every byte of an object is a function of what the object is."""

    def __init__(self, address: ServerAddress, geometry: Geometry, model: str = "m") -> None:
        self.geometry = geometry
        facts = {"model": model}
        self._scheduler = Client(address, Engine(facts, geometry, Role.SCHEDULER), SETTINGS)
        self._workers = [
            Client(address, Engine(facts, geometry, Role.WORKER, rank), SETTINGS) for rank in range(geometry.ranks)
        ]
        for client in (self._scheduler, *self._workers):
            client.start(wait=10.0)
        self.model = model
        self.patient = True
        """Whether to wait for a server where there is none."""

    def link(self) -> Link:
        return wait_until(self._try_link)

    def _try_link(self) -> Link | None:
        try:
            return self._scheduler.link()
        except ConnectionError:
            if not self.patient:
                raise
            return None

    def worker(self, rank: int) -> Link:
        return self._workers[rank].link()

    def pattern(self, chain_hash: bytes, group: int, shard: int, length: int) -> bytes:
        seed = hashlib.sha256(f"{self.model} {chain_hash.hex()} {group} {shard}".encode()).digest()
        return (seed * (length // len(seed) + 1))[:length]

    def store(self, hashes: Sequence[bytes], tenant: str = "", hints: Hints = NO_HINTS) -> int:
        """Every rank stores what it can of the prompt. Returns how many chunks were placed in every group."""
        placed = len(hashes)
        for rank in range(self.geometry.ranks):
            link = self.worker(rank)
            for group in self.geometry.cached_groups:
                shard = self.geometry.shard_of(group, rank)
                reserved = link.reserve(tenant, b"", b"".join(hashes), group, shard, hints)
                placed = min(placed, len(reserved.placed))
                granted = [h for h, p in zip(hashes, reserved.placed, strict=False) if p == Placed.GRANTED]
                self._write(link, granted, group, shard, unpack_cells(reserved.cells))
                if reserved.reservation:
                    link.commit(reserved.reservation)
        return placed

    def _write(self, link: Link, hashes: Sequence[bytes], group: int, shard: int, cells: Sequence[int]) -> None:
        per_object = len(cells) // max(1, len(hashes))
        size = link.cell_bytes
        with link.copying() as memory:
            for number, chain_hash in enumerate(hashes):
                data = self.pattern(chain_hash, group, shard, per_object * size)
                for place, cell in enumerate(cells[number * per_object : (number + 1) * per_object]):
                    memory[cell * size : (cell + 1) * size] = data[place * size : (place + 1) * size]

    def hit(self, hashes: Sequence[bytes], hints: Hints = NO_HINTS) -> int:
        """Chunks that a lookup hits; every byte that every rank is told to load is checked."""
        link = self.link()
        found = link.lookup("", b"".join(hashes), len(hashes) * link.chunk_size, hints).wait()
        if not found.tokens:
            return 0
        for rank in range(self.geometry.ranks):
            self._check(self.worker(rank), found.ticket, rank, hashes)
        return found.tokens // link.chunk_size

    def _check(self, link: Link, ticket: int, rank: int, hashes: Sequence[bytes]) -> None:
        opened = link.open(ticket)
        size = link.cell_bytes
        with link.copying() as memory:
            for group, packed in enumerate(opened.cells):
                cells = unpack_cells(packed)
                used = self._used(link, group)
                per_object = -(-used // size) if used else 0
                for number in range(len(cells) // per_object if per_object else 0):
                    chain_hash = hashes[opened.first[group] + number]
                    own = cells[number * per_object : (number + 1) * per_object]
                    found = b"".join(bytes(memory[cell * size : (cell + 1) * size]) for cell in own)[:used]
                    shard = self.geometry.shard_of(group, rank)
                    assert found == self.pattern(chain_hash, group, shard, used), f"foreign bytes in {chain_hash!r}"
        assert link.confirm(ticket)

    def _used(self, link: Link, group: int) -> int:
        from lmcache.geometry.layout import object_bytes

        found = self.geometry.groups[group]
        return object_bytes(found, link.chunk_size, link.cell_bytes) if found.cached else 0

    def close(self) -> None:
        for client in (self._scheduler, *self._workers):
            client.close()


def joined(hashes: Sequence[bytes]) -> bytes:
    assert all(len(each) == HASH_BYTES for each in hashes)
    return b"".join(hashes)
