"""The composition root of plugins: loads them, checks them, and holds what they offer.

A process that needs plugins builds one `PluginManager` when it starts. Hooks that find things are called then, once;
what they return is used directly from then on, so that nothing on a hot path goes through a hook.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import attrs
import pluggy

from lmcache.core import hookspecs
from lmcache.core.policy import EvictionPolicy
from lmcache.errors import PluginError
from lmcache.plugins.checks import HOOKS, check_plugin
from lmcache.plugins.offers import Offers
from lmcache.plugins.sources import BLOCK, Origin, Source, announced, built_in, chosen, suggestion

if TYPE_CHECKING:  # only `cli` imports click, and no process needs a base of everything that is offered
    import click

    from lmcache.core.adapter import EngineAdapter
    from lmcache.core.admission import AdmissionPolicy, RetentionPolicy
    from lmcache.core.codec import Codec
    from lmcache.core.observing import Observer
    from lmcache.core.tier import StorageTier
    from lmcache.core.voices import Speakers
    from lmcache.geometry.groups import GroupKind
    from lmcache.plugins.opening import OpenedTier

log = logging.getLogger(__name__)

C = TypeVar("C")
P = TypeVar("P")

_OFFERS: Mapping[str, str] = {
    "lmcache_register_eviction_policies": "_policies",
    "lmcache_register_admission_policies": "_admission",
    "lmcache_register_retention_policies": "_retention",
    "lmcache_register_storage_tiers": "_tiers",
    "lmcache_register_codecs": "_codecs",
    "lmcache_register_engine_adapters": "_adapters",
}
"""Hooks that offer something, and the attribute of a manager that holds what has been offered."""


@attrs.frozen
class PluginDescription:
    """What `lmcache plugins` says of one plugin."""

    name: str
    """What `--plugin no:NAME` calls it."""
    origin: Origin
    distribution: str
    """Name and version of the distribution that announces it; empty unless it is an entry point."""
    hooks: tuple[str, ...]
    """Hooks that it implements."""
    policies: tuple[str, ...]
    """Eviction policies that it offers, as users write them."""
    admission: tuple[str, ...]
    """Admission policies that it offers."""
    retention: tuple[str, ...]
    """Retention policies that it offers."""
    tiers: tuple[str, ...]
    """Schemes of `--l2` that it has a tier for."""
    codecs: tuple[str, ...]
    """Codecs that it offers."""
    adapters: tuple[str, ...]
    """Engines that it has an adapter for."""


class PluginManager:
    """The plugins of this process; whatever is wrong with any of them is a PluginError.

    Building one imports those of other people, and of ours those that answer the same hooks. The rest of ours is
    imported when it is first asked for.

    `names` are the values of `--plugin` in order: a dotted module, the path of a .py file, a distribution or one of its
    entry points, or `no:NAME` to leave out a built-in plugin or an entry point.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._sources: dict[str, Source] = {}
        self._waiting: list[Source] = []
        """Those that are imported when one of their hooks is asked; they come before all others."""
        self._failed: set[tuple[Source, str]] = set()
        """Observers that have raised: the log has it once."""
        for source in _select(names):
            if source.hooks is None:
                self._load(source)
            else:
                self._sources[source.name] = source
                self._waiting.append(source)
        self._check_offers()

    # ------------------------------------------------------------------------------------------------------ looking up

    def find_policy(self, name: str) -> type[EvictionPolicy]:
        """The policy that `--eviction-policy name` selects, case ignored; PluginError lists the known ones."""
        return self._policies.find(name)

    def make_policy(self, name: str) -> EvictionPolicy:
        """An instance of the policy that `find_policy` finds; PluginError, too, if it cannot be made."""
        return _made("eviction", name, self.find_policy(name))

    def make_speakers(self, admission: Sequence[str], retention: Sequence[str]) -> "Speakers":
        """Instances of the policies that `--admission` and `--retention` name; PluginError if one cannot be had."""
        from lmcache.core.voices import Speakers

        return Speakers(
            tuple(_made("admission", name, self._admission.find(name)) for name in dict.fromkeys(admission)),
            tuple(_made("retention", name, self._retention.find(name)) for name in dict.fromkeys(retention)),
        )

    def open_tier(self, url: str) -> "OpenedTier":
        """Open the tier that `--l2 url` names. Raises ConfigError (PluginError for a scheme or codec nobody offers)."""
        from lmcache.plugins.opening import open_tier

        return open_tier(url, self._tiers, self._codecs)

    def find_tier(self, scheme: str) -> "type[StorageTier]":
        """The tier of a scheme, case ignored; PluginError lists the known ones."""
        return self._tiers.find(scheme)

    def find_adapter(self, engine: str) -> "type[EngineAdapter]":
        """The adapter of an engine, case ignored; PluginError lists the known ones."""
        return self._adapters.find(engine)

    def adapters(self) -> "list[type[EngineAdapter]]":
        """The adapters of all engines, in the order in which their plugins were loaded."""
        return [self._adapters.find(name) for name in self._adapters.names()]

    def policies(self) -> tuple[str, ...]:
        """What can be written after `--eviction-policy`, as the plugins spell it."""
        return self._policies.names()

    def classify_kv_spec(self, engine: str, spec: object) -> "GroupKind | None":
        """The kind of an engine's KV spec, as said by the plugin loaded last that knows it; None = nobody knows it.

        Adapters call it in the engine's worker, once per spec, and refuse to start on None.
        """
        from lmcache.geometry.groups import GroupKind

        for impl in reversed(self._implementations("lmcache_classify_kv_spec")):
            kind = self._call(impl, engine=engine, spec=spec)
            if isinstance(kind, GroupKind):
                return kind
            if kind is not None:
                raise PluginError(
                    f"{self._owner(impl)} classifies {type(spec).__name__} of {engine} as {kind!r}",
                    remedy="return a member of lmcache.geometry.groups.GroupKind, or None",
                )
        return None

    def describe(self) -> list[PluginDescription]:
        """What every plugin brings, in the order in which they answer; all are imported for it."""
        self._load_waiting(HOOKS)
        return [
            PluginDescription(
                name=source.name,
                origin=source.origin,
                distribution=f"{source.distribution} {source.version}".strip(),
                hooks=tuple(h for h in HOOKS if any(self._owner(i) is source for i in self._implementations(h))),
                policies=self._policies.names(source),
                admission=self._admission.names(source),
                retention=self._retention.names(source),
                tiers=self._tiers.names(source),
                codecs=self._codecs.names(source),
                adapters=self._adapters.names(source),
            )
            for source in self._sources.values()
        ]

    # ------------------------------------------------------------------------------------------------------ passing on

    def register_commands(self, cli: "click.Group") -> None:
        """Let every plugin add its commands to `cli`. PluginError names the plugin that fails."""
        for impl in self._implementations("lmcache_register_commands"):
            self._call(impl, cli=cli)

    def server_started(self, address: str) -> None:
        """Tell every plugin that the server answers at `address`. A plugin that raises is logged, and hurts nobody."""
        self._observe("lmcache_server_started", address=address)

    def observer(self) -> "Observer | None":
        """What tells plugins of stores, lookups and evictions; None where none of them wants to hear. Close it."""
        hooks = [hook for hook in HOOKS if hook.startswith("lmcache_after_") and self._implementations(hook)]
        if not hooks:
            return None
        from lmcache.core.observing import Observer

        return Observer(lambda hook, events: self._observe(hook, events=events), hooks)

    def server_stopping(self) -> None:
        """Tell every plugin that the server ends. A plugin that raises is logged, and hurts nobody."""
        self._observe("lmcache_server_stopping")

    # --------------------------------------------------------------------------------------------------------- loading

    def _load(self, source: Source) -> None:
        try:
            plugin = source.load()
        except (Exception, SystemExit) as error:  # a plugin's own code runs here, and may raise anything
            raise PluginError(
                f"{source} cannot be imported: {_cause(error)}",
                remedy=f"repair or reinstall it, or {source.leave_out()}",
            ) from error
        hooks = check_plugin(plugin, source, self._pluggy)
        self._load_waiting(hooks)  # whatever answers the same hooks and comes first
        if self._pluggy.is_registered(plugin):
            return  # reached twice, say by its entry point and by its module
        if self._sources.setdefault(source.name, source) is not source:
            raise PluginError(
                f"{self._sources[source.name]} and {source} have one name",
                remedy="uninstall the one that you do not want",
            )
        self._pluggy.register(plugin, source.name)

    def _load_waiting(self, hooks: Collection[str]) -> None:
        """Import those of the waiting plugins that may implement one of `hooks`."""
        wanted = [source for source in self._waiting if not set(hooks).isdisjoint(source.hooks or ())]
        self._waiting = [source for source in self._waiting if source not in wanted]
        for source in wanted:
            self._load(source)

    # -------------------------------------------------------------------------------------------------------- offering

    def _check_offers(self) -> None:
        """PluginError for what is wrong with an offer of a plugin that has been imported."""
        for hook, offers in _OFFERS.items():
            if getattr(self._pluggy.hook, hook).get_hookimpls():
                getattr(self, offers)

    @cached_property
    def _policies(self) -> Offers[EvictionPolicy]:
        offers = Offers("eviction policy", EvictionPolicy, "name")  # type: ignore[type-abstract]  # never built
        return self._collect("lmcache_register_eviction_policies", offers)

    @cached_property
    def _admission(self) -> "Offers[AdmissionPolicy]":
        from lmcache.core.admission import AdmissionPolicy

        offers = Offers("admission policy", AdmissionPolicy, "name")  # type: ignore[type-abstract]  # never built
        return self._collect("lmcache_register_admission_policies", offers)

    @cached_property
    def _retention(self) -> "Offers[RetentionPolicy]":
        from lmcache.core.admission import RetentionPolicy

        offers = Offers("retention policy", RetentionPolicy, "name")  # type: ignore[type-abstract]  # never built
        return self._collect("lmcache_register_retention_policies", offers)

    @cached_property
    def _tiers(self) -> "Offers[StorageTier]":
        from lmcache.core.tier import StorageTier

        offers = Offers("storage tier", StorageTier, "scheme")  # type: ignore[type-abstract]  # never built
        return self._collect("lmcache_register_storage_tiers", offers)

    @cached_property
    def _codecs(self) -> "Offers[Codec]":
        from lmcache.core.codec import Codec

        offers = Offers("codec", Codec, "name")  # type: ignore[type-abstract]  # never built
        return self._collect("lmcache_register_codecs", offers)

    @cached_property
    def _adapters(self) -> "Offers[EngineAdapter]":
        from lmcache.core.adapter import EngineAdapter
        from lmcache.plugins.checks import check_adapter

        offers = self._collect("lmcache_register_engine_adapters", Offers("engine adapter", EngineAdapter, "engine"))
        for name in offers.names():
            check_adapter(offers.find(name))
        return offers

    def _collect(self, hook: str, offers: Offers[C]) -> Offers[C]:
        for impl in self._implementations(hook):
            offers.add_all(self._call(impl), self._owner(impl), hook)
        return offers

    # --------------------------------------------------------------------------------------------------------- calling

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        self._load_waiting((hook,))
        implementations: list[pluggy.HookImpl] = getattr(self._pluggy.hook, hook).get_hookimpls()
        return implementations

    def _owner(self, impl: pluggy.HookImpl) -> Source:
        return self._sources[impl.plugin_name]

    def _call(self, impl: pluggy.HookImpl, **arguments: object) -> object:
        """One plugin's answer. A call of the whole hook would not tell whose answer it is, nor who raised."""
        try:
            result: object = impl.function(*(arguments[name] for name in impl.argnames))
        except (Exception, SystemExit) as error:  # a plugin's own code runs here, and may raise anything
            owner = self._owner(impl)
            raise PluginError(
                f"{owner} failed in {impl.function.__name__}: {_cause(error)}",
                remedy=f"repair it, or {owner.leave_out()}",
            ) from error
        return result

    def _observe(self, hook: str, **arguments: object) -> None:
        for impl in self._implementations(hook):
            try:
                self._call(impl, **arguments)
            except PluginError:
                source = self._owner(impl)
                level = logging.DEBUG if (source, hook) in self._failed else logging.ERROR
                self._failed.add((source, hook))
                log.log(level, "%s raised in %s; the server goes on", source, hook, exc_info=True)


def _select(names: Sequence[str]) -> list[Source]:
    """Sources to load, in order: built in, announced, named by the user; without those that the user blocks."""
    known = built_in() + announced()
    blocked = {name.removeprefix(BLOCK) for name in names if name.startswith(BLOCK)}
    for name in sorted(blocked - {source.name for source in known}):
        raise _nothing_to_leave_out(name, known)
    selected = [source for source in known if source.name not in blocked]
    for name in names:
        if name.startswith(BLOCK):
            continue
        for source in chosen(name, known):
            if source.name in blocked:
                raise PluginError(f"--plugin has {name} and {BLOCK}{source.name}", remedy="drop one of the two")
            if source not in selected:
                selected.append(source)
    return selected


def _nothing_to_leave_out(name: str, known: Sequence[Source]) -> PluginError:
    own = [source.name for source in known if source.origin is Origin.BUILT_IN]
    found = [source.name for source in known if source.origin is not Origin.BUILT_IN]
    return PluginError(
        f"--plugin {BLOCK}{name} leaves out a plugin that does not exist",
        remedy=f"{suggestion(name, own + found)}What can be left out: of lmcache itself {', '.join(own)}; of installed "
        f"distributions {', '.join(found) or 'nothing, for none announces a plugin'}",
    )


def _made(kind: str, name: str, policy: type[P]) -> P:
    try:
        return policy()
    except (Exception, SystemExit) as error:  # a plugin's own code runs here, and may raise anything
        where = f"{policy.__module__}.{policy.__qualname__}"
        raise PluginError(
            f"the {kind} policy {name!r}, {where}, cannot be made: {_cause(error)}",
            remedy="choose another, or repair it: a policy is made without arguments",
        ) from error


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
