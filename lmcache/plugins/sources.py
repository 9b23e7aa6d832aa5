"""Where plugins come from: built in, announced by an installed distribution, or named with `--plugin`.

Finding is not loading: entry points are read from metadata, and a plugin is imported only when `Source.load` is called.
A built-in one is imported when a hook that it has is asked: a server without tiers imports none.
"""

import enum
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType

import attrs

from lmcache.core.hookspecs import PROJECT
from lmcache.errors import PluginError

_EVICTION = ("lmcache_register_eviction_policies",)
_ADMISSION = ("lmcache_register_admission_policies",)
_TIERS = ("lmcache_register_storage_tiers",)
_CODECS = ("lmcache_register_codecs",)
_ENGINES = ("lmcache_register_engine_adapters", "lmcache_classify_kv_spec")

BUILT_IN: Mapping[str, tuple[str, ...]] = {
    "lmcache.plugins.eviction.lru": _EVICTION,
    "lmcache.plugins.eviction.fifo": _EVICTION,
    "lmcache.plugins.eviction.lfu": _EVICTION,
    "lmcache.plugins.eviction.slru": _EVICTION,
    "lmcache.plugins.eviction.arc": _EVICTION,
    "lmcache.plugins.eviction.sieve": _EVICTION,
    "lmcache.plugins.eviction.s3fifo": _EVICTION,
    "lmcache.plugins.eviction.tinylfu": _EVICTION,
    "lmcache.plugins.eviction.gdsf": _EVICTION,
    "lmcache.plugins.eviction.prefix_aware": _EVICTION,
    "lmcache.plugins.admission.second_use": _ADMISSION,
    "lmcache.plugins.storage.disk": _TIERS,
    "lmcache.plugins.storage.redis": _TIERS,
    "lmcache.plugins.storage.peer": _TIERS,
    "lmcache.plugins.storage.object_store": _TIERS,
    "lmcache.plugins.codecs.zstd": _CODECS,
    "lmcache.plugins.codecs.zstd_bf16": _CODECS,
    "lmcache.plugins.codecs.aes_gcm": _CODECS,
    "lmcache.engines.reference.adapter": _ENGINES,
    "lmcache.engines.vllm.adapter": _ENGINES,
    "lmcache.engines.sglang.adapter": _ENGINES,
    "lmcache.engines.trtllm.adapter": _ENGINES,
}
"""Modules of the built-in plugins, and the hooks that they may implement.

By name, so that `plugins` imports no engine package; with hooks, so that a process imports only those that it asks.
"""

BLOCK = "no:"
"""Begins those values of `--plugin` that leave a plugin out."""


class Origin(enum.StrEnum):
    """How a plugin came in."""

    BUILT_IN = "built-in"
    """Part of lmcache."""
    ENTRY_POINT = "entry point"
    """Announced by an installed distribution in the entry-point group `lmcache`."""
    OPTION = "--plugin"
    """Named by the user."""


@attrs.frozen
class Source:
    """One plugin that can be loaded."""

    name: str
    """What `no:NAME` blocks and messages call it: the module, the entry point or the path."""
    origin: Origin
    load: Callable[[], object]
    """Imports it. Runs the plugin's own code, so anything may be raised."""
    distribution: str = ""
    """Name of the distribution that announces it; empty for other origins."""
    version: str = ""
    """Version of that distribution."""
    hooks: tuple[str, ...] | None = None
    """Hooks that it may implement: it is imported when one of them is asked. None: nobody knows, and it is at once."""

    def __str__(self) -> str:
        if self.distribution:
            return f"plugin {self.name!r} ({self.origin} of {self.distribution} {self.version})"
        return f"plugin {self.name!r} ({self.origin})"

    def leave_out(self, what: str = "it") -> str:
        """Half a sentence for a remedy: how a user does without `what`, which is this plugin."""
        if self.origin is Origin.OPTION:
            return f"drop {what} from --plugin"
        return f"leave {what} out with --plugin {BLOCK}{self.name}"


def built_in() -> list[Source]:
    """The plugins that are part of lmcache."""
    return [_module(name, Origin.BUILT_IN, hooks) for name, hooks in BUILT_IN.items()]


def announced() -> list[Source]:
    """The plugins that installed distributions announce, none of them imported yet."""
    return [
        Source(
            name=entry.name,
            origin=Origin.ENTRY_POINT,
            load=entry.load,
            distribution=entry.dist.name if entry.dist else "",
            version=entry.dist.version if entry.dist else "",
        )
        for entry in importlib.metadata.entry_points(group=PROJECT)
    ]


def chosen(name: str, known: Iterable[Source]) -> list[Source]:
    """What `--plugin name` stands for; PluginError where it stands for nothing.

    That is a path of a .py file, else a plugin in `known` by its own or its distribution's name, else a dotted module:
    one that Python finds, else one in the current folder, which then stays on `sys.path` for what the module imports.
    Imports nothing but the parent packages of such a module.
    """
    if name.endswith(".py") or "/" in name:
        return [_file(name)]
    matches = [s for s in known if name == s.name or (s.distribution and _normal(name) == _normal(s.distribution))]
    if matches:
        return matches
    if _is_module(name) or _is_module_here(name):
        return [_module(name, Origin.OPTION)]
    raise _unknown(name, known)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest to a misspelt one, as a half sentence; empty if none is near."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    import difflib  # for somebody who has mistyped

    near = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return f"did you mean {by_folded[near[0]]!r}? " if near else ""


def _normal(distribution: str) -> str:
    """A distribution's name in the one spelling that packaging compares."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _module(name: str, origin: Origin, hooks: tuple[str, ...] | None = None) -> Source:
    return Source(name, origin, lambda: importlib.import_module(name), hooks=hooks)


def _is_module(name: str) -> bool:
    """Whether a dotted name can be found; a parent package that fails to import counts, so that loading shows why."""
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        # a parent that is not there is an unknown name; one that is there but lacks something it needs is not
        return not name.startswith(f"{error.name}.") and error.name != name
    except (Exception, SystemExit):  # noqa: BLE001 - raised by the parent package: loading raises it again, in words
        return True


def _is_module_here(name: str) -> bool:
    """Whether a dotted name can be found in the current folder, which a console script has not on its path."""
    try:
        here = str(Path.cwd())
    except FileNotFoundError:  # somebody removed it
        return False
    if here in sys.path:
        return False
    sys.path.append(here)  # at the end: nothing in it hides what is installed
    importlib.invalidate_caches()
    if _is_module(name):
        return True
    sys.path.remove(here)
    return False


def _file(name: str) -> Source:
    path = Path(name).expanduser().resolve()
    if not path.is_file() or path.suffix != ".py":
        fact = "is no .py file" if path.exists() else "does not exist"
        raise PluginError(f"--plugin {name}: {path} {fact}", remedy="give the path of a Python file")
    return Source(name, Origin.OPTION, lambda: _load_file(path))


def _load_file(path: Path) -> ModuleType:
    # the path is the module's name: it can shadow no other module, and tracebacks show it
    name = str(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python has no loader for {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as an import does: attrs and dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _unknown(name: str, known: Iterable[Source]) -> PluginError:
    try:
        importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        names = sorted({each for s in known for each in (s.name, s.distribution) if each})
        return PluginError(
            f"--plugin {name} is no importable module, no installed distribution with lmcache plugins and no .py file",
            remedy=f"{suggestion(name, names)}install it, go to the folder that holds it, or give the path of a .py "
            "file",
        )
    return PluginError(
        f"--plugin {name}: the distribution is installed, but announces nothing in the entry-point group {PROJECT!r}",
        remedy="name the module of the plugin instead, with dots",
    )
