"""`lmcache engines`: which engines are here, which versions their adapters know, and what was validated."""

from typing import TYPE_CHECKING

import click

from lmcache.cli.options import as_json, plugin_names

if TYPE_CHECKING:  # the command imports them when it runs
    from lmcache.engines.versions import EngineReport


@click.command(short_help="List engines: versions found and supported, what was validated.")
@plugin_names
@as_json
def engines(plugin_names: tuple[str, ...], as_json: bool) -> None:
    """List the engines that there are adapters for, without importing any of them.

    For each: the version that is installed, the versions that the adapter's tests have run on, what was validated and
    how. Exit code 1 if an engine is installed in a version that is none of those.
    """
    from lmcache.engines.versions import Fit, report_engine
    from lmcache.plugins.manager import PluginManager

    reports = [report_engine(adapter) for adapter in PluginManager(plugin_names).adapters()]
    if as_json:
        import json

        import attrs

        click.echo(json.dumps([attrs.asdict(each) for each in reports], indent=2))
    else:
        for each in reports:
            click.echo("\n".join(_lines(each)))
    if any(each.fit is Fit.OUTSIDE for each in reports):
        raise click.exceptions.Exit(1)


def _lines(report: "EngineReport") -> list[str]:
    found = f"{report.distribution} {report.version}, " if report.version else ""
    versions = [f"    supported: {report.supported}"] if report.supported else []
    return [f"{report.engine}: {found}{report.fit}", *versions, f"    {report.validation}: {report.status}"]
