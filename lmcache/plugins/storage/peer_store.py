"""Chunks on another server, over its bulk channel. Blocks; tiering's threads call it, several at once."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache.core.blob import BlobIdentity, BlobStore, Loaded
from lmcache.core.cells import unpack_cells
from lmcache.core.control import Control, ServerAddress
from lmcache.core.keys import namespace_digest
from lmcache.core.link import Engine
from lmcache.core.protocol import PROTOCOL, Placed, Role, Welcome
from lmcache.core.remote_link import RemoteLink
from lmcache.errors import ConfigError, LMCacheError, ProtocolError, TierError, VersionMismatch

if TYPE_CHECKING:
    from lmcache.plugins.storage.peer import PeerTier

log = logging.getLogger("lmcache.server")

NAMESPACES = 64
"""Namespaces with a conversation of their own."""

GREETING_SECONDS = 2.0
"""How long a server that starts waits for an answer before it says that there is none."""

ASK_AGAIN_SECONDS = 30.0
"""A namespace that the other server cannot have is left alone for so long."""


class PeerStore(BlobStore):
    """One other server. What goes wrong on the way is a TierError or another OSError; what it lacks is absent."""

    in_order = True

    def __init__(self, tier: "PeerTier") -> None:
        super().__init__(tier)
        self._peer = tier
        self._links: dict[bytes, RemoteLink] = {}
        self._foreign_until: dict[bytes, float] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._patience = 0.1
        """Seconds that a call has, as far as is known."""
        self._home = ""
        """Epoch of the server whose tier this is."""
        self._greeting: threading.Thread | None = None

    def begin(self, epoch: str) -> None:
        """See whether anybody is there, in a thread, and say it once if not: else only the first miss would."""
        self._home = epoch
        self._greeting = threading.Thread(target=self._greet, name="lmcache-peer", daemon=True)
        self._greeting.start()

    def _greet(self) -> None:
        try:
            welcome = self._hello(GREETING_SECONDS)
        except (LMCacheError, OSError) as error:
            log.warning("the tier peer://%s: %s; misses until it works", self._peer.address, error)
        else:
            log.info("the tier peer://%s is there, epoch %s", self._peer.address, welcome.epoch)

    def contains(self, identities: Sequence[BlobIdentity], deadline: float) -> list[bool]:
        """For each, whether the other server has it in L1."""
        link = self._link(identities[0], deadline) if identities else None
        if link is None:
            return [False] * len(identities)
        there: dict[BlobIdentity, bool] = {}
        for group, shard in {(each.group, each.shard) for each in identities}:
            asked = [each for each in identities if (each.group, each.shard) == (group, shard)]
            answer = link.peek(b"".join(each.chain_hash for each in asked), group, shard)
            if len(answer) != len(asked):
                raise self._lies(link, f"{len(answer)} answers to {len(asked)} questions")
            there.update((each, bool(one)) for each, one in zip(asked, answer, strict=True))
        return [there[each] for each in identities]

    def load(self, identity: BlobIdentity, into: Sequence[memoryview], deadline: float) -> Loaded:
        """Fill `into` from its first byte to the object's last; the network's checksums have been verified."""
        link = self._link(identity, deadline)
        taken = link.take(identity.chain_hash, identity.group, identity.shard) if link else None
        if link is None or taken is None:
            return Loaded.ABSENT
        with link.copying() as mirror:
            views = self._views(link, mirror, identity, taken.cells)
            try:
                _copy(views, into)
            finally:
                _release(views)
        return Loaded.LOADED if link.confirm(taken.ticket) else Loaded.ABSENT

    def store(self, identity: BlobIdentity, payload: Sequence[memoryview], deadline: float) -> int | None:
        """Have the other server keep it; returns the bytes sent, None where it has no use or no room for it.

        That depends on the chunk before: a server keeps whole chains.
        """
        link = self._link(identity, deadline)
        if link is None:
            return None
        done = link.reserve(identity.tenant, identity.parent, identity.chain_hash, identity.group, identity.shard)
        if done.placed == bytes([Placed.PRESENT]):
            return 0
        if done.placed != bytes([Placed.GRANTED]):
            return None
        with link.copying() as mirror:
            views = self._views(link, mirror, identity, done.cells)
            length = sum(map(len, views))
            try:
                _copy(payload, views)
            finally:
                _release(views)
        link.publish(done.reservation)
        return length

    def delete(self, identities: Sequence[BlobIdentity], deadline: float) -> None:
        """Nothing: what the other server keeps is its own."""

    def close(self) -> None:
        """End all conversations."""
        self._closed = True  # first: whoever has the lock may wait for the other server for long
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()
        if self._greeting is not None:
            self._greeting.join()

    # ------------------------------------------------------------------------------------------------- conversations

    def _link(self, identity: BlobIdentity, deadline: float) -> RemoteLink | None:
        """The conversation about a namespace; None where the other server can have nothing of it."""
        left = deadline - time.monotonic()
        if not self._lock.acquire(timeout=max(0.0, left)):
            raise TierError(f"{self._peer.address} has not answered another call that began before")
        try:
            # a conversation outlives the call that begins it, which may be one that has waited long
            self._patience = max(self._patience, left)
            link = self._links.get(identity.namespace)
            if link is not None and link.alive:
                return link
            if time.monotonic() < self._foreign_until.get(identity.namespace, 0.0):
                return None
            if self._closed:
                raise TierError(f"{self._peer.address} is closed")
            self._links.pop(identity.namespace, None)
            link = self._register(identity, self._patience)
            if link is None:
                self._foreign_until[identity.namespace] = time.monotonic() + ASK_AGAIN_SECONDS
                return None
            if len(self._links) >= NAMESPACES:
                self._links.pop(next(iter(self._links))).close()
            self._links[identity.namespace] = link
            return link
        finally:
            self._lock.release()

    def _register(self, identity: BlobIdentity, patience: float) -> RemoteLink | None:
        if identity.geometry is None:
            raise TierError(
                f"{self._peer.address} is another lmcache server, which keeps chunks of engines and nothing else"
            )
        facts = {name: value for name, value in identity.facts.items() if name != "cell_bytes"}
        address, keys = self._peer.address, self._peer.client_keys
        where = ServerAddress(address.host, self._hello(patience).bulk_port)
        engine = Engine(facts, identity.geometry, Role.PEER)
        try:
            link = RemoteLink.register_at(where, keys, engine, patience)
        except ProtocolError as error:  # a chunk size that is not ours, or L1 that is too small for a chunk
            log.warning("the tier peer://%s can have nothing of %s: %s", address, facts.get("model", "?"), error)
            return None
        if link.epoch == self._home:
            link.close()
            raise self._is_this_server()
        if link.namespace == namespace_digest(facts) and str(link.cell_bytes) == identity.facts["cell_bytes"]:
            return link
        link.close()
        log.warning(
            "the tier peer://%s has nothing of %s: a chunk has %d tokens there and a cell %d bytes, here %d and %s",
            *(address, facts.get("model", "?"), link.chunk_size, link.cell_bytes),
            *(identity.chunk_size, identity.facts["cell_bytes"]),
        )
        return None

    def _hello(self, patience: float) -> Welcome:
        """Who answers there. Raises ConfigError where that is no other server, or has no bulk channel."""
        address = self._peer.address
        with Control(address, patience, self._peer.client_keys) as control:
            welcome = control.hello()
        if welcome.epoch == self._home:
            raise self._is_this_server()
        if welcome.protocol != PROTOCOL:
            raise VersionMismatch(
                f"the server at {address} (lmcache {welcome.version}) speaks protocol {welcome.protocol}, this one "
                f"{PROTOCOL}",
                remedy="install the same version of lmcache on both hosts",
            )
        if not welcome.bulk_port:
            raise ConfigError(
                f"the server at {address} has no bulk channel", remedy="start it with --keys, --insecure or --bulk-port"
            )
        return welcome

    def _is_this_server(self) -> ConfigError:
        return ConfigError(
            f"{self._peer.address} is this server itself", remedy="name another one, or leave the tier out"
        )

    def _views(self, link: RemoteLink, mirror: memoryview, identity: BlobIdentity, packed: bytes) -> list[memoryview]:
        """The bytes of one object in the mirror."""
        length, size = link.object_bytes(identity.group), link.cell_bytes
        cells = unpack_cells(packed)
        if len(cells) != -(-length // size):
            raise self._lies(link, f"{len(cells)} cells for {length} bytes")
        return [
            mirror[cell * size : cell * size + min(size, length - number * size)] for number, cell in enumerate(cells)
        ]

    def _lies(self, link: RemoteLink, what: str) -> TierError:
        link.close()
        return TierError(f"the server at {self._peer.address} gave {what}")


def _copy(source: Sequence[memoryview], target: Sequence[memoryview]) -> None:
    """From the first byte on, as far as both reach."""
    at, done, place, filled = 0, 0, 0, 0
    while at < len(source) and place < len(target):
        length = min(len(source[at]) - done, len(target[place]) - filled)
        target[place][filled : filled + length] = source[at][done : done + length]
        done, filled = done + length, filled + length
        if done == len(source[at]):
            at, done = at + 1, 0
        if filled == len(target[place]):
            place, filled = place + 1, 0


def _release(views: Sequence[memoryview]) -> None:
    """So that the mirror can be unmapped at once."""
    for view in views:
        view.release()
