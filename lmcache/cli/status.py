"""`lmcache status`: what a server holds, who is connected, and what it has done."""

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from lmcache.cli.options import as_json, chunk_size_text, duration_text, server_address, size_text

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH_OF_A_PIPE = 160
"""Columns where nobody looks at a terminal."""


@click.command(short_help="Show what a server holds and has done.")
@server_address
@as_json
def status(host: str, port: int, keys: str | None, as_json: bool) -> None:
    """Show what a server holds, which engines are connected, and what it has done since it started."""
    from lmcache.cli.conversation import conversation

    with conversation(host, port, keys) as (control, _):
        report = control.status()
    if as_json:
        import json

        click.echo(json.dumps(report, indent=2))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE, highlight=False)
    with console.capture() as shown:
        for line in _summary(report):
            console.print(line, markup=False)
        for table in (_engines(report), *_tiers(report), *_held(report), _gauges(report), _counters(report)):
            console.print()
            console.print(table)
    for line in shown.get().splitlines():
        click.echo(line.rstrip())  # rich fills the last column with blanks


def _summary(report: Mapping[str, Any]) -> Iterable[str]:
    gauges, counters = report["gauges"], report["counters"]
    cell_bytes = report["cell_bytes"]
    yield (
        f"lmcache {report['version']} at {report['address']}, pid {report['pid']}, up {report['uptime_s']:.0f} s, "
        f"epoch {report['epoch']}"
    )
    yield (
        f"L1: {size_text(gauges['cells_used'] * cell_bytes)} of {size_text(report['l1_bytes'])} used, "
        f"{size_text(gauges['cells_backed'] * cell_bytes)} taken from the host{_huge_pages(report)}; "
        f"policy {report['eviction_policy']}, chunk size {chunk_size_text(report['chunk_size'])}"
    )
    asked, hit = counters["tokens_asked"], counters["tokens_hit"]
    yield f"hits: {hit} of {asked} tokens asked for" + (f" ({hit / asked:.1%})" if asked else "")


def _huge_pages(report: Mapping[str, Any]) -> str:
    size = report["huge_page_bytes"]
    return f" in huge pages of {size_text(size)}" if size else ""


def _engines(report: Mapping[str, Any]) -> "Table":
    table = _table("engine", "rank", "pid or host", "model", "chunk size", "namespace")
    namespaces = {each["digest"]: each for each in report["namespaces"]}
    for client in report["clients"]:
        namespace = namespaces.get(client["namespace"], {"facts": {}, "chunk_size": 0})
        table.add_row(
            client["role"],
            "" if client["role"] == "peer" else str(client["rank"]),  # another server has none
            str(client["pid"] or client["host"]),
            namespace["facts"].get("model", ""),
            str(namespace["chunk_size"]),
            client["namespace"],
        )
    if not report["clients"]:
        table.add_row("none connected")
    return table


_WORKS = {
    (True, True): "yes",
    (True, False): "reads only",
    (False, True): "writes only",
    (False, False): "left alone",
}
"""What is asked of a tier now: to read, to write."""


def _tiers(report: Mapping[str, Any]) -> "Iterable[Table]":
    """What stands behind L1, and whether it works."""
    if not report["tiers"]:
        return
    table = _table("tier", "works", "holds", "stored", "loaded", "lost", "errors", "timeouts", "damaged")
    for each in report["tiers"]:
        counters = each["counters"]
        table.add_row(
            each["tier"],
            _WORKS[each["usable"], each["writable"]] + (f": {each['trouble']}" if each["trouble"] else ""),
            "" if each["bytes"] is None else size_text(each["bytes"]),
            *(str(counters[name]) for name in ("stored", "loaded", "lost", "errors", "timeouts", "damaged")),
        )
    yield table


def _held(report: Mapping[str, Any]) -> "Iterable[Table]":
    """Tenants with limits and pinned prefixes, where there are any."""
    size = report["cell_bytes"]
    if report["tenants"]:
        table = _table("tenant", "holds", "quota", "guaranteed")
        for each in report["tenants"]:
            quota = size_text(each["quota_cells"] * size) if each["quota_cells"] is not None else "none"
            table.add_row(
                each["tenant"], size_text(each["cells"] * size), quota, size_text(each["guaranteed_cells"] * size)
            )
        yield table
    if report["prefix_pins"]:
        table = _table("pin", "tokens", "ends in", "namespace")
        for each in report["prefix_pins"]:
            table.add_row(str(each["pin"]), str(each["tokens"]), duration_text(each["ends_in_s"]), each["namespace"])
        yield table


def _gauges(report: Mapping[str, Any]) -> "Table":
    from lmcache.core.metrics import GAUGES

    table = _table("now", "", "")
    for name, value in report["gauges"].items():
        table.add_row(name, str(value), GAUGES[name][1] if name in GAUGES else "")
    return table


def _counters(report: Mapping[str, Any]) -> "Table":
    import attrs

    from lmcache.core.metrics import Counters

    sentences = {field.name: field.metadata["sentence"] for field in attrs.fields(Counters)}
    table = _table("since start", "", "")
    for name, value in report["counters"].items():
        table.add_row(name, str(value), sentences.get(name, ""))
    return table


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
