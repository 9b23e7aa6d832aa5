"""Tables of classes that plugins offer under a name, which users select by it."""

import inspect
from typing import Generic, TypeVar

import attrs

from lmcache.errors import PluginError
from lmcache.plugins.sources import Source, suggestion

C = TypeVar("C")


@attrs.frozen
class _Offer(Generic[C]):
    name: str
    value: type[C]
    owner: Source


class Offers(Generic[C]):
    """Classes derived from `base`, each under the name in its attribute `name_in`, compared without regard to case."""

    def __init__(self, what: str, base: type[C], name_in: str) -> None:
        self._what = what
        self._base = base
        self._name_in = name_in
        self._offers: dict[str, _Offer[C]] = {}

    def add_all(self, result: object, owner: Source, hook: str) -> None:
        """Take what `owner` returned from `hook`; PluginError unless it is a list of classes with own names."""
        if not isinstance(result, list | tuple):
            raise PluginError(f"{owner} returned {result!r} from {hook}", remedy="return a list of classes")
        for each in result:
            self._add(each, owner)

    def find(self, name: str) -> type[C]:
        """The class of that name; PluginError listing the known names where there is none."""
        offer = self._offers.get(name.casefold())
        if offer is None:
            names = [offer.name for offer in self._offers.values()]
            if not names:
                raise PluginError(
                    f"no plugin offers the {self._what} {name!r}, nor any other",
                    remedy="add a plugin that does with --plugin, or leave out fewer with --plugin no:NAME",
                )
            raise PluginError(
                f"no plugin offers the {self._what} {name!r}; known: {', '.join(sorted(names))}",
                remedy=f"{suggestion(name, names)}use a known one, or add the plugin that offers it with --plugin",
            )
        return offer.value

    def names(self, owner: Source | None = None) -> tuple[str, ...]:
        """Names as they are spelt by the plugins, of one plugin or of all."""
        return tuple(offer.name for offer in self._offers.values() if owner is None or offer.owner is owner)

    def _add(self, value: object, owner: Source) -> None:
        if not (inspect.isclass(value) and issubclass(value, self._base)):
            raise PluginError(
                f"{owner} offers {value!r} as {self._what}",
                remedy=f"offer a class that derives from {self._base.__name__}",
            )
        name = getattr(value, self._name_in, None)
        if not isinstance(name, str) or not name or name.split() != [name]:
            raise PluginError(
                f"{owner} offers {value.__name__}, whose {self._name_in} is {name!r}",
                remedy=f"set its class attribute {self._name_in!r} to one word",
            )
        missing = sorted(getattr(value, "__abstractmethods__", ()))
        if missing:
            raise PluginError(
                f"{owner} offers {value.__name__}, which lacks {', '.join(missing)}", remedy="implement what it lacks"
            )
        taken = self._offers.setdefault(name.casefold(), _Offer(name, value, owner))
        if taken.value is not value:
            raise PluginError(
                f"{taken.owner} and {owner} both offer the {self._what} {name!r}",
                remedy=f"{taken.owner.leave_out('the first')}, or {owner.leave_out('the second')}",
            )
