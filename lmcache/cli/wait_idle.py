"""`lmcache wait-idle`: returns when no store is in flight, so that what comes next finds everything published."""

import sys
from collections.abc import Callable

import click

from lmcache.cli.options import NumberRange, address_text, server_address


@click.command(short_help="Wait until no store is in flight on a server.")
@server_address
@click.option(
    "--timeout",
    type=NumberRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait; exit code 1 if stores are still in flight then.",
)
def wait_idle(host: str, port: int, keys: str | None, timeout: float) -> None:
    """Wait until no store is in flight. For scripts that drop an engine's cache, or stop it, and then expect hits."""
    from lmcache.cli.conversation import conversation

    with conversation(host, port, keys) as (control, _):
        control.wait_idle(timeout, _progress())
    click.echo(f"no store is in flight at {address_text(host, port)}")


def _progress() -> Callable[[int], None] | None:
    """Tells people, not programs, what is still in flight, once for each new number."""
    if not sys.stderr.isatty():
        return None
    shown = 0

    def show(in_flight: int) -> None:
        nonlocal shown
        if in_flight != shown:
            shown = in_flight
            click.echo(f"{in_flight} in flight", err=True)

    return show
