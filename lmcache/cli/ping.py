"""`lmcache ping`: whether a server answers, and how fast."""

import click

from lmcache.cli.options import address_text, as_json, server_address


@click.command(short_help="Ask a server whether it answers, and how fast.")
@server_address
@as_json
def ping(host: str, port: int, keys: str | None, as_json: bool) -> None:
    """Ask a server who it is and how long a round trip takes. Exit code 1 if none answers."""
    from lmcache.cli.conversation import conversation

    address = address_text(host, port)
    with conversation(host, port, keys) as (control, welcome):
        seconds = control.ping()
    if as_json:
        import json

        figures = {"address": address, "version": welcome.version, "protocol": welcome.protocol}
        click.echo(json.dumps({**figures, "epoch": welcome.epoch, "seconds": seconds}))
        return
    click.echo(
        f"{address} answered in {seconds * 1e3:.2f} ms: lmcache {welcome.version}, protocol {welcome.protocol}, "
        f"epoch {welcome.epoch}"
    )
