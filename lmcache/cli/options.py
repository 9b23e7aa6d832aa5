"""Options that several commands share, and kinds of values that click does not know."""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from lmcache.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

GIB = 1 << 30


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(size: int) -> str:
    """A number of bytes for people: in the largest unit that it fills, with one decimal."""
    unit = max(0, size.bit_length() - 1) // 10
    unit = min(unit, len(_UNITS) - 1)
    return f"{size / (1 << 10 * unit):.{min(unit, 1)}f} {_UNITS[unit]}"


def chunk_size_text(chunk_size: int | None) -> str:
    """A server's chunk size for people; without one, how each engine gets its own."""
    return f"{chunk_size} tokens" if chunk_size else "256 tokens or what each engine needs"


def address_text(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class WholeNumber(click.ParamType):  # type: ignore[type-arg]  # generic only in recent click
    """A whole number; whoever writes something else, or nothing, reads what is `allowed`.

    Without bounds, its value is checked by what it is a setting of.
    """

    name = "integer"

    def __init__(self, allowed: str, low: int | None = None, high: int | None = None) -> None:
        self.allowed = allowed
        self._low = low
        self._high = high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """`value`, of a command line or a default, as a number."""
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number; {self.allowed}", param, ctx)
        if (self._low is not None and number < self._low) or (self._high is not None and number > self._high):
            self.fail(f"{number} is out of range; {self.allowed}", param, ctx)
        return number


class NumberRange(click.FloatRange):
    """A range of numbers. `nan` is in none, though click's own ranges take it: it compares to nothing."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """`value` as a number."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self._describe_range()}", param, ctx)
        return number


class PathName(click.Path):
    """A path. Not the empty one, which stands for the current folder, and comes of a variable that is not set."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """`value` as what the type is asked for."""
        if value == "":
            self.fail("'' is no path; write one, or . for the current folder", param, ctx)
        return super().convert(value, param, ctx)


def gigabytes(text: str) -> int:
    """Bytes of a positive number of GB, written `0.5` or `100`; anything else fails with what to write instead."""
    try:
        number = float(text)
    except ValueError:
        digits = text.lower().rstrip("gib ")
        hint = f"write {digits}" if _is_number(digits) else "write something like 0.5 or 100"
        raise click.BadParameter(f"{text!r} is not a number; the flag counts GB (2^30 bytes): {hint}") from None
    if not (math.isfinite(number) and number > 0):
        raise click.BadParameter(f"{text} is not a size; give a positive number of GB")
    return round(number * GIB)


def tenant_sizes(flag: str, texts: Iterable[str], whole: int) -> dict[str, int]:
    """Bytes for each tenant in `TENANT=GB` or `TENANT=25%` of `whole`; ConfigError for anything else."""
    sizes: dict[str, int] = {}
    for text in texts:
        tenant, equals, size = text.rpartition("=")
        number = size.removesuffix("%")
        if not (equals and tenant) or not _is_number(number) or not 0 < float(number) < math.inf:
            raise ConfigError(
                f"{flag} {text!r} is no limit of a tenant", remedy=f"write {flag} NAME=2.5 (GB) or {flag} NAME=25%"
            )
        if tenant in sizes:
            raise ConfigError(f"{flag} gives tenant {tenant} two sizes", remedy="give each tenant one")
        sizes[tenant] = round(float(number) * (whole / 100 if size.endswith("%") else GIB))
    return sizes


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


server_keys = click.option(
    "--keys",
    metavar="PATH",
    help="Keys that the server wants: client.key of `lmcache keys new`, or its folder. Without the flag, what the "
    "variable LMCACHE_KEYS names.",
)
"""For every command that talks to a server."""


def server_address(function: F) -> F:
    """`--host`, `--port` and `--keys` of a server to talk to."""
    for option in (
        server_keys,
        click.option(
            "--port",
            type=WholeNumber("use 1 to 65535", 1, 65535),
            default=5555,
            show_default=True,
            help="Port of the server.",
        ),
        click.option("--host", default="127.0.0.1", show_default=True, help="Host of the server."),
    ):
        function = option(function)
    return function


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """Seconds of a positive span of time, written `90s`, `10m`, `2h` or `7d`."""
    unit = _SECONDS.get(text[-1:])
    if unit is None or not _is_number(text[:-1]) or not 0 < float(text[:-1]) * unit < math.inf:
        raise click.BadParameter(f"{text!r} is not a span of time; write something like 90s, 10m, 2h or 7d")
    return float(text[:-1]) * unit


def duration_text(span: float) -> str:
    """A span of time for people, in the largest unit that it fills."""
    unit = next((name for name in ("d", "h", "m") if span >= _SECONDS[name]), "s")
    return f"{span / _SECONDS[unit]:.3g} {unit}"


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
"""For every command that prints figures."""

plugin_names = click.option(
    "--plugin",
    "plugin_names",
    multiple=True,
    metavar="NAME",
    help="Load a plugin: a module (pkg.module), a .py file or a distribution; no:NAME leaves one out. Repeatable.",
)
"""For every command that loads plugins."""


def nearest(wrong: str, known: Iterable[str]) -> str:
    """`did you mean …?` for a misspelt name; empty if nothing is near."""
    import difflib  # for somebody who has mistyped

    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""
