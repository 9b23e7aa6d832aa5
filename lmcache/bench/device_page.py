"""A Markdown page of what was measured on a device, ready for docs/benchmarks: whoever reads it has no such machine."""

import datetime
from collections.abc import Iterator, Sequence

from lmcache import __version__
from lmcache.bench.figures import Figure
from lmcache.bench.machine import Machine

SHARE = 0.9
"""Of one pinned copy that store and load are to reach, each."""
SHAPES_WANTED = 4
SLOWED = "a matrix product is slowed by"


def as_markdown(machine: Machine, figures: Sequence[Figure], notes: Sequence[str], *, quick: bool) -> str:
    """Everything that the page needs: the machine, the tables, what was reached, what did not work."""
    card = machine.device.partition(";")[0]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [f"# {card}, {today}", "", *_about(machine)]
    if quick:
        lines += ["", "**A quick run: it shows that the bench works, and none of its figures means anything.**"]
    copies = [figure for figure in figures if figure.what in {"store", "load"}]
    lines += ["", "## Store and load", "", *_copies(copies), "", *_verdict(copies)]
    slowed = [figure for figure in figures if figure.what == SLOWED]
    lines += ["", "## A matrix product beside it", "", *_slowed(slowed)]
    lines += ["", "## What else was seen", "", *[f"- {note}" for note in notes or ["nothing"]]]
    return "\n".join([*lines, ""])


def _about(machine: Machine) -> Iterator[str]:
    yield "|  |  |"
    yield "|---|---|"
    yield f"| device | {machine.device} |"
    yield f"| host | {machine.cpu}, {machine.cores} cores, {machine.memory_bytes / (1 << 30):.0f} GiB |"
    yield f"| system | Linux {machine.kernel}, Python {machine.python}, huge pages: {machine.huge_pages} |"
    yield f"| lmcache | {__version__} |"


def _copies(figures: Sequence[Figure]) -> Iterator[str]:
    """A row for each shape and way, both directions side by side."""
    yield "GiB/s, and in brackets the share of one large pinned copy of as many bytes in the same direction, taken in"
    yield "turns: *the ceiling*. Medians; the last column has the middle half of the shares."
    yield ""
    yield "| page shape | way | store | load | ceiling, store and load | middle halves |"
    yield "|---|---|---|---|---|---|"
    for subject in dict.fromkeys(figure.subject for figure in figures):
        pair = {figure.what: figure for figure in figures if figure.subject == subject}
        shape, _, way = subject.rpartition(", ")
        ceilings = " and ".join(f"{f.beside['one pinned copy, GiB/s']:.1f}" for f in pair.values())
        halves = ", ".join(f"{f.low:.2f} to {f.high:.2f}" for f in pair.values())
        yield f"| {shape} | {way} | {_speed(pair.get('store'))} | {_speed(pair.get('load'))} | {ceilings} | {halves} |"


def _speed(figure: Figure | None) -> str:
    return f"{figure.beside['GiB/s']:.1f} ({figure.value:.2f})" if figure else "–"


def _verdict(figures: Sequence[Figure]) -> Iterator[str]:
    """The best way for each shape, and whether the target is met."""
    shares: dict[str, dict[str, list[float]]] = {}
    for figure in figures:
        shape, _, way = figure.subject.rpartition(", ")
        shares.setdefault(shape, {}).setdefault(way, []).append(figure.value)
    met = 0
    for shape, ways in shares.items():
        whole = {way: min(both) for way, both in ways.items() if len(both) == 2}
        if whole:
            best = max(whole, key=lambda way: whole[way])
            met += whole[best] >= SHARE
            yield f"- {shape}: best is `{best}`, {whole[best]:.2f} of the ceiling in its slower direction"
    yield f"- target: at least {SHARE:g} both ways for {SHAPES_WANTED} of 5 shapes; reached for {met} of {len(shares)}"


def _slowed(figures: Sequence[Figure]) -> Iterator[str]:
    yield "By so much longer it took while objects of the first shape were stored and loaded without a pause."
    yield "Target: 5 % at most."
    yield ""
    yield "| way | slowed by | middle half | objects moved meanwhile |"
    yield "|---|---|---|---|"
    for figure in figures:
        way = figure.subject.rpartition(", ")[2]
        moved = figure.counts["objects_moved_meanwhile"]
        yield f"| {way} | {figure.value:.1f} % | {figure.low:.1f} to {figure.high:.1f} % | {moved} |"
