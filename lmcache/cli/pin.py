"""`lmcache pin`: keep what is stored of a prompt, for a while, whatever else is stored meanwhile."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmcache.cli.options import as_json, duration_text, seconds, server_address

if TYPE_CHECKING:
    from lmcache.core.control import Control


@click.command(short_help="Keep a prompt's stored chunks for a while, whatever comes.")
@click.option(
    "--tokens",
    "source",
    metavar="FILE",
    help="The prompt's token ids: a JSON list, or what an engine's /tokenize answers; - reads standard input.",
)
@click.option("--ttl", type=seconds, metavar="TIME", help="How long: 90s, 10m, 2h, 7d. There is no pin without an end.")
@click.option("--model", help="The model whose engine stored it, where engines of several are registered.")
@click.option("--namespace", help="The namespace, by the first digits of its digest, where one model has several.")
@click.option("--salt-env", metavar="VARIABLE", help="Variable of the environment with the requests' cache salt.")
@click.option("--list", "listing", is_flag=True, help="List the pins that there are.")
@server_address
@as_json
def pin(
    source: str | None,
    ttl: float | None,
    model: str | None,
    namespace: str | None,
    salt_env: str | None,
    listing: bool,
    host: str,
    port: int,
    keys: str | None,
    as_json: bool,
) -> None:
    """Keep what is stored of a prompt until its time is over, or `lmcache unpin` ends it.

    What is not stored yet is not pinned: send the prompt to the engine first. Prompts with a LoRA or with images are
    stored under other keys, which tokens do not tell.
    """
    from lmcache.cli.conversation import conversation

    if not listing and (source is None or ttl is None):
        raise click.UsageError("a pin needs --tokens FILE and --ttl TIME; --list shows those that there are")
    tokens = [] if source is None else _token_ids(source)
    with conversation(host, port, keys) as (control, _):
        if listing:
            _show(control.status()["prefix_pins"], as_json)
            return
        chosen = _chosen(control.status()["namespaces"], model, namespace)
        number, pinned = _pin(control, chosen, tokens, ttl or 0.0, _salt(salt_env))
    if as_json:
        click.echo(json.dumps({"pin": number, "tokens": pinned, "of": len(tokens)}))
    elif number:
        click.echo(f"pin {number}: {pinned} of {len(tokens)} tokens are kept for {duration_text(ttl or 0.0)}")
    if not number:
        raise click.ClickException(
            f"nothing of these {len(tokens)} tokens is stored; send the prompt to an engine first, with the same salt"
        )


def _pin(control: "Control", namespace: dict[str, Any], tokens: list[int], ttl: float, salt: str) -> tuple[int, int]:
    from lmcache.core.keys import ChainHasher, chain_root

    hasher = ChainHasher(chain_root({"salt": salt} if salt else {}), namespace["chunk_size"])
    pinned = control.pin(bytes.fromhex(namespace["digest"]), hasher.extend_to(tokens), ttl)
    return pinned.pin, pinned.tokens


def _token_ids(source: str) -> list[int]:
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise click.ClickException(
            f"--tokens {source} cannot be read: {error}; give a file with a JSON list"
        ) from error
    tokens = found.get("tokens") if isinstance(found, dict) else found
    if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < 1 << 32 for each in tokens):
        raise click.ClickException(f"--tokens {source} holds no list of token ids; write something like [1, 5, 9]")
    return tokens


def _salt(variable: str | None) -> str:
    if variable is None:
        return ""
    salt = os.environ.get(variable)
    if salt is None:
        raise click.ClickException(f"--salt-env {variable}: there is no such variable; export it first")
    return salt


def _chosen(namespaces: list[dict[str, Any]], model: str | None, digest: str | None) -> dict[str, Any]:
    """The one namespace that is meant."""
    fitting = [
        each
        for each in namespaces
        if each["digest"].startswith(digest or "") and model in (None, each["facts"].get("model"))
    ]
    if len(fitting) == 1:
        return fitting[0]
    known = "; ".join(f"{each['digest']} ({each['facts'].get('model') or 'no model'})" for each in namespaces)
    if not namespaces:
        raise click.ClickException("no engine has registered with this server; start one first")
    what = "several namespaces are" if fitting else "no namespace is"
    raise click.ClickException(f"{what} meant; name one with --model or --namespace: {known}")


def _show(pins: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(pins))
        return
    for each in pins:
        ends = duration_text(each["ends_in_s"])
        click.echo(f"pin {each['pin']}: {each['tokens']} tokens in {each['namespace']}, ends in {ends}")
    if not pins:
        click.echo("no pins")
