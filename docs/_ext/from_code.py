"""Directives that write what the code says, so that the site cannot disagree with it.

{drawing} NAME          docs/drawings/NAME.svg, inline, so that it follows the theme's colours
{options} COMMAND       the options of `lmcache COMMAND`
{counters}, {gauges}    the numbers of core/metrics.py
{metric-families}       what `lmcache metrics` exports
{docstring} MODULE      a module's docstring, which is Markdown
{extra-config}          the keys of the vLLM connector
{tier-options} SCHEME   a storage tier's own options, and its secrets
{adapters}              engines and what has been proved of each
"""

import importlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import attrs
import click
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

DRAWINGS = Path(__file__).parent.parent / "drawings"


class _FromCode(SphinxDirective):
    """Renders the Markdown that `lines` gives."""

    optional_arguments: ClassVar[int] = 0

    def lines(self) -> Iterable[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        holder = nodes.container()
        self.state.nested_parse(StringList(list(self.lines()), self.name), self.content_offset, holder)
        return holder.children


class Drawing(SphinxDirective):
    """An SVG file, inline."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The drawing, with the content as its caption."""
        path = DRAWINGS / f"{self.arguments[0]}.svg"
        self.env.note_dependency(str(path))
        figure = nodes.container(classes=["drawing"])
        figure += nodes.raw("", path.read_text(), format="html")
        caption = nodes.container(classes=["drawing-caption"])
        self.state.nested_parse(self.content, self.content_offset, caption)
        figure += caption
        return [figure]


class Options(_FromCode):
    """The options of one command."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        """A table with a row for each option."""
        name = self.arguments[0]
        module = importlib.import_module(f"lmcache.cli.{name.replace('-', '_')}")
        command: click.Command = getattr(module, name.replace("-", "_"))
        context = click.Context(command, info_name=name)
        return _table(("option", "default", "what it does"), (_option(p, context) for p in _options(command)))


def _options(command: click.Command) -> list[click.Option]:
    """Of a command, or of all the commands of a group, each once."""
    commands = command.commands.values() if isinstance(command, click.Group) else [command]
    options = {p.name: p for each in commands for p in each.params if isinstance(p, click.Option) and not p.hidden}
    return list(options.values())


def _option(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    value = "" if option.is_flag else f" {option.make_metavar(context).removesuffix(' RANGE')}"
    repeated = option.multiple or option.is_flag or not option.show_default
    return f"`{option.opts[-1]}{value}`", "" if repeated else f"`{option.default}`", option.help or ""


class Counters(_FromCode):
    """What only grows."""

    def lines(self) -> Iterator[str]:
        """A table with a row for each counter."""
        from lmcache.core.metrics import Counters as Numbers

        rows = ((f"`{f.name}`", f.metadata["unit"], f.metadata["sentence"]) for f in attrs.fields(Numbers))
        return _table(("counter", "unit", "what it counts"), rows)


class TierCounters(_FromCode):
    """What only grows, for each tier."""

    def lines(self) -> Iterator[str]:
        """A table with a row for each counter."""
        from lmcache.core.metrics import TierCounters as Numbers

        rows = ((f"`{f.name}`", f.metadata["unit"], f.metadata["sentence"]) for f in attrs.fields(Numbers))
        return _table(("counter", "unit", "what it counts"), rows)


class Gauges(_FromCode):
    """What goes up and down."""

    def lines(self) -> Iterator[str]:
        """A table with a row for each gauge."""
        from lmcache.core.metrics import GAUGES

        return _table(("gauge", "unit", "what it tells"), ((f"`{name}`", *meaning) for name, meaning in GAUGES.items()))


class MetricFamilies(_FromCode):
    """What monitoring systems are told."""

    def lines(self) -> Iterator[str]:
        """A table with a row for each family of metrics."""
        from lmcache.cli.metric_families import FAMILIES

        labels = {each.name: ", ".join(f"`{label}`" for label in each.labels) for each in FAMILIES}
        rows = ((f"`{each.name}`", each.kind, labels[each.name], each.sentence) for each in FAMILIES)
        return _table(("metric", "kind", "labels", "what it tells"), rows)


class Docstring(_FromCode):
    """A module's docstring without its first sentence, which the page's own words replace."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        """The docstring's lines."""
        text = inspect.getdoc(importlib.import_module(self.arguments[0])) or ""
        if "\n\n" not in text:
            raise self.error(f"{self.arguments[0]} has no docstring of more than one paragraph")
        yield from text.split("\n\n", 1)[1].splitlines()


class ExtraConfig(_FromCode):
    """Keys that are accepted and set nothing; those that do are explained by hand, and a test compares."""

    def lines(self) -> Iterator[str]:
        """A table with a row for each such key."""
        from lmcache.engines.vllm.settings import NOTED

        return _table(("key", "why it sets nothing"), ((f"`{key}`", why) for key, why in NOTED.items()))


class Adapters(_FromCode):
    """Engines, as `lmcache plugins` knows them."""

    def lines(self) -> Iterator[str]:
        """A table with a row for each adapter."""
        from lmcache.plugins.manager import PluginManager

        return _table(
            ("engine", "versions", "validation", "what was validated"),
            (
                (
                    f"`{each.engine}`",
                    f"`{each.supported}`" if each.supported else "–",
                    str(each.validation),
                    _sentence(each.status),
                )
                for each in PluginManager().adapters()
            ),
        )


class TierOptions(_FromCode):
    """What a tier's URL may say beside what every tier's may."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        """A table with a row for each option and each secret."""
        from lmcache.plugins.manager import PluginManager

        tier = PluginManager().find_tier(self.arguments[0])
        options = {f"`{name}`": _sentence(text) for name, text in sorted(tier.options.items())}
        secrets = {f"`{name}_env`, `{name}_file`": _sentence(text) for name, text in sorted(tier.secrets.items())}
        return _table(("option", "what it says"), (options | secrets).items())


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from (_row(head), _row(["---"] * len(head)))
    yield from map(_row, rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    for name, directive in (
        ("drawing", Drawing),
        ("options", Options),
        ("counters", Counters),
        ("tier-counters", TierCounters),
        ("gauges", Gauges),
        ("metric-families", MetricFamilies),
        ("docstring", Docstring),
        ("extra-config", ExtraConfig),
        ("adapters", Adapters),
        ("tier-options", TierOptions),
    ):
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
