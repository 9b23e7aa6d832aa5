"""Ports for servers that are not there yet, or go and come again."""

import contextlib
import random
import socket

_PORTS = range(20_000, 32_000)
"""Below what the kernel hands out: nobody is given one by chance while our server is not there."""

_given: set[int] = set()


def free_port(beside: int = 0) -> int:
    """A loopback port that nobody listens on, and that this process was not given before.

    With `beside`, so is the one that is higher by this.
    """
    while True:
        port = random.choice(_PORTS[: len(_PORTS) - beside])  # noqa: S311  # no secret
        wanted = {port, port + beside}
        if not wanted & _given and all(map(_is_free, wanted)):
            _given.update(wanted)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False
