"""What is checked of a plugin before anything of it is used."""

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pluggy

from lmcache.core import hookspecs
from lmcache.errors import ConfigError, PluginError
from lmcache.plugins.sources import Source, suggestion

if TYPE_CHECKING:  # for who asks for adapters
    from lmcache.core.adapter import EngineAdapter

PREFIX = f"{hookspecs.PROJECT}_"
"""What the names of hooks, and of no other functions of a plugin, begin with."""

HOOKS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if name.startswith(PREFIX)
}
"""Every hook and its arguments."""


def check_plugin(plugin: object, source: Source, manager: pluggy.PluginManager) -> list[str]:
    """The hooks of a plugin. Refuses what pluggy would pass over in silence, or without saying what to change."""
    hooks = []
    for name in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is not None:
            hooks.append(options["specname"] or name)
            arguments = tuple(inspect.signature(getattr(plugin, name)).parameters)
            _check_hook(source, hooks[-1], arguments, options)
        elif name.startswith(PREFIX) and inspect.isroutine(inspect.getattr_static(plugin, name, None)):
            raise PluginError(
                f"{source} has a function {name} that is not marked as a hook",
                remedy="decorate it with lmcache.core.hookspecs.hookimpl, or give it a name that begins otherwise",
            )
    if not hooks:
        raise PluginError(
            f"{source} implements no hook", remedy="name the module that has the functions marked with hookimpl"
        )
    return hooks


def _check_hook(source: Source, hook: str, arguments: tuple[str, ...], options: pluggy.HookimplOpts) -> None:
    if hook not in HOOKS:
        if options["optionalhook"]:  # the plugin says itself that other versions may have this hook
            return
        raise PluginError(
            f"{source} implements {hook}, which is no hook",
            remedy=suggestion(hook, HOOKS).strip() or f"the hooks are {', '.join(HOOKS)}",
        )
    if options["wrapper"] or options["hookwrapper"]:
        raise PluginError(f"{source} wraps {hook}", remedy="implement it plainly, without a yield")
    unknown = [name for name in arguments if name not in HOOKS[hook]]
    if unknown:
        raise PluginError(
            f"{source} wants {', '.join(unknown)} from {hook}",
            remedy=f"take some or all of the arguments that it has: {hook}({', '.join(HOOKS[hook])})",
        )


def check_adapter(adapter: "type[EngineAdapter]") -> None:
    """Refuse an adapter that does not say what `lmcache engines` prints of it."""
    from lmcache.core.versions import VersionRange

    where = f"the engine adapter {adapter.__module__}.{adapter.__qualname__}"
    missing = [name for name in ("module", "status") if not getattr(adapter, name, "")]
    if adapter.distributions and not adapter.supported:
        missing.append("supported")
    if missing:
        raise PluginError(
            f"{where} does not say its {' and '.join(missing)}",
            remedy="set the class attributes that lmcache.core.adapter.EngineAdapter describes",
        )
    try:
        VersionRange.parse(adapter.supported)
    except ConfigError as error:
        raise PluginError(f"{where}: supported is {error.args[0]}", remedy=error.remedy) from error
