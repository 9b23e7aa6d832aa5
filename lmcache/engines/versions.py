"""Which version of an engine is there, and what an adapter does about one that it was not validated on.

Imports no engine. An adapter calls the two checks when its engine starts, before anything is served.
"""

import enum
import functools
import importlib.metadata
import logging
from collections.abc import Sequence

import attrs

from lmcache.core.adapter import EngineAdapter, Validation
from lmcache.core.versions import VersionRange
from lmcache.errors import ConfigError

log = logging.getLogger(__name__)


class Fit(enum.StrEnum):
    """How an engine that is installed, or is not, fits its adapter."""

    SUPPORTED = "supported"
    OUTSIDE = "outside the supported range"
    """The engine warns when it starts, and is refused then if it lacks what the adapter needs."""
    ABSENT = "not installed"
    BUILT_IN = "comes with its adapter"


@attrs.frozen
class EngineReport:
    """What `lmcache engines` says of one engine."""

    engine: str
    distribution: str
    """The package that it was found as; empty if it was not found."""
    version: str
    """Of that package."""
    supported: str
    fit: Fit
    validation: Validation
    status: str
    module: str


def report_engine(adapter: type[EngineAdapter]) -> EngineReport:
    """Look for the engine of `adapter` in the metadata of what is installed; the first of its names found counts."""
    distribution, version = next(filter(None, map(_installed, adapter.distributions)), ("", ""))
    if not adapter.distributions:
        fit = Fit.BUILT_IN
    elif not distribution:
        fit = Fit.ABSENT
    else:
        fit = Fit.SUPPORTED if is_supported(adapter, version) else Fit.OUTSIDE
    return EngineReport(
        adapter.engine,
        distribution,
        version,
        adapter.supported,
        fit,
        adapter.validation,
        adapter.status,
        adapter.module,
    )


def _installed(name: str) -> tuple[str, str] | None:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return found.name, found.version


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
            "lmcache: its adapter for %s is %s (%s %s); this is %s: it may well work, but nobody has looked; "
            "`lmcache engines` lists what was validated",
            adapter.engine,
            adapter.validation,
            adapter.engine,
            adapter.supported,
            version,
        )
