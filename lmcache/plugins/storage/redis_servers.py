"""The redis servers behind a tier: one, or those of a cluster; which of them has a key, and which are in trouble."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from lmcache.errors import TierError
from lmcache.plugins.storage.redis_wire import Address, Line, trouble

T = TypeVar("T")

LEFT_ALONE_S = (0.1, 5.0)
"""For so long a server that failed is not tried again: the first time, and at most. Each failure doubles it."""
REDIRECTIONS = 5
"""So often a call follows a cluster that moves slots while it is asked."""
MAP_REST_S = 1.0
"""A cluster is asked no more often than this for its map of slots."""

Say = Callable[[Line], T]
"""One exchange on a connection: sends, reads all of the replies to it, returns what they mean."""


class Server:
    """One redis server: its idle connections, and the memory of its failures. Thread-safe."""

    def __init__(self, address: Address, make: Callable[..., Any], connections: int) -> None:
        self.address = address
        self._make = make
        self._free = threading.BoundedSemaphore(connections)
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._closed = False
        self._failures = 0
        self._left_alone_until = 0.0
        self._reason = ""

    def talk(self, say: Say[T], deadline: float) -> T:
        """Hold one exchange on a connection of this server.

        Raises what the server replied as an error (redis-py's ResponseError), or TierError when it could not be asked;
        then at once, for a moment after it has failed.
        """
        from redis.exceptions import RedisError, ResponseError

        self._check_left_alone()
        if deadline <= time.monotonic():  # which is not the server's fault
            raise TierError(f"redis server {self.address} was to be asked when the deadline had passed")
        if not self._free.acquire(timeout=deadline - time.monotonic()):
            raise TierError(
                f"redis server {self.address}: all connections were in use", remedy="raise its option connections"
            )
        try:
            line: Line | None = None
            try:
                line = self._take(deadline)
                answer = say(line)
            except ResponseError:
                self._give_back(line)
                raise
            except (
                RedisError,
                OSError,
                ValueError,
            ) as error:  # ValueError: a reply that is no number where one belongs
                self._give_up(line)
                raise self._failed(error, line) from error
            except BaseException:
                self._give_up(line)
                raise
            self._give_back(line)
            return answer
        finally:
            self._free.release()

    def close(self) -> None:
        """Close idle connections now, and those in use as soon as they are not."""
        with self._lock:
            self._closed = True
        self._drop_idle()

    def _take(self, deadline: float) -> Line:
        while True:
            with self._lock:
                line = self._idle.pop() if self._idle else None
            if line is None:
                return Line(self.address, self._make, deadline)
            if line.usable():
                line.socket.deadline = deadline
                line.socket.heard = False
                return line
            line.close()

    def _give_back(self, line: Line | None) -> None:
        with self._lock:
            self._failures = 0
            if line is not None and not self._closed and not line.closed:
                self._idle.append(line)
                return
        self._give_up(line)

    def _give_up(self, line: Line | None) -> None:
        if line is not None:
            line.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def _check_left_alone(self) -> None:
        with self._lock:
            left = self._left_alone_until - time.monotonic()
            reason = self._reason
        if left > 0:
            raise TierError(f"redis server {self.address} is left alone for another {left:.1f} s: {reason}")

    def _failed(self, error: Exception, line: Line | None) -> TierError:
        """Note that the server is in trouble, unless it was talking when the time ran out; returns what to raise."""
        told = trouble(self.address, error)
        if not (_timed_out(error) and line is not None and line.socket.heard):
            with self._lock:
                shortest, longest = LEFT_ALONE_S
                pause = min(longest, shortest * 2 ** min(self._failures, 16)) * random.uniform(0.75, 1.0)  # noqa: S311
                self._failures += 1
                self._left_alone_until = time.monotonic() + pause
                self._reason = str(told)
            self._drop_idle()
        return told


class Servers:
    """All servers of a tier. Thread-safe. Opens no connection before it is asked something."""

    def __init__(self, seeds: Sequence[Address], make: Callable[..., Any], connections: int, cluster: bool) -> None:
        """`seeds`: the server, or those of a cluster that are asked for the others."""
        self._seeds = tuple(seeds)
        self._make = make
        self._connections = connections
        self._cluster = cluster
        self._lock = threading.Lock()
        self._known: dict[Address, Server] = {}
        self._slots: dict[int, Address] = {}
        self._map_stale = cluster
        self._map_asked = 0.0

    def run(self, key: bytes, say: Say[T], deadline: float) -> T:
        """Hold an exchange with the server that has `key`; TierError whenever it comes to nothing."""
        from redis.exceptions import AskError, MovedError, ResponseError, TryAgainError

        server, asking = self._of(key, deadline), False
        for _ in range(REDIRECTIONS):
            try:
                return server.talk(_asking(say) if asking else say, deadline)
            except AskError as error:
                if not self._cluster:
                    raise trouble(server.address, error) from error
                asking = not isinstance(error, MovedError)
                target = self._at(Address(error.host or server.address.host, error.port))
                if not asking:
                    self._note_moved(error.slot_id, target.address)
                server = target
            except TryAgainError:
                time.sleep(max(0.0, min(0.05, deadline - time.monotonic())))
            except ResponseError as error:
                raise trouble(server.address, error) from error
            except TierError:
                self._doubt_map()
                raise
        raise TierError(f"redis cluster sent a request for one key from server to server, last to {server.address}")

    def run_all(self, commands: Mapping[bytes, Sequence[bytes]], deadline: float) -> dict[bytes, Any]:
        """Send a command for each key, one round trip to each server; returns replies, or errors in their place.

        Where a server cannot be asked, the replies of its keys are the TierError; raised if no server could be.
        """
        from redis.exceptions import AskError, ResponseError, TryAgainError

        by_server: dict[Server, list[bytes]] = {}
        for key in commands:
            by_server.setdefault(self._of(key, deadline), []).append(key)
        replies: dict[bytes, Any] = {}
        failure: TierError | None = None
        for server, keys in by_server.items():
            try:
                answers = server.talk(partial(Line.ask_all, commands=[commands[key] for key in keys]), deadline)
                replies |= zip(keys, answers, strict=True)
            except ResponseError as error:
                failure = trouble(server.address, error)
                replies |= dict.fromkeys(keys, failure)
            except TierError as error:
                self._doubt_map()
                failure = error
                replies |= dict.fromkeys(keys, failure)
        if failure and all(isinstance(reply, TierError) for reply in replies.values()):
            raise failure
        for key, reply in replies.items():
            if isinstance(reply, AskError | TryAgainError):
                replies[key] = self.run(key, partial(Line.ask, words=commands[key]), deadline)
        return replies

    def all(self, deadline: float) -> "list[Server]":
        """Every server that has keys of its own."""
        if not self._cluster:
            return [self._at(self._seeds[0])]
        self._refresh_map(deadline)
        with self._lock:
            addresses = set(self._slots.values())
        return [self._at(address) for address in addresses]

    def close(self) -> None:
        """Close all connections; those in use as soon as they are not."""
        with self._lock:
            servers = list(self._known.values())
        for server in servers:
            server.close()

    def _at(self, address: Address) -> Server:
        with self._lock:
            if address not in self._known:
                self._known[address] = Server(address, self._make, self._connections)
            return self._known[address]

    def _of(self, key: bytes, deadline: float) -> Server:
        if not self._cluster:
            return self._at(self._seeds[0])
        from redis.crc import key_slot

        self._refresh_map(deadline)
        slot = key_slot(key)
        with self._lock:
            address = self._slots.get(slot)
        if address is None:
            raise TierError(f"no server of the redis cluster at {self._seeds[0]} has slot {slot}")
        return self._at(address)

    def _note_moved(self, slot: int, address: Address) -> None:
        with self._lock:
            self._slots[slot] = address
            self._map_stale = True

    def _doubt_map(self) -> None:
        with self._lock:
            self._map_stale = self._cluster

    def _refresh_map(self, deadline: float) -> None:
        """Ask for the map of slots if there is reason to; TierError if there is none and nobody can tell."""
        with self._lock:
            resting = bool(self._slots) and time.monotonic() < self._map_asked + MAP_REST_S
            if not self._map_stale or resting:
                return
            self._map_asked = time.monotonic()
            asked = dict.fromkeys((*self._seeds, *self._known))
        failure: TierError | None = None
        for address in asked:
            try:
                slots = _slots(self._at(address), deadline)
            except TierError as error:
                failure = error
                continue
            with self._lock:
                self._slots, self._map_stale = slots, False
            return
        with self._lock:
            if not self._slots and failure:
                raise failure


def _timed_out(error: Exception) -> bool:
    from redis import exceptions

    return isinstance(error, TimeoutError | exceptions.TimeoutError)


def _asking(say: Say[T]) -> Say[T]:
    def ask_first(line: Line) -> T:
        line.ask(("ASKING",))
        return say(line)

    return ask_first


def _slots(server: Server, deadline: float) -> dict[int, Address]:
    """The map of slots as `server` sees it; TierError if it cannot tell."""
    from redis.exceptions import ResponseError

    try:
        ranges = server.talk(partial(Line.ask, words=("CLUSTER", "SLOTS")), deadline)
    except ResponseError as error:
        raise TierError(
            f"redis server {server.address} is part of no cluster: {error}", remedy="leave cluster=on out of --l2"
        ) from error
    slots: dict[int, Address] = {}
    for first, last, (host, port, *_), *_ in ranges:
        address = Address(host.decode() if host else server.address.host, port)
        slots |= dict.fromkeys(range(first, last + 1), address)
    return slots
