"""The connector's settings: `server_url` of TensorRT-LLM's own configuration, and environment variables.

TensorRT-LLM lets connectors have no keys of their own. The variables are named as vLLM's keys are: `lmcache.deadline`
there is `LMCACHE_DEADLINE` here.
"""

import difflib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from lmcache.core.client import ClientSettings, ServerAddress
from lmcache.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX = "LMCACHE_"
SERVER_URL = "LMCACHE_SERVER_URL"
HOST = "LMCACHE_MP_HOST"
PORT = "LMCACHE_MP_PORT"
DEADLINE = "LMCACHE_DEADLINE"
START_WAIT = "LMCACHE_START_WAIT"
LOOKUP_WAIT = "LMCACHE_LOOKUP_WAIT"
ASYNC_LOADS = "LMCACHE_ASYNC_LOADS"
STORE_DECODE = "LMCACHE_STORE_DECODE"
WEIGHTS_ID = "LMCACHE_WEIGHTS_ID"
STAGING = "LMCACHE_STAGING"

CLOSE = 0.85
"""Other programs have variables with this prefix, too: only what looks like a slip of the pen is spoken of."""


@attrs.frozen
class Settings:
    """What the user asked for."""

    address: ServerAddress = attrs.field(factory=ServerAddress)
    client: ClientSettings = attrs.field(factory=ClientSettings)
    start_wait: float = 2.0
    """Seconds that a start waits for the server before it goes on without one."""
    lookup_wait: float = 0.1
    """Seconds that the executor waits for the answer to a lookup: tiers may be slower, and all requests wait."""
    async_loads: bool = False
    """Whether a request is parked while it is loaded, and the others go on; else the step waits for its loads."""
    store_decode: bool = True
    """Whether chunks that sampled tokens complete are stored, too."""
    weights_id: str = ""
    """The user's word for what the weights are; empty to find out."""
    staging: bool = False
    """Whether pages in CPU memory are copied as an accelerator's are, through buffers: slower, for proving that way."""


def read_settings(server_url: str | None, environment: Mapping[str, str]) -> Settings:
    """Read them. `server_url` goes before the environment. Raises ConfigError for a value that makes no sense."""
    readers: dict[str, Callable[[str, str], Any]] = {
        SERVER_URL: _address,
        HOST: _address,
        PORT: _port,
        DEADLINE: _seconds,
        START_WAIT: _seconds_or_none,
        LOOKUP_WAIT: _seconds_or_none,
        ASYNC_LOADS: _switch,
        STORE_DECODE: _switch,
        WEIGHTS_ID: lambda _, value: value,
        STAGING: _switch,
    }
    _warn_of_slips(environment, readers)
    values = {name: read(name, environment[name]) for name, read in readers.items() if environment.get(name)}
    address = values.get(HOST, ServerAddress())
    if PORT in values:
        address = attrs.evolve(address, port=values[PORT])
    address = values.get(SERVER_URL, address)
    if server_url:
        address = _address("server_url", server_url)
    defaults = Settings()
    return Settings(
        address,
        ClientSettings(deadline=values.get(DEADLINE, defaults.client.deadline)),
        values.get(START_WAIT, defaults.start_wait),
        values.get(LOOKUP_WAIT, defaults.lookup_wait),
        values.get(ASYNC_LOADS, defaults.async_loads),
        values.get(STORE_DECODE, defaults.store_decode),
        values.get(WEIGHTS_ID, defaults.weights_id),
        values.get(STAGING, defaults.staging),
    )


def _warn_of_slips(environment: Mapping[str, str], known: Mapping[str, object]) -> None:
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            for near in difflib.get_close_matches(name, known, 1, CLOSE):
                log.warning("lmcache: the environment variable %s means nothing here; did you mean %s?", name, near)


def _address(name: str, value: str) -> ServerAddress:
    try:
        return ServerAddress.parse(value)
    except ConfigError as error:
        raise _bad(name, value, "HOST, HOST:PORT or tcp://HOST:PORT") from error


def _port(name: str, value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) < 65536:
        raise _bad(name, value, "a TCP port, 1 to 65535")
    return int(value)


def _seconds_or_none(name: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise _bad(name, value, "a number of seconds")
    return seconds


def _seconds(name: str, value: str) -> float:
    seconds = _seconds_or_none(name, value)
    if not seconds:
        raise _bad(name, value, "a number of seconds above 0")
    return seconds


def _switch(name: str, value: str) -> bool:
    switches = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if value.lower() not in switches:
        raise _bad(name, value, "1 or 0")
    return switches[value.lower()]


def _bad(name: str, value: str, wanted: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}", remedy=f"give {wanted}")
