"""The client of an engine process: keeps one link to the server, for ever, and never makes the engine wait for it.

`link()` is the circuit breaker: it gives the link that works, or raises at once. A thread of the client's own connects,
registers, watches for the server's end and starts again, with growing pauses. The engine goes on without the cache
meanwhile.
"""

import contextlib
import logging
import random
import select
import socket
import threading
from collections.abc import Callable

import attrs

from lmcache.core.control import Control, ServerAddress, client_keys
from lmcache.core.link import Engine, Link, Pending
from lmcache.core.protocol import ErrorCode
from lmcache.errors import LinkLost, LMCacheError, ProtocolError, Refused, ServerUnavailable

__all__ = ["Client", "ClientSettings", "Engine", "Link", "Pending", "ServerAddress"]

log = logging.getLogger("lmcache.client")

_LOOK_MILLISECONDS = 200
_STOPPED = select.POLLHUP | select.POLLERR | select.POLLRDHUP | select.POLLNVAL


@attrs.frozen
class ClientSettings:
    """How patient a client is; seconds."""

    deadline: float = 1.0
    """For one request. A request that takes longer costs the link."""
    retry_min: float = 0.05
    """Pause after the first failed attempt to register; it doubles from one to the next."""
    retry_max: float = 2.0
    """Longest pause."""
    keys: str = ""
    """File or folder of the keys that the server wants; empty for what LMCACHE_KEYS names, or none."""


class Client:
    """One per engine process and role. All methods may be called from any thread."""

    def __init__(
        self,
        address: ServerAddress,
        engine: Engine,
        settings: ClientSettings = ClientSettings(),
        on_refused: Callable[[ProtocolError], None] | None = None,
    ) -> None:
        """Raises ConfigError for keys that cannot be read, and nothing else."""
        self.address = address
        self.engine = engine
        self.settings = settings
        self.refusal: ProtocolError | None = None
        """Why the newest server refused this engine; None while it does not."""
        self._keys = client_keys(settings.keys)
        self._on_refused = on_refused
        self._link: Link | None = None
        self._why: LMCacheError = ServerUnavailable(f"not connected to {address} yet")
        self._first_attempt = threading.Event()
        self._closing = threading.Event()
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._keep, name="lmcache-client", daemon=True)

    def start(self, wait: float = 0.0) -> None:
        """Begin to connect; returns when the first attempt has ended or after `wait` seconds. Raises nothing."""
        self._thread.start()
        self._first_attempt.wait(wait)

    def link(self) -> Link:
        """The link that works. Raises ServerUnavailable, at once, while there is none."""
        link = self._link
        if link is None or not link.alive:
            raise ServerUnavailable(f"there is no link to a server: {self._why}")
        return link

    @property
    def linked(self) -> bool:
        """Whether `link` would return one now."""
        link = self._link
        return link is not None and link.alive

    def close(self) -> None:
        """End the link and the thread. Idempotent."""
        link = self._link
        if link is not None and not self._closing.is_set():
            link.drain(self.settings.deadline)
        self._closing.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is self._thread:
            return  # from `on_refused`: the thread ends when that returns
        if self._thread.is_alive():
            self._thread.join()
        self._waker.close()
        self._woken.close()

    # ----------------------------------------------------------------------------------- the thread that keeps the link

    def _keep(self) -> None:
        pause = self.settings.retry_min
        while not self._closing.is_set():
            link = self._attempt()
            self._first_attempt.set()
            if link is not None:
                pause = self.settings.retry_min
                self._watch_safely(link)
            # engines of one host must not all come back in the same instant
            elif not self._closing.wait(pause * random.uniform(0.5, 1.0)):  # noqa: S311
                pause = min(pause * 2, self.settings.retry_max)

    def _attempt(self) -> Link | None:
        try:
            link = self._register()
        except ServerUnavailable as error:
            self._failed(error)
        except ProtocolError as error:
            self._failed(error)
            self._refused(error)
        except Exception as error:  # whatever it is, this thread goes on: nobody else would ever connect again
            log.exception("connecting to %s failed", self.address)
            self._failed(ServerUnavailable(f"{type(error).__name__}: {error}"))
        else:
            self.refusal = None
            self._link = link
            log.info("registered at %s, epoch %s, chunk size %d", self.address, link.epoch, link.chunk_size)
            return link
        return None

    def _register(self) -> Link:
        keys = self._keys
        with Control(self.address, self.settings.deadline, keys) as control:
            welcome = control.hello()
        if not welcome.bulk_port:
            return Link.register(welcome.socket, self.engine, self.settings.deadline)
        try:
            link = Link.register(welcome.socket, self.engine, self.settings.deadline)
        except LinkLost as error:
            log.debug("going over the bulk channel: %s", error)
        else:
            if link.epoch == welcome.epoch:
                return link
            link.close()  # a path of that name leads to another server on this host
        from lmcache.core.remote_link import RemoteLink

        where = ServerAddress(self.address.host, welcome.bulk_port)
        return RemoteLink.register_at(where, keys, self.engine, self.settings.deadline)

    def _failed(self, error: LMCacheError) -> None:
        if str(error) != str(self._why):  # one line a cause, not one an attempt
            absent = isinstance(error, ServerUnavailable)
            why = "until it is there" if absent else "for the server refuses this engine"
            log.warning("lmcache (%s) is not used %s: %s", self.engine.role.value, why, error)
        self._why = error

    def _refused(self, error: ProtocolError) -> None:
        if isinstance(error, Refused) and error.code == ErrorCode.STOPPING:
            return
        if self.refusal is None or str(self.refusal) != str(error):
            self.refusal = error
            try:
                if self._on_refused:
                    self._on_refused(error)
            except Exception:
                log.exception("telling that the server refused this engine failed")

    def _watch_safely(self, link: Link) -> None:
        try:
            self._watch(link)
        except Exception:  # as above
            log.exception("watching the link to %s failed", self.address)
            link.close()

    def _watch(self, link: Link) -> None:
        """Return when the link has ended: by end of file, by somebody giving it up, or because the client closes."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        with contextlib.suppress(ValueError):  # it has ended already: its descriptor is closed
            poll.register(link.fileno(), select.POLLRDHUP)
        while link.alive and not self._closing.is_set():
            # a link given up by another thread closes its descriptor, which this wait does not see: look now and then
            for descriptor, events in poll.poll(_LOOK_MILLISECONDS):
                if descriptor == self._woken.fileno():
                    self._woken.recv(64)  # a forked child may write, too, and must not keep this thread awake
                elif events & _STOPPED:
                    link.close()
            link.tend()
        link.close()
        self._link = None
        if not self._closing.is_set():
            self._why = ServerUnavailable(f"the link has ended: {link.why}")
            log.warning(
                "the link to the lmcache server at %s has ended (%s); registering again", self.address, link.why
            )
            self._closing.wait(self.settings.retry_min)
