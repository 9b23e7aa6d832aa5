"""`lmcache geometry`: explains what a cache makes of a model, before anybody starts it or from a running server."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import click

from lmcache.cli.options import WholeNumber, as_json, server_keys

DEFAULT_CELL = 1 << 20
"""Bytes of a server's cells unless it is told otherwise."""

_TOKENS = WholeNumber("give a number of tokens, like 256")


@click.command(short_help="Explain a model's KV groups, chunk sizes and what they store.")
@click.argument("model", required=False)
@click.option("--server", "server", metavar="HOST:PORT", help="Ask a running server about its engines instead.")
@server_keys
@click.option(
    "--tensor-parallel-size",
    type=WholeNumber("give a number of ranks, like 8"),
    default=1,
    show_default=True,
    help="Ranks that the engine runs on.",
)
@click.option("--kv-dtype", default="auto", show_default=True, help="The engine's KV dtype: auto, bfloat16, fp8…")
@click.option(
    "--block-size",
    type=WholeNumber("give a number of tokens, like 64", low=1),
    help="Tokens per block. Default: what the engine takes.",
)
@click.option("--chunk-size", "chunk_sizes", type=_TOKENS, multiple=True, help="Tokens per chunk. Repeatable.")
@click.option("--prompt-tokens", "prompts", type=_TOKENS, multiple=True, help="Tokens of a prompt. Repeatable.")
@click.option(
    "--via",
    type=click.Choice(["auto", "vllm", "table"]),
    default="auto",
    show_default=True,
    help="Whose code sorts layers into groups: vLLM's, or our copy of its rules. auto: vLLM's where it is installed.",
)
@as_json
def geometry(
    model: str | None,
    server: str | None,
    keys: str | None,
    tensor_parallel_size: int,
    kv_dtype: str,
    block_size: int | None,
    chunk_sizes: tuple[int, ...],
    prompts: tuple[int, ...],
    via: str,
    as_json: bool,
) -> None:
    """Explain what the cache makes of a model: its KV groups, what is skipped, chunk sizes and what they store.

    MODEL is the config.json of a Hugging Face model, or its folder. Nothing of the model is loaded. With --server, the
    engines that are registered at a running server are explained instead.
    """
    from lmcache.cli.geometry_report import as_dicts, as_lines
    from lmcache.cli.geometry_subject import explain_model, explain_server

    if (model is None) == (server is None):
        raise click.UsageError("give either a model or --server; for a model: its config.json or its folder")
    if server is not None:
        _refuse("tensor_parallel_size", "kv_dtype", "block_size", "via")
    if model is not None:
        if keys is not None:
            raise click.UsageError("--keys is for a server that wants them; leave it out, for a model needs none")
        from lmcache.engines.models.running import Running

        with _progress() if via != "table" else nullcontext():
            subjects = [
                explain_model(model, Running(tensor_parallel_size, kv_dtype, block_size or 0), via, DEFAULT_CELL)
            ]
    else:
        subjects = explain_server(server or "", keys)
    if as_json:
        import json

        click.echo(json.dumps(as_dicts(subjects, chunk_sizes, prompts), indent=2))
        return
    for line in as_lines(subjects, chunk_sizes, prompts):
        click.echo(line)


def _refuse(*names: str) -> None:
    """Options about how a model would be run say nothing about an engine that runs."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{option} is for a model; leave it out with --server, whose engines have decided it"
            )


@contextmanager
def _progress() -> Iterator[None]:
    """Shows on standard error that something goes on, where somebody watches."""
    from rich.console import Console

    with Console(stderr=True).status("asking vLLM, which takes its time to start"):
        yield
