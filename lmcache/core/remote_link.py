"""A link to a server on another host: to engines the same as any other, with a mirror where the arena would be.

What is stored leaves the engine's step at once: `commit` does not wait until the bytes have travelled. So that they do
not pile up, nothing more is reserved while too many wait. What is loaded is fetched by `open`, before it returns.
"""

import time
from typing import TYPE_CHECKING

from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.keys import HASH_BYTES
from lmcache.core.link import Engine, Link
from lmcache.core.protocol import Commit, Done, Opened, Peek, Peeked, Registered, Reserved, Role, Take, Taken
from lmcache.errors import LinkLost

if TYPE_CHECKING:
    from lmcache.core.control import ServerAddress
    from lmcache.core.curve import ClientKeys

SENDING_BYTES = 256 << 20
"""Granted to a worker and still to be sent, at most: beyond it nothing is reserved, and chunks are offered again."""

_LOOK_SECONDS = 0.1


class RemoteLink(Link):
    """Talks to the server over the bulk channel."""

    def __init__(self, address: "ServerAddress", keys: "ClientKeys | None", deadline: float) -> None:
        """Connect, and do not register yet. Raises ServerUnavailable."""
        from lmcache.core.carrier import Carrier

        self._carrier = Carrier(address, keys, deadline)
        self._deadline = deadline
        super().__init__(self._carrier.link_end, deadline)

    @classmethod
    def register_at(
        cls, address: "ServerAddress", keys: "ClientKeys | None", engine: Engine, deadline: float
    ) -> "RemoteLink":
        """Connect to a server's bulk port and register.

        Raises LinkLost, DeadlineExceeded, ServerUnavailable, Refused, VersionMismatch.
        """
        link = cls(address, keys, deadline)
        link._register_or_close(engine)
        return link

    def _take_arena(self, engine: Engine, _: Registered) -> None:
        if engine.role is not Role.SCHEDULER:
            self._arena = self._carrier.mirror

    def reserve(
        self, tenant: str, parent: bytes, hashes: bytes, group: int, shard: int, hints: Hints = NO_HINTS
    ) -> Reserved:
        """As on the server's host; of fewer chunks, or none, while what was reserved before is still being sent."""
        room = SENDING_BYTES - self._carrier.unsent_bytes
        each = self._carrier.object_bytes(group)
        # an object may be larger than all that: one alone must pass
        chunks = max(room // each, 0 if self._carrier.unsent_bytes else 1) if each else 0
        if not chunks:
            return Reserved(0, 0, b"", b"", 0)
        return super().reserve(tenant, parent, hashes[: chunks * HASH_BYTES], group, shard, hints)

    def commit(self, reservation: int) -> None:
        """Send the cells of the reservation and publish them; does not wait. Worker."""
        self._send(Commit(next(self._ids), reservation), Done)

    def open(self, ticket: int) -> Opened:
        """Fetch this rank's part of a hit, and say where it lies. Worker."""
        opened = super().open(ticket)
        self._fetch(ticket, opened.id)
        return opened

    def _fetch(self, ticket: int, opening: int) -> None:
        started = time.monotonic()
        fetch = self._carrier.fetch(ticket, opening)
        while not fetch.done.wait(_LOOK_SECONDS):
            if time.monotonic() > max(started, self._carrier.moved) + self._deadline:
                raise self._channel.late()
        if fetch.failure:
            if isinstance(fetch.failure, LinkLost):
                raise self._channel.broken(fetch.failure)
            raise fetch.failure

    # ------------------------------------------------------------------------------------------------- between servers

    def peek(self, hashes: bytes, group: int, shard: int) -> bytes:
        """For each chunk, 1 where the server has this shard in L1."""
        return self._call(Peek(next(self._ids), hashes, group, shard), Peeked).there

    def take(self, chain_hash: bytes, group: int, shard: int) -> Taken | None:
        """Fetch one shard of one chunk; None where it is not there. To be confirmed."""
        taken = self._call(Take(next(self._ids), chain_hash, group, shard), Taken)
        if not taken.ticket:
            return None
        self._fetch(taken.ticket, taken.id)
        return taken

    def object_bytes(self, group: int) -> int:
        """Bytes of one shard's object of a group, as far as they travel."""
        return self._carrier.object_bytes(group)

    def publish(self, reservation: int) -> None:
        """Commit, and wait until the server has it all."""
        self._call(Commit(next(self._ids), reservation), Done)

    def drain(self, timeout: float) -> None:
        """Return when what was committed has been sent, or after `timeout` s."""
        until = time.monotonic() + timeout
        while self.alive and self._carrier.unsent_bytes and time.monotonic() < until:
            time.sleep(0.005)

    def _release_arena(self) -> None:
        self._carrier.stop()  # it writes to the mirror
        super()._release_arena()
        if self._arena is None and self._carrier.mirror is not None:
            self._carrier.mirror.close()

    def forget(self) -> None:
        """In a forked child: let go of what is the parent's, without a word to the server."""
        self._carrier.forget()
        super().forget()
