"""`lmcache plugins`: what is loaded, where it comes from, and what it brings."""

import click

from lmcache.cli.options import as_json, plugin_names


@click.command(short_help="List plugins, and what each brings.")
@plugin_names
@as_json
def plugins(plugin_names: tuple[str, ...], as_json: bool) -> None:
    """List the plugins that a server with the same --plugin flags would load, and what each of them brings."""
    import attrs

    from lmcache.plugins.manager import PluginDescription, PluginManager

    manager = PluginManager(plugin_names)
    found: list[PluginDescription] = manager.describe()
    if as_json:
        import json

        click.echo(json.dumps([attrs.asdict(each) for each in found], indent=2))
        return
    for each in found:
        click.echo(f"{each.name} ({f'{each.origin} {each.distribution}'.strip()})")
        for what, names in (
            ("eviction policies", each.policies),
            ("admission policies", each.admission),
            ("retention policies", each.retention),
            ("storage tiers", each.tiers),
            ("codecs", each.codecs),
            ("engines", [f"{name} ({manager.find_adapter(name).validation})" for name in each.adapters]),
            ("hooks", each.hooks),
        ):
            if names:
                click.echo(f"    {what}: {', '.join(names)}")
