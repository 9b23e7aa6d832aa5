"""What a user may say with a request about its place in the cache: `kv_transfer_params` of vLLM's API. Scheduler only.

    {"lmcache.tenant": "team-a", "lmcache.ttl_s": 3600, "lmcache.priority": "high", "lmcache.session_end": true}

Each may be left out. They change how long chunks stay and who is charged for them, never which chunks are hit: who may
share is said by the cache salt.
"""

import difflib
import sys
from collections.abc import Mapping
from typing import Any

import attrs

from lmcache.core.hints import NO_HINTS, Hints, Priority
from lmcache.errors import ConfigError

PREFIX = "lmcache."
LONGEST_TENANT = 256

_PRIORITIES = {priority.name.lower(): priority for priority in Priority}
NAMES = ("tenant", "ttl_s", "priority", "session_end")
"""What there is, without the prefix."""


@attrs.frozen
class Wishes:
    """What one request says."""

    tenant: str = ""
    """In clear; empty when the request names none."""
    hints: Hints = NO_HINTS


def wishes_of(params: Mapping[str, Any] | None) -> Wishes:
    """Read a request's `kv_transfer_params`. Raises ConfigError, which names the parameter; other people's are left."""
    own = {key.removeprefix(PREFIX): value for key, value in (params or {}).items() if key.startswith(PREFIX)}
    for name in own:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            known = ", ".join(PREFIX + each for each in NAMES)
            raise ConfigError(
                f"{PREFIX}{name} in kv_transfer_params is not known",
                remedy=f"did you mean {PREFIX}{near[0]}?" if near else f"there are {known}",
            )
    return Wishes(
        _tenant(own.get("tenant", "")),
        Hints(_ttl(own.get("ttl_s")), _priority(own.get("priority")), _session_end(own.get("session_end", False))),
    )


def _tenant(value: object) -> str:
    # it is sent as UTF-8, and shown on the terminals of those who run the server
    if isinstance(value, str) and len(value) <= LONGEST_TENANT and value.isprintable():
        return value
    raise _wrong("tenant", value, f"a name of at most {LONGEST_TENANT} printable characters")


def _ttl(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max:
        return float(value)
    raise _wrong("ttl_s", value, "a number of seconds, like 3600")


def _priority(value: object) -> Priority | None:
    if value is None:
        return None
    if isinstance(value, str) and value.lower() in _PRIORITIES:
        return _PRIORITIES[value.lower()]
    raise _wrong("priority", value, f"one of {', '.join(_PRIORITIES)}")


def _session_end(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _wrong("session_end", value, "true or false")


def _wrong(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{PREFIX}{name} in kv_transfer_params is {value!r:.80}", remedy=f"give {allowed}")
