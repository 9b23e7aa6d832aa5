"""`lmcache bench`: what the cache costs here, beside what the machine can do."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import click

from lmcache.cli.options import PathName, as_json, plugin_names
from lmcache.errors import ConfigError, with_extra


@click.command(short_help="Measure costs, with the machine's own limits beside them.")
@click.option(
    "--engine",
    type=click.Choice(["vllm"]),
    help="Measure what the connector costs in a real engine instead; it must be installed. Takes some minutes.",
)
@click.option(
    "--l2",
    "tiers",
    multiple=True,
    metavar="URL",
    help="Measure this storage tier instead, as a server would use it, and what it is beside plain reads and writes. "
    "Repeatable. On a disk it works in a folder of its own inside the one that is named.",
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="Measure copies between this device and the arena instead, in every way there is; takes torch. `cpu` tries "
    "the bench where no GPU is.",
)
@click.option(
    "--markdown",
    type=PathName(dir_okay=False, writable=True),
    metavar="FILE",
    help="With --device: write a page of it as well, anew whenever more has been measured.",
)
@plugin_names
@click.option("--quick", is_flag=True, help="Fewer and smaller samples: whether it works, not how fast it is.")
@as_json
def bench(
    *,
    engine: str | None,
    tiers: tuple[str, ...],
    device: str | None,
    markdown: str | None,
    plugin_names: tuple[str, ...],
    quick: bool,
    as_json: bool,
) -> None:
    """Measure what the cache costs, as ratios in one run, with targets and the machine's own limits beside them.

    A missed target is a figure, not a failure: the exit code is 0 either way. Servers that are measured are started for
    it, on free ports, and stopped.
    """
    chosen = [name for name, value in (("--engine", engine), ("--l2", tiers), ("--device", device)) if value]
    if len(chosen) > 1:
        raise ConfigError(f"{chosen[0]} and {chosen[1]} are two benches", remedy="run one after the other")
    if markdown and not device:
        raise ConfigError("--markdown is for a device, and no --device names one", remedy="add --device cuda")
    if plugin_names and not tiers:
        raise ConfigError("--plugin is for tiers, and no --l2 names one", remedy="add --l2 URL, or leave --plugin out")
    try:
        from lmcache.bench import suite
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ConfigError("bench plays the engine, which takes NumPy", remedy=with_extra("numpy")) from None

    from lmcache.bench.machine import this_machine
    from lmcache.bench.report import as_dict, as_text

    # the servers that are measured end with this process, however it is ended
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    machine = this_machine()
    notes: list[str] = []
    with _progress() as step:
        if device:
            about, figures, notes = suite.measure_device(device, quick, step, Path(markdown) if markdown else None)
            machine = attrs.evolve(machine, device=about)
        elif tiers:
            figures = suite.measure_tiers(tiers, plugin_names, quick, step)
        else:
            figures = suite.measure_engine(engine, quick, step) if engine else suite.measure(quick, step)
    if as_json:
        import json

        click.echo(json.dumps(as_dict(machine, figures, quick=quick), indent=2))
        return
    click.echo(as_text(machine, figures, quick=quick))
    for note in notes:
        click.echo(f"not as planned: {note}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows on standard error what is measured: one line that changes, or none where nobody watches."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("starting") as status:
        yield status.update
