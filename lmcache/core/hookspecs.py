"""Every extension point. A plugin is a module (or object) with functions of these names, decorated with `hookimpl`.

Hooks *find* things, once, when a process starts; what they return is called directly from then on. An implementation
takes the arguments that it wants, by name. A function named `lmcache_…` that is not listed here or lacks the decorator
stops the start: a misspelt hook is never silent. `docs/reference/hooks.md` is this file for users.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

from lmcache.core.policy import EvictionPolicy

if TYPE_CHECKING:  # click is imported by `cli` only: a plugin module must stay cheap to import
    import click

    from lmcache.core.adapter import EngineAdapter
    from lmcache.core.admission import AdmissionPolicy, RetentionPolicy
    from lmcache.core.codec import Codec
    from lmcache.core.observing import Evicted, LookedUp, Stored
    from lmcache.core.tier import StorageTier
    from lmcache.geometry.groups import GroupKind

PROJECT = "lmcache"
"""The entry-point group in which distributions announce plugin modules."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's functions: `from lmcache.core.hookspecs import hookimpl`."""


# ------------------------------------------------------------------------------------------------- at start, found once


@hookspec
def lmcache_register_eviction_policies() -> list[type[EvictionPolicy]]:  # type: ignore[empty-body]
    """Policies to choose from with `--eviction-policy NAME`. Called once, when a process builds its plugin manager.

    Two plugins that return policies of one name (compared without case) stop the start; both are named. The server
    makes one instance of the class that is chosen, without arguments.
    """


@hookspec
def lmcache_register_admission_policies() -> "list[type[AdmissionPolicy]]":  # type: ignore[empty-body]
    """Admission policies to choose from with `--admission NAME`, which may be given several times.

    Called once, when a process builds its plugin manager. The server makes one instance of each class that is chosen,
    without arguments; how several are combined is said in `core/admission.py`.
    """


@hookspec
def lmcache_register_retention_policies() -> "list[type[RetentionPolicy]]":  # type: ignore[empty-body]
    """Retention policies to choose from with `--retention NAME`, which may be given several times.

    Called once, when a process builds its plugin manager. The server makes one instance of each class that is chosen,
    without arguments; how several are combined is said in `core/admission.py`.
    """


@hookspec
def lmcache_register_storage_tiers() -> "list[type[StorageTier]]":  # type: ignore[empty-body]
    """Kinds of tiers, for `--l2 SCHEME://…`. Called once, when a process builds its plugin manager.

    Two plugins that return classes of one scheme stop the start. The server makes one instance for each URL of the
    scheme; what a tier needs besides lmcache is imported then, by its `__init__`, not by the plugin's module.
    """


@hookspec
def lmcache_register_codecs() -> "list[type[Codec]]":  # type: ignore[empty-body]
    """Codecs, for `codec=NAME` in the URL of a tier. Called once, when a process builds its plugin manager.

    Two plugins that return codecs of one name stop the start. The server makes one instance for each tier that names
    it; what a codec needs besides lmcache is imported then, by its `__init__`, not by the plugin's module.
    """


@hookspec
def lmcache_register_engine_adapters() -> "list[type[EngineAdapter]]":  # type: ignore[empty-body]
    """Engine adapters, for `lmcache plugins` and for tools that look one up by engine name.

    Called once, when a process builds its plugin manager. The class must be importable without its engine: it names the
    module to load when the engine asks.
    """


@hookspec(firstresult=True)
def lmcache_classify_kv_spec(engine: str, spec: object) -> "GroupKind | None":
    """The kind of one KV spec that `engine` reports, decided by its exact class; None = not mine, ask the next plugin.

    Called once per spec in the engine's processes when the engine describes its KV caches; the plugin loaded last is
    asked first. A spec that nobody classifies is refused at start, naming layer and class: a wrong guess here would
    serve wrong tokens.
    """


# ----------------------------------------------------------------------------------------------------- the command line


@hookspec
def lmcache_register_commands(cli: "click.Group") -> None:
    """Add commands to `lmcache` with `cli.add_command`. Called once per run that needs them; installed plugins only."""


# ------------------------------------------------------------------------------------- while running, off the hot path


@hookspec
def lmcache_server_started(address: str) -> None:
    """The server answers at `address` (`host:port`). Called once, in a thread beside it; whoever raises is logged."""


@hookspec
def lmcache_after_store(events: "Sequence[Stored]") -> None:
    """KV groups of chunks can be read from L1 from now on. Called once for each batch, in a thread beside the server.

    Batches come a tenth of a second apart, this and the next two hooks in the order of what happened. Whoever raises is
    logged, once for each plugin and hook.
    """


@hookspec
def lmcache_after_lookup(events: "Sequence[LookedUp]") -> None:
    """Lookups were answered. Called once for each batch, as `lmcache_after_store`."""


@hookspec
def lmcache_after_evict(events: "Sequence[Evicted]") -> None:
    """Chunks have left L1, whatever the reason. Called once for each batch, as `lmcache_after_store`."""


@hookspec
def lmcache_server_stopping() -> None:
    """The server has answered its last request. Called once, after all that started; whoever raises is logged."""
