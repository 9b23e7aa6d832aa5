"""What an engine adapter is, as far as everybody but its engine is concerned."""

import abc
import enum
from typing import ClassVar


class Validation(enum.StrEnum):
    """On what an adapter has been validated, in the fewest words. `EngineAdapter.status` says the rest."""

    ENGINE = "validated on the engine"
    """Its tests drive the real engine."""
    SIMULATOR = "simulator-tested, not validated on the engine"
    """Its tests drive a model of the engine's interface, for want of what the engine runs on."""
    NOTHING = "not validated"


class EngineAdapter(abc.ABC):
    """One engine's way into the cache. Subclass it, return the class from `lmcache_register_engine_adapters`.

    The class itself imports no engine; `module` does, in the engine's own processes. The guide to writing the rest is
    the docstring of `lmcache.engines`; `lmcache.plugins.testing.EngineAdapterTests` is what the rest must pass.
    """

    engine: ClassVar[str]
    """The engine's name as people write it, in one word."""
    module: ClassVar[str]
    """Dotted name of the module that the engine loads."""
    distributions: ClassVar[tuple[str, ...]] = ()
    """Names under which the engine is installed, the usual one first; empty for one that comes with its adapter."""
    supported: ClassVar[str] = ""
    """Versions of the engine that tests have run on, as in `>=0.32,<0.33`; empty for one that comes with its adapter.

    Another version is warned of once, when the engine starts; one that lacks something is refused before it serves:
    `lmcache.engines.versions` has both.
    """
    validation: ClassVar[Validation] = Validation.NOTHING
    """On what the tests run."""
    status: ClassVar[str]
    """One line: what was validated and how, and what was not. Shown by `lmcache engines` and in the docs."""
