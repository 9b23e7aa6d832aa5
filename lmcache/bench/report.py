"""A bench's results, as a table for people and as JSON for programs."""

from collections.abc import Sequence
from typing import Any

import attrs

from lmcache import __version__
from lmcache.bench.figures import Figure
from lmcache.bench.machine import Machine

# numbered as in the list of cost targets (docs/reference/bench.md); rows 3 and 4 take a real engine
TITLES = {
    0: "the machine's own limits",
    1: "store and load of pages, engine memory ↔ arena, against a memcpy a page of the same bytes on the same core",
    2: "lookup",
    3: "engine step with the connector idle",
    4: "request with a full external hit",
    5: "start",
    6: "eviction policies: what a call costs with many chunks cached, against a thousand",
    7: "storage tiers: blobs between arena and tier, through a live server, against the same bytes moved plainly",
    8: "codecs, one thread, on normally distributed bfloat16 values",
    9: "lookups that L1 answers, beside a tier that never does",
    10: "store and load of pages, device ↔ arena, against one large pinned copy of the same bytes",
    11: "store and load of an engine on another host, over loopback, against a plain TCP copy of the same bytes",
}


def as_text(machine: Machine, figures: Sequence[Figure], *, quick: bool) -> str:
    """A block for each row of the cost targets, a line for each figure: its noise, and whether its target is met.

    A quick run is not judged: it has too few samples to tell a miss from noise.
    """
    lines = _machine_lines(machine)
    for row in sorted({figure.row for figure in figures}):
        lines += ["", f"{f'{row}  ' if row else ''}{TITLES[row]}"]
        lines += _aligned([_cells(figure, quick=quick) for figure in figures if figure.row == row])
    return "\n".join([*lines, "", _verdict(figures, quick=quick)])


def _verdict(figures: Sequence[Figure], *, quick: bool) -> str:
    brackets = "In brackets: the middle half of the samples, and how many."
    if quick:
        return f"Quick: too few samples to judge the targets by. {brackets}"
    missed = sum(figure.met is False for figure in figures)
    asked = sum(figure.met is not None for figure in figures)
    return f"{asked - missed} of {asked} targets met. {brackets}"


def as_dict(machine: Machine, figures: Sequence[Figure], *, quick: bool) -> dict[str, Any]:
    """Everything, with names that stay."""
    return {
        "version": __version__,
        "quick": quick,
        "machine": attrs.asdict(machine),
        "figures": [_figure_dict(figure) for figure in figures],
    }


def _figure_dict(figure: Figure) -> dict[str, Any]:
    target = figure.target and {"direction": figure.target.direction.name.lower(), "limit": figure.target.limit}
    return {**attrs.asdict(figure, filter=lambda a, _: a.name != "target"), "target": target, "met": figure.met}


def _machine_lines(machine: Machine) -> list[str]:
    gib = 1 << 30
    cache = f", last-level cache {machine.last_level_cache}" if machine.last_level_cache else ""
    memory = f"{machine.memory_bytes / gib:.1f} GB of memory, {machine.available_bytes / gib:.1f} GB available"
    lines = [
        f"{machine.cpu}, {machine.cores} cores{cache}, {memory}",
        f"huge pages: {machine.huge_pages}; Linux {machine.kernel}, Python {machine.python}; load {machine.load:.1f}",
    ]
    if machine.device:
        lines.append(machine.device)
    if machine.load > machine.cores / 2:
        lines.append("others are busy here: what is compared runs side by side, but expect noise")
    return lines


def _cells(figure: Figure, *, quick: bool) -> tuple[str, ...]:
    target = verdict = ""
    if figure.target:
        target = f"{figure.target.direction.value} {figure.target.limit:g}"
        verdict = "" if quick else "met" if figure.met else "missed"
    noise = f"({figure.low:.3g}–{figure.high:.3g}, {figure.samples})"
    beside = ", ".join(f"{name} {value:.3g}" for name, value in figure.beside.items())
    return figure.what, figure.subject, f"{figure.value:.3g} {figure.unit}", noise, target, verdict, beside


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
