"""Hit ratio against capacity, a curve for each policy, the optimum beside them. Imports Matplotlib when asked to."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache.errors import ConfigError, LMCacheError, with_extra
from lmcache.simulator.compare import OPT, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 1 << 30

_MARKERS = "osD^vP*X<>h"


def check_plot(path: Path) -> None:
    """Raise ConfigError if no plot can be written to `path`: before the replays, not after them."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigError(
            f"--plot needs Matplotlib, which cannot be imported: {error}", remedy=with_extra("plot")
        ) from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise ConfigError(
            f"--plot {path} has no ending that tells a format", remedy=f"use one of {', '.join(sorted(known))}"
        )
    if not (path.parent.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ConfigError(f"--plot {path} cannot be written", remedy="name a file in a folder that is yours")


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw comparisons side by side. Raises LMCacheError when the file cannot be written after all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(comparisons), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for number, found in enumerate(comparisons):
        _draw(figure.add_subplot(1, len(comparisons), number + 1), found)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise LMCacheError(
            f"--plot {path} cannot be written: {error.strerror}", remedy="make room on the disk"
        ) from error


def _draw(axes: "Axes", found: Comparison) -> None:
    order = sorted(range(len(found.capacities)), key=lambda number: found.capacities[number].cells)
    sizes = [found.capacities[number] for number in order]
    sized = found.trace.sized
    at = [(size.bytes or 0) / GIB if sized else size.chunks for size in sizes]
    for column, policy in enumerate(found.policies):
        ratios = [found.rows[number][1][column].hit_ratio * 100 for number in order]
        if policy == OPT:
            axes.plot(at, ratios, "k--", label="opt (knows the future)")
        else:
            axes.plot(at, ratios, marker=_MARKERS[column % len(_MARKERS)], markersize=4, label=policy)
    axes.axhline(found.most * 100, color="0.7", linewidth=1, label="room for everything")
    axes.set_xscale("log")
    axes.set_xticks(at, [size.text for size in sizes], minor=False)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("capacity, GB" if sized else "capacity, chunks")
    axes.set_ylabel("hit ratio, % of the tokens asked for")
    axes.set_title(Path(found.trace.name).name)
    axes.legend(fontsize="small")
