"""The connector's settings: vLLM's `kv_connector_extra_config`, checked once, when the connector is made."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from lmcache.core.client import ClientSettings, ServerAddress
from lmcache.errors import ConfigError

HOST = "lmcache.mp.host"
PORT = "lmcache.mp.port"
KEYS = "lmcache.mp.keys"
DEADLINE = "lmcache.deadline"
START_WAIT = "lmcache.start_wait"
STORE_DECODE = "lmcache.store_decode"
WEIGHTS_ID = "lmcache.weights_id"
STAGING = "lmcache.staging"

NOTED = {
    "lmcache.mp.mq_timeout": f"requests are given up after {DEADLINE} seconds",
    "lmcache.mp.heartbeat_interval": "the connection itself tells both sides when the other one ends",
}
"""Keys that people already write and that have nothing to set here, each with the reason."""


@attrs.frozen
class Settings:
    """What the user asked for."""

    address: ServerAddress = attrs.field(factory=ServerAddress)
    client: ClientSettings = attrs.field(factory=ClientSettings)
    start_wait: float = 2.0
    """Seconds that a start waits for the server before it goes on without one."""
    store_decode: bool = True
    """Whether chunks that sampled tokens complete are stored, too."""
    weights_id: str = ""
    """The user's word for what the weights are; empty to find out."""
    staging: bool = False
    """Whether pages in CPU memory are copied as an accelerator's are, through buffers: slower, for proving that way."""
    notes: tuple[str, ...] = ()
    """One line for each key that was accepted and does nothing."""


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """Read vLLM's extra config. Raises ConfigError for a key that is unknown and for a value that makes no sense."""
    readers: dict[str, Callable[[str, Any], Any]] = {
        HOST: _host,
        PORT: _port,
        KEYS: _text,
        DEADLINE: _seconds,
        START_WAIT: _seconds_or_none,
        STORE_DECODE: _switch,
        WEIGHTS_ID: _text,
        STAGING: _switch,
    }
    for key in extra:
        if key not in readers and key not in NOTED:
            raise ConfigError(f"unknown key {key!r} in kv_connector_extra_config", remedy=_known(key, readers))
    values = {key: read(key, extra[key]) for key, read in readers.items() if key in extra}
    address = values.get(HOST, ServerAddress())
    if PORT in values:
        address = attrs.evolve(address, port=values[PORT])
    defaults = Settings()
    return Settings(
        address,
        ClientSettings(deadline=values.get(DEADLINE, defaults.client.deadline), keys=values.get(KEYS, "")),
        values.get(START_WAIT, defaults.start_wait),
        values.get(STORE_DECODE, defaults.store_decode),
        values.get(WEIGHTS_ID, defaults.weights_id),
        values.get(STAGING, defaults.staging),
        tuple(f"{key} is accepted and sets nothing: {why}" for key, why in NOTED.items() if key in extra),
    )


def _known(key: str, readers: Mapping[str, object]) -> str:
    known = [*readers, *NOTED]
    close = difflib.get_close_matches(key, known, 1)
    return (f"did you mean {close[0]}? " if close else "") + f"known keys are {', '.join(known)}"


def _host(key: str, value: Any) -> ServerAddress:
    if not isinstance(value, str):
        raise _bad(key, value, "a host name, with or without tcp://")
    return ServerAddress.parse(value)


def _port(key: str, value: Any) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 65536:
        raise _bad(key, value, "a TCP port, 1 to 65535")
    return number


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
        raise _bad(key, value, "a number of seconds above 0")
    return float(value)


def _seconds_or_none(key: str, value: Any) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else _seconds(key, value)


def _switch(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _bad(key, value, "true or false")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _bad(key, value, "a text that is not empty")
    return value


def _bad(key: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{key} is {value!r} in kv_connector_extra_config", remedy=f"give {wanted}")
