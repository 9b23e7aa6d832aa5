"""Which version of an engine is there, and what an adapter does about one that it was not validated on.

Imports no engine. An adapter calls the two checks when its engine starts, before anything is served.
"""

import functools
import importlib.metadata
import logging
from collections.abc import Sequence

import attrs

from lmcache.core.adapter import EngineAdapter
from lmcache.core.versions import VersionRange
from lmcache.errors import ConfigError

log = logging.getLogger(__name__)


@attrs.frozen
class InstalledEngine:
    """An engine that this Python has installed."""

    distribution: str
    version: str


def installed_engine(adapter: type[EngineAdapter]) -> InstalledEngine | None:
    """The engine that `adapter` is for, as its package's metadata has it; None where it is not installed."""
    for name in adapter.distributions:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return InstalledEngine(found.name, found.version)
    return None


def is_supported(adapter: type[EngineAdapter], version: str) -> bool:
    """Whether the adapter's tests have run on that version of its engine."""
    return VersionRange.parse(adapter.supported).covers(version)


def check_interface(adapter: type[EngineAdapter], version: str, missing: Sequence[str]) -> None:
    """Refuse an engine whose interface lacks what the adapter needs. Every process of the engine calls it, at start.

    What an engine has is looked at, not guessed from its version: builds from source carry any. Raises ConfigError.
    """
    if missing:
        raise ConfigError(
            f"{adapter.engine} {version} does not offer {', '.join(missing)}, which its adapter needs",
            remedy=f"use {adapter.engine} {adapter.supported}, or run it without lmcache",
        )


@functools.cache
def warn_of_version(adapter: type[EngineAdapter], version: str) -> None:
    """Say so, once a process, where the engine is none that the tests have run on. The scheduler's process calls it."""
    if not is_supported(adapter, version):
        log.warning(
            "lmcache: its adapter for %s is %s %s, this is %s: it may well work, but nobody has looked; "
            "`lmcache engines` lists what was validated",
            adapter.engine,
            adapter.validation,
            adapter.supported,
            version,
        )
