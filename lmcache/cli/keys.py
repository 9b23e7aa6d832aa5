"""`lmcache keys`: makes the keys that let engines and commands on other hosts in, and nobody else."""

from pathlib import Path

import click

from lmcache.cli.options import PathName


@click.group(short_help="Make keys for a server and its clients on other hosts.")
def keys() -> None:
    """Make keys that authenticate and encrypt everything on TCP."""


@keys.command(short_help="Make a server's keys and a client's.")
@click.argument("folder", type=PathName(file_okay=False, path_type=Path))
def new(folder: Path) -> None:
    """Write server.key and client.key to FOLDER, readable by you alone. Files that are there are never overwritten."""
    from lmcache.core.curve import new_keys

    server, client = new_keys(folder)
    click.echo(f"{server}: for `lmcache server --keys {server}`; keep it on the server's host")
    click.echo(
        f"{client}: for engines and commands, as --keys, LMCACHE_KEYS or lmcache.mp.keys; copy it to their hosts"
    )
