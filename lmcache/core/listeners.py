"""What a server listens on: a ZeroMQ router on TCP and a Unix stream socket. Opened before anything is served."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from lmcache.core.keys import HASH_BYTES
from lmcache.core.protocol import MAX_CHUNKS
from lmcache.errors import ConfigError

if TYPE_CHECKING:
    from lmcache.core.curve import ServerKeys

MAX_TCP_MESSAGE = MAX_CHUNKS * HASH_BYTES + (1 << 12)
"""Bytes: nothing longer is said on TCP than the hashes of a prompt that is to be pinned."""

TCP_BACKLOG = 16
"""Messages kept for one TCP peer, in either direction."""


@contextlib.contextmanager
def bind_router(host: str, port: int, keys: "ServerKeys | None" = None) -> Iterator[tuple["zmq.Socket[bytes]", int]]:
    """The TCP side, and its port. Raises ConfigError when the port is taken."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_TCP_MESSAGE)
        router.setsockopt(zmq.RCVHWM, TCP_BACKLOG)
        router.setsockopt(zmq.SNDHWM, TCP_BACKLOG)
        if keys is not None:
            from lmcache.core.curve import lock_server

            lock_server(router, keys)
        yield router, bind_tcp(router, host, port, "--port")


def bind_tcp(sock: "zmq.Socket[bytes]", host: str, port: int, option: str) -> int:
    """Listen on a port, 0 for any free one, and return it. Raises ConfigError, naming the port's `option`."""
    sock.setsockopt(zmq.IPV6, ":" in host)
    try:
        sock.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
    except zmq.ZMQError as error:
        raise cannot_listen(host, port, error.errno or 0, option) from error
    return int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def cannot_listen(host: str, port: int, number: int, port_option: str, host_option: str = "--host") -> ConfigError:
    """What to raise when the system refuses an address with error `number`; the options say where to name another."""
    remedy = _INSTEAD.get(number, "stop what uses the port, or choose another with {port_option}")
    return ConfigError(
        f"cannot listen on {host}:{port}: {_why_not(host, number)}",
        remedy=remedy.format(port_option=port_option, host_option=host_option),
    )


_OF_THIS_HOST = "give {host_option} one that `ip address` lists, or 0.0.0.0 for all of them"
_INSTEAD = {
    errno.EADDRNOTAVAIL: _OF_THIS_HOST,
    errno.ENODEV: _OF_THIS_HOST,
    errno.EACCES: "choose one from 1024 on with {port_option}",
}
"""Remedies for what is no matter of a port that is taken."""


def _why_not(host: str, number: int) -> str:
    match number:
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this host"
        case errno.ENODEV:  # what ZeroMQ makes of it
            return f"this host knows no {host}"
        case _:
            return zmq.strerror(number)


@contextlib.contextmanager
def listen(folder: str | None, port: int, epoch: str) -> Iterator[tuple[socket.socket, str]]:
    """The Unix socket: abstract, or a file under a lock that tells a dead server's leavings from a live one's."""
    with contextlib.ExitStack() as opened, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        if folder is None:
            address = f"@lmcache-{epoch}"
            listener.bind("\0" + address[1:])
        else:
            address = str(opened.enter_context(_socket_file(Path(folder), port)))
            try:
                listener.bind(address)
            except OSError as error:  # a path of more than 107 bytes, for one
                raise ConfigError(f"--socket-dir {folder}: {error}", remedy="give another, shorter one") from error
        listener.listen(128)
        listener.setblocking(False)
        yield listener, address


@contextlib.contextmanager
def _socket_file(folder: Path, port: int) -> Iterator[Path]:
    with _locked(folder, folder / f"lmcache-{port}.lock"):
        path = folder.absolute() / f"lmcache-{port}.sock"
        try:
            path.unlink(missing_ok=True)  # a killed server's: the lock proves that nobody listens there
        except OSError as error:
            raise ConfigError(
                f"--socket-dir {folder}: {path} cannot be removed: {error.strerror}", remedy="remove it"
            ) from error
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path, path: Path) -> Iterator[None]:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"--socket-dir {folder}: {error.strerror}", remedy="give a folder that can be written"
        ) from error
    with contextlib.closing(os.fdopen(lock, "rb")):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a server that ended just now may have taken the file away under our hands
            current = path.stat().st_ino == os.fstat(lock).st_ino
        except OSError:
            current = False
        if not current:
            raise ConfigError(f"--socket-dir {folder} is in use by another server", remedy="give another folder")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
