"""`lmcache simulate`: which eviction policy, and how much memory, suits this traffic?"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmcache.cli.options import PathName, WholeNumber, as_json, plugin_names

if TYPE_CHECKING:
    from lmcache.core.policy import EvictionPolicy
    from lmcache.simulator.trace import Trace


@click.command(short_help="Replay request traces against eviction policies.")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=PathName(path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="A policy to replay with; repeatable. Default: all that there are. The optimum, opt, is always beside them.",
)
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    metavar="SIZE",
    help="Size of L1: a share of all distinct chunks (2%), bytes (8GB) or chunks (5000); repeatable. Default: "
    "1%, 2%, 5%, 10%, 20%, 40%.",
)
@click.option(
    "--eviction",
    type=click.Choice(["exact", "watermark"]),
    default="exact",
    show_default=True,
    help="exact: what is needed, when it is needed, as the server does. watermark: a fifth when four fifths are full.",
)
@click.option(
    "--chunk-size",
    type=WholeNumber("give a number of tokens, like 512", 1),
    default=512,
    show_default=True,
    metavar="TOKENS",
    help="Tokens that one id of a trace stands for. A recording says so itself.",
)
@click.option(
    "--bytes-per-token",
    type=WholeNumber("give a number of bytes, like 131072", 1),
    metavar="BYTES",
    help="KV of one token, over all layers and ranks, for capacities in bytes. A recording says so itself.",
)
@click.option(
    "--plot",
    "plot_file",
    metavar="FILE.png",
    type=PathName(dir_okay=False, path_type=Path),
    help="Draw hit ratio against capacity. Needs Matplotlib, which the extra `plot` brings.",
)
@plugin_names
@as_json
def simulate(
    traces: tuple[Path, ...],
    policies: tuple[str, ...],
    capacities: tuple[str, ...],
    eviction: str,
    chunk_size: int,
    bytes_per_token: int | None,
    plot_file: Path | None,
    plugin_names: tuple[str, ...],
    as_json: bool,
) -> None:
    """Replay request traces against eviction policies, at several capacities, and compare hit ratios.

    TRACE is a file of `lmcache server --record`, or a public trace: a JSON object a line with input_length and
    hash_ids. The policies are those that the server would run, in the server's own cache; each trace is replayed by
    itself.
    """
    from lmcache.simulator.capacity import fit_capacities, parse_capacity, usual_capacities
    from lmcache.simulator.compare import compare
    from lmcache.simulator.plot import check_plot, plot
    from lmcache.simulator.reading import read_trace
    from lmcache.simulator.report import as_dict, as_text

    makers = _makers(policies, plugin_names)
    asked = [parse_capacity(text) for text in dict.fromkeys(capacities)]
    if plot_file:
        check_plot(plot_file)
    loaded = [read_trace(path, chunk_size, bytes_per_token or 0) for path in dict.fromkeys(traces)]
    wished = [(asked, []) if asked else usual_capacities(trace) for trace in loaded]
    for trace, (wishes, _) in zip(loaded, wished, strict=True):
        fit_capacities(wishes, trace)  # whatever is wrong with any of them shall not come up after minutes
    found = []
    for trace, (wishes, too_small) in zip(loaded, wished, strict=True):
        with _progress(trace, len(wishes) * (len(makers) + 1)) as step:
            found.append(compare(trace, wishes, makers, batches=eviction == "watermark", progress=step))
        if not as_json:
            click.echo(("\n" if len(found) > 1 else "") + as_text(found[-1]))
            if too_small:
                click.echo(f"left out: {', '.join(too_small)}, which are less than the two chunks that a server needs")
    if as_json:
        click.echo(json.dumps({"traces": [as_dict(each) for each in found]}, indent=2))
    if plot_file:
        plot(found, plot_file)


def _makers(names: Sequence[str], plugins: Sequence[str]) -> "list[Callable[[], EvictionPolicy]]":
    """How to make each policy that is asked for, without the optimum. PluginError for one that cannot be made."""
    from lmcache.plugins.manager import PluginManager
    from lmcache.simulator.compare import OPT

    manager = PluginManager(plugins)
    wanted = [manager.find_policy(name).name for name in names if name.lower() != OPT]
    chosen = dict.fromkeys(wanted if names else manager.policies())
    makers = [functools.partial(manager.make_policy, name) for name in chosen]
    for make in makers:
        make()
    return list(makers)


@contextlib.contextmanager
def _progress(trace: "Trace", replays: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error; nothing where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(Path(trace.name).name, total=len(trace.events) * replays)
        yield lambda done: bar.advance(task, done)
