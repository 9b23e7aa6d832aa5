"""`lmcache tier`: look into a storage tier, verify what it holds, delete what is damaged."""

import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click

from lmcache.cli.options import as_json, plugin_names, size_text

if TYPE_CHECKING:
    from lmcache.core.blob_check import BlobReport
    from lmcache.core.tier import StorageTier
    from lmcache.plugins.opening import OpenedTier

_BATCH = 1000
"""Blobs that are handed to the threads at a time."""

_PATIENCE = 6
"""A blob may take so many times as long as the tier's `timeout_s`: nobody waits for an answer."""

_WIDTH_OF_A_PIPE = 160


@click.group(short_help="List, verify and repair what a storage tier holds.")
def tier() -> None:
    """Look into a storage tier. URL is what a server has after --l2; quote it.

    A folder of disk:// may be in use by a server while it is listed or verified; it must not while it is repaired.
    """


@tier.command("ls")
@click.argument("url")
@plugin_names
@as_json
def ls(url: str, plugin_names: tuple[str, ...], as_json: bool) -> None:
    """List the namespaces in a tier, and what each takes. Reads the header of every blob."""
    from lmcache.core.blob_check import look_at_header

    with _opened(url, plugin_names, "read") as opened:
        reports = _each(opened, lambda store, key, _, deadline: look_at_header(store, key, deadline), "looking")
        found = _Namespaces(reports)
    name = str(opened.settings.location)
    if as_json:
        click.echo(json.dumps({"tier": name, "namespaces": found.rows, **found.others()}, indent=2))
        return
    blobs, size = (sum(row[what] for row in found.rows) for what in ("blobs", "bytes"))
    click.echo(f"{name}: {_count(blobs, 'blob')}, {size_text(size)}{_tail(found.conditions)}")
    if found.rows:
        _print_table(found.rows)


@tier.command("verify")
@click.argument("url")
@plugin_names
@as_json
def verify(url: str, plugin_names: tuple[str, ...], as_json: bool) -> None:
    """Read every blob of a tier and verify it. The exit code is 1 if any is damaged or cannot be read."""
    with _opened(url, plugin_names, "read") as opened:
        found = _Verified(opened)
    found.show(as_json)
    if found.keys("damaged") or found.keys("unreadable"):
        sys.exit(1)


@tier.command("repair")
@click.argument("url")
@plugin_names
@as_json
def repair(url: str, plugin_names: tuple[str, ...], as_json: bool) -> None:
    """Read every blob of a tier and delete those that are damaged. The exit code is 1 if any cannot be read."""
    with _opened(url, plugin_names, "repair") as opened:
        found = _Verified(opened)
        opened.blobs.tier.delete(found.keys("damaged"), time.monotonic() + opened.settings.timeout_s * _PATIENCE)
    found.show(as_json, deleted=True)
    if found.keys("unreadable"):
        sys.exit(1)


class _Namespaces:
    """Blobs counted by namespace, chunk size, size of cells and codec."""

    def __init__(self, reports: Iterable["BlobReport"]) -> None:
        self.conditions: Counter[str] = Counter()
        groups: dict[tuple[str, int, int, str], dict[str, Any]] = {}
        for report in reports:
            self.conditions[report.condition] += 1
            if report.header is None:
                continue
            header = report.header
            facts = header.facts_in_clear()
            name = (_namespace(header.namespace, facts), header.chunk_size, _cell_bytes(facts), header.codec)
            if name not in groups:
                columns = ("namespace", "chunk_size", "cell_bytes", "codec")
                groups[name] = {**dict(zip(columns, name, strict=True)), "blobs": 0, "bytes": 0, "facts": facts}
            groups[name]["blobs"] += 1
            groups[name]["bytes"] += report.length
        self.rows = sorted(groups.values(), key=lambda row: (-row["bytes"], row["namespace"], row["codec"]))

    def others(self) -> dict[str, int]:
        """How many blobs are in no namespace."""
        return {name: self.conditions[name] for name in ("damaged", "foreign", "unreadable")}


def _namespace(digest: bytes, facts: Mapping[str, str]) -> str:
    """The digest that a server's status shows: without the size of cells, which tells blobs apart and no engines."""
    from lmcache.core.keys import namespace_digest

    engine = {name: value for name, value in facts.items() if name != "cell_bytes"}
    return (digest if engine == facts else namespace_digest(engine)).hex()


def _cell_bytes(facts: Mapping[str, str]) -> int:
    """Size of the cells that the blobs' server had; 0 if they do not say."""
    size = facts.get("cell_bytes", "")
    return int(size) if size.isdecimal() else 0


class _Verified:
    """Every blob of a tier, read and verified."""

    def __init__(self, opened: "OpenedTier") -> None:
        from lmcache.core.blob_check import check_blob

        self._name = str(opened.settings.location)
        self._conditions: Counter[str] = Counter()
        self._bytes = 0
        self._bad: list[BlobReport] = []
        start = time.monotonic()
        for report in _each(opened, check_blob, "verifying"):
            self._conditions[report.condition] += 1
            self._bytes += report.length
            if report.condition not in ("whole", "gone"):
                self._bad.append(report)
        self._seconds = time.monotonic() - start

    def keys(self, condition: str) -> list[str]:
        """Keys of the blobs that are in this condition."""
        return [report.key for report in self._bad if report.condition == condition]

    def show(self, as_json: bool, deleted: bool = False) -> None:
        """Print what was found, the damaged by their keys."""
        if as_json:
            lists = {name: self.keys(name) for name in ("damaged", "foreign", "unreadable")}
            whole = self._conditions["whole"]
            report = {"tier": self._name, "whole": whole, "bytes": self._bytes, **lists, "deleted": deleted}
            click.echo(json.dumps(report, indent=2))
            return
        for each in self._bad:
            done = " deleted" if deleted and each.condition == "damaged" else ""
            click.echo(f"{each.key} {each.condition}{done}{f': {each.cause}' if each.cause else ''}")
        speed = size_text(int(self._bytes / max(self._seconds, 1e-9)))
        click.echo(
            f"{self._name}: {_count(self._conditions['whole'], 'blob')} whole{_tail(self._conditions)}; "
            f"{size_text(self._bytes)} read, {speed} a second"
        )


@contextlib.contextmanager
def _opened(url: str, plugin_names: tuple[str, ...], mode: str) -> Iterator["OpenedTier"]:
    """The tier, opened so that it changes no more than it must, where it knows a `mode`."""
    from lmcache.core.tier_url import TierURL
    from lmcache.plugins.manager import PluginManager

    manager = PluginManager(plugin_names)
    parsed = TierURL.parse(url)
    if "mode" in manager.find_tier(parsed.scheme).options and "mode" not in parsed.query:
        url = f"{url}{'&' if '?' in url else '?'}mode={mode}"
    opened = manager.open_tier(url)
    try:
        yield opened
    finally:
        opened.blobs.tier.close()


def _each(
    opened: "OpenedTier", look: Callable[["StorageTier", str, int, float], "BlobReport"], what: str
) -> Iterator["BlobReport"]:
    """Look at every blob, several at a time, with progress on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    store, settings = opened.blobs.tier, opened.settings

    def one(blob: tuple[str, int]) -> "BlobReport":
        return look(store, *blob, time.monotonic() + settings.timeout_s * _PATIENCE)

    blobs = iter(store.keys())
    console = Console(stderr=True)
    with (
        ThreadPoolExecutor(settings.threads) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task(what, total=store.usage().blobs)
        while batch := list(itertools.islice(blobs, _BATCH)):
            for report in pool.map(one, batch):
                progress.advance(task)
                yield report


def _print_table(rows: Iterable[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("namespace", "model", "chunk size", "cells", "codec", "blobs", "size"):
        table.add_column(column, overflow="fold")
    for row in rows:
        model = row["facts"].get("model", "")
        cells = size_text(row["cell_bytes"]) if row["cell_bytes"] else ""
        counts = (str(row["chunk_size"]), cells, row["codec"] or "none", str(row["blobs"]), size_text(row["bytes"]))
        table.add_row(row["namespace"], model, *counts)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE, highlight=False)
    with console.capture() as shown:
        console.print(table, markup=False)
    for line in shown.get().splitlines():
        click.echo(line.rstrip())  # rich fills the last column with blanks


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _tail(conditions: Counter[str]) -> str:
    return "".join(f", {conditions[name]} {name}" for name in ("damaged", "foreign", "unreadable") if conditions[name])
