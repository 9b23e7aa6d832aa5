"""`lmcache unpin`: end pins before their time."""

import click

from lmcache.cli.options import WholeNumber, server_address


@click.command(short_help="End a pin before its time.")
@click.argument("pins", nargs=-1, required=True, type=WholeNumber("see `lmcache pin --list`", 1))
@server_address
def unpin(pins: tuple[int, ...], host: str, port: int, keys: str | None) -> None:
    """End PINS, numbers that `lmcache pin` printed: their chunks may be evicted again."""
    from lmcache.cli.conversation import conversation

    with conversation(host, port, keys) as (control, _):
        for each in pins:
            control.unpin(each)
            click.echo(f"pin {each} has ended")
