"""The settings of both doors: what users write into SGLang's JSON, checked once, when a door is made."""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs

from lmcache.core.client import ClientSettings, ServerAddress
from lmcache.errors import ConfigError

HOST = "lmcache.mp.host"
PORT = "lmcache.mp.port"
KEYS = "lmcache.mp.keys"
DEADLINE = "lmcache.deadline"
START_WAIT = "lmcache.start_wait"
TIER_WAIT = "lmcache.tier_wait"
WEIGHTS_ID = "lmcache.weights_id"
TENANT = "lmcache.tenant"
STAGING = "lmcache.staging"


@attrs.frozen
class Settings:
    """What the user asked for."""

    address: ServerAddress = attrs.field(factory=ServerAddress)
    keys: str = ""
    """`client.key` of the server, or its folder; empty for what LMCACHE_KEYS names."""
    deadline: float = 0.5
    """Seconds that a request to the server may take. SGLang's scheduler waits for some of them."""
    start_wait: float = 2.0
    """Seconds that a start waits for the server before it goes on without one."""
    tier_wait: float = 0.1
    """Seconds that a lookup or load of the linker waits for the server's tiers: the whole scheduler waits with it."""
    weights_id: str = ""
    """The user's word for what the weights are; empty to find out."""
    tenant: str = ""
    """The tenant that the server counts this engine's chunks for: SGLang tells its caches no request's salt."""
    staging: bool = False
    """Whether pages in CPU memory are copied as an accelerator's are, through buffers: slower, for proving that way."""

    @property
    def client(self) -> ClientSettings:
        """For the client of the server."""
        return ClientSettings(deadline=self.deadline, keys=self.keys)


def read_settings(extra: Mapping[str, Any], where: str, others: Collection[str] = ()) -> Settings:
    """Read the JSON that SGLang calls `where`; `others` are keys in it that are SGLang's own.

    Raises ConfigError for a key that is unknown and for a value that makes no sense.
    """
    readers: dict[str, Callable[[Any], Any]] = {
        HOST: _host,
        PORT: _port,
        KEYS: _text,
        DEADLINE: _seconds,
        START_WAIT: _seconds_or_none,
        TIER_WAIT: _seconds_or_none,
        WEIGHTS_ID: _text,
        TENANT: _text,
        STAGING: _switch,
    }
    values = {}
    for key, value in extra.items():
        if key in others:
            continue
        if key not in readers:
            close = difflib.get_close_matches(key, readers, 1)
            raise ConfigError(
                f"unknown key {key!r} in {where}",
                remedy=(f"did you mean {close[0]}? " if close else "") + f"known keys are {', '.join(readers)}",
            )
        try:
            values[key] = readers[key](value)
        except _Unfit as unfit:
            raise ConfigError(f"{key} is {value!r} in {where}", remedy=f"give {unfit}") from None
    address = values.pop(HOST, ServerAddress())
    if PORT in values:
        address = attrs.evolve(address, port=values.pop(PORT))
    keys = values.pop(KEYS, "")
    return Settings(address, keys, **{key.removeprefix("lmcache."): value for key, value in values.items()})


class _Unfit(Exception):
    """A value of the wrong kind; says what a right one is."""


def _host(value: Any) -> ServerAddress:
    if not isinstance(value, str):
        raise _Unfit("a host name, with or without tcp://")
    return ServerAddress.parse(value)


def _port(value: Any) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 65536:
        raise _Unfit("a TCP port, 1 to 65535")
    return number


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
        raise _Unfit("a number of seconds above 0")
    return float(value)


def _seconds_or_none(value: Any) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else _seconds(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Unfit("true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _Unfit("a text that is not empty")
    return value
