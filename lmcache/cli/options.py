"""Options that several commands share, and kinds of values that click does not know."""

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

GIB = 1 << 30


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


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def server_address(function: F) -> F:
    """`--host` and `--port` of a server to talk to."""
    for option in (
        click.option(
            "--port", type=click.IntRange(1, 65535), default=5555, show_default=True, help="Port of the server."
        ),
        click.option("--host", default="127.0.0.1", show_default=True, help="Host of the server."),
    ):
        function = option(function)
    return function


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
    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""
