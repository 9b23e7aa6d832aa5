"""How a command talks to a server: it asks who is there, and says what helps when nobody is."""

import contextlib
import ipaddress
import socket
from collections.abc import Iterator

from lmcache.cli.options import address_text
from lmcache.core.control import Control, ServerAddress, check_host
from lmcache.core.protocol import Welcome
from lmcache.errors import ServerUnavailable


@contextlib.contextmanager
def conversation(
    host: str, port: int, keys: str | None = None, option: str = "--host and --port"
) -> Iterator[tuple[Control, Welcome]]:
    """Connect for the length of the block. Raises what `Control.hello` raises, with a remedy that fits the host.

    `keys` is the user's `--keys`; `option` is what the command calls the server's address.
    """
    check_host(host)
    with Control(ServerAddress(host, port), keys=keys) as control:
        try:
            welcome = control.hello()
        except ServerUnavailable as error:
            if _is_loopback(host):
                remedy = error.remedy.replace("the address of one", f"{option} of one")
                raise ServerUnavailable(str(error).removesuffix(f"; {error.remedy}"), remedy=remedy) from error
            if error.__cause__ is None:
                raise  # something is there, and did not let us in
            if isinstance(error.__cause__, socket.gaierror):
                raise ServerUnavailable(
                    f"this host knows no {host!r}", remedy="give a name that it knows, or an address"
                ) from error
            raise ServerUnavailable(
                f"no lmcache server answers at {address_text(host, port)}: {error.__cause__}",
                remedy="unless it is started with --host and --keys, a server answers on its own host only: type the "
                f"command there, {_there(option)}",
            ) from error
        yield control, welcome


def _there(option: str) -> str:
    return "without --host" if "--host" in option else f"with {option} 127.0.0.1"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
