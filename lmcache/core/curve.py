"""Keys of CURVE, which authenticate and encrypt what is said on TCP: files that hold them, sockets that use them.

A folder of `lmcache keys new` has two files. `server.key` holds the server's pair and the public keys of the clients
that it lets in; `client.key` the server's public key and the pair of a client. So whoever holds a client's file can use
the cache, and cannot pose as the server. Both are secret, and their values are never printed.

    # a comment
    role = client
    server = <40 characters>      the server's public key
    public = <40 characters>
    secret = <40 characters>

In a server's file `client = …` may stand several times: one line a client that is let in.
"""

import logging
import os
from pathlib import Path

import attrs
import zmq

from lmcache.errors import ConfigError

log = logging.getLogger("lmcache.server")

VARIABLE = "LMCACHE_KEYS"
"""The environment variable that names a client's file, or its folder, where nothing else does."""

SERVER_FILE = "server.key"
CLIENT_FILE = "client.key"

DOMAIN = b"lmcache"
"""ZeroMQ asks nobody about peers of sockets without one."""

_KEY_CHARACTERS = 40  # Z85 of 32 bytes
_LONGEST_FILE = 1 << 16


@attrs.frozen
class ServerKeys:
    """What a server needs."""

    public: bytes
    secret: bytes = attrs.field(repr=False)
    clients: frozenset[bytes] = attrs.field(factory=frozenset)
    """Public keys, as 32 bytes, of who is let in."""


@attrs.frozen
class ClientKeys:
    """What an engine or a command needs to talk to one server."""

    server: bytes
    public: bytes
    secret: bytes = attrs.field(repr=False)
    source: str = attrs.field(default="", eq=False)
    """The file, for messages."""


def new_keys(folder: Path) -> tuple[Path, Path]:
    """Make keys for a server and its clients in `folder`; returns the two files. Overwrites nothing.

    Raises ConfigError where a file is there already or the folder cannot be written.
    """
    check_available()
    server, server_secret = zmq.curve_keypair()
    client, client_secret = zmq.curve_keypair()
    files = {
        folder / SERVER_FILE: (
            "# Of an lmcache server: `lmcache server --keys`. Secret: keep it on the server's host.\n"
            f"role = server\npublic = {server.decode()}\nsecret = {server_secret.decode()}\n"
            f"client = {client.decode()}\n"
        ),
        folder / CLIENT_FILE: (
            "# Of engines and commands that use the server: `--keys`, LMCACHE_KEYS, lmcache.mp.keys. Secret.\n"
            f"role = client\nserver = {server.decode()}\npublic = {client.decode()}\n"
            f"secret = {client_secret.decode()}\n"
        ),
    }
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in files:
            if path.exists():
                raise ConfigError(
                    f"{path} is there already",
                    remedy="give another folder: keys are not overwritten, for who uses them would be locked out",
                )
        for path, text in files.items():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(
            f"keys cannot be written to {folder}: {error.strerror}", remedy="give a folder that can be written"
        ) from error
    server_file, client_file = files
    return server_file, client_file


def read_server_keys(path: str) -> ServerKeys:
    """A server's keys from its file, or from the folder that holds it. Raises ConfigError."""
    file, lines = _read(path, SERVER_FILE, "server", {"public", "secret", "client"})
    if file.stat().st_mode & 0o077:
        log.warning("%s can be read by others, who could pose as this server; chmod 600 it", file)
    clients = frozenset(_binary(key) for key in lines["client"])
    return ServerKeys(_single(file, lines, "public"), _single(file, lines, "secret"), clients)


def read_client_keys(path: str = "") -> ClientKeys | None:
    """A client's keys from its file or folder, or from what LMCACHE_KEYS names; None where nobody names one.

    Raises ConfigError.
    """
    path = path or os.environ.get(VARIABLE, "")
    if not path:
        return None
    file, lines = _read(path, CLIENT_FILE, "client", {"server", "public", "secret"})
    server, public, secret = (_single(file, lines, name) for name in ("server", "public", "secret"))
    return ClientKeys(server, public, secret, str(file))


def lock_server(socket: "zmq.Socket[bytes]", keys: ServerKeys) -> None:
    """Let only those in whom `door.Door` lets in. Before the socket is bound."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    # without it, ZeroMQ would let everybody in while nobody answers its question
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def unlock_client(socket: "zmq.Socket[bytes]", keys: ClientKeys | None) -> None:
    """Prove who we are to the server, and demand that it proves who it is. Before the socket is connected."""
    if keys is not None:
        socket.curve_serverkey = keys.server
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret


def check_available() -> None:
    """Raise ConfigError where this libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError(
            "this libzmq has no CURVE, so nothing on TCP can be authenticated",
            remedy="install pyzmq from its wheel (pip install --force-reinstall pyzmq), which has it",
        )


def _read(path: str, name: str, role: str, known: set[str]) -> tuple[Path, dict[str, list[bytes]]]:
    check_available()
    file = Path(path) / name if Path(path).is_dir() else Path(path)
    try:
        with file.open() as opened:
            text = opened.read(_LONGEST_FILE)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the keys in {file} cannot be read: {error.strerror if isinstance(error, OSError) else 'not a text'}",
            remedy="make keys with `lmcache keys new FOLDER`, and give the folder or one of its files",
        ) from error
    lines: dict[str, list[bytes]] = {each: [] for each in known}
    found = ""
    for line in text.splitlines():
        key, equals, value = (part.strip() for part in line.partition("="))
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if key == "role":
            found = value
        elif key in known and equals and _is_key(value):
            lines[key].append(value.encode())
        elif found in ("", role):  # never the line itself: it may be a secret
            raise ConfigError(
                f"{file} has a line that is no key", remedy="make new ones with `lmcache keys new FOLDER`"
            )
    if found != role:
        raise ConfigError(
            f"{file} holds the keys of {f'a {found}' if found in ('server', 'client') else 'nothing known'}, and those "
            f"of a {role} are needed",
            remedy=f"give {name} of the same folder",
        )
    return file, lines


def _single(file: Path, lines: dict[str, list[bytes]], name: str) -> bytes:
    if len(lines[name]) != 1:
        raise ConfigError(
            f"{file} has {len(lines[name])} lines `{name} = …`, and needs one",
            remedy="make new ones with `lmcache keys new FOLDER`",
        )
    return lines[name][0]


def _is_key(text: str) -> bool:
    try:
        return len(text) == _KEY_CHARACTERS and len(_binary(text.encode())) == 32
    except ValueError:
        return False


def _binary(key: bytes) -> bytes:
    from zmq.utils import z85

    try:
        return z85.decode(key)
    except Exception as error:  # KeyError, struct.error: whatever it stumbles over
        raise ValueError("no Z85") from error
