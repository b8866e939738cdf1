"""The chart of two engines beside each other, of the section `lab` of a report as written to JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench.chart import STYLE, annotate, finish, render_rounds, save
from bench.host import render_host
from bench.lab_report import UNIQUE_SHARE_PERCENT, render_title
from bench.report import render_median, render_value

_COLOURS = {"firecracker": "#d9822b", "qemu": "#1f5f9e"}
_OTHERS = "#8a94a3"
_HEIGHT = 0.36
# A single row, its bars as thick as those of three.
_ONE_ROW = (1.2, -1.2)

# What stands beside the bar of an engine, for the figure as written to JSON.
Beside = Callable[[str, Mapping[str, Any]], str]


def draw_lab(section: Mapping[str, Any], path: Path) -> None:
    """Time above, on a scale where a fork and a boot can both be seen; CPU time and memory of one child below."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 6.8), facecolor="white", layout="constrained")
        figure.suptitle(render_title(section), fontsize=12, fontweight="bold")
        axes = figure.subplot_mosaic([["times", "times"], ["cpu", "memory"]], height_ratios=(1.35, 1))
        _draw_times(axes["times"], section)
        _draw_cpu(axes["cpu"], section)
        _draw_memory(axes["memory"], section)
        save(figure, path, _caption(section))


def _draw_times(axes: Axes, section: Mapping[str, Any]) -> None:
    axes.set_title("Until every VM has answered numpy.zeros(5).tolist()", loc="left", fontsize=11)
    rows = {"cold boot of 1": "cold_boot.total"}
    rows |= {f"fork of {n}": f"fork.{n}.wall" for n in section["settings"]["n"]}

    def beside(engine: str, figure: Mapping[str, Any]) -> str:
        cold = section["figures"].get(f"{engine}.cold_boot.total")
        if cold is None or cold is figure:
            return render_median(figure)
        return f"{render_median(figure)} ({render_value(figure['median'] / cold['median'])} of its cold boot)"

    labels = _draw_pairs(axes, section, rows, beside)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    finish(axes, labels, "seconds, on a logarithmic scale; whiskers: fastest and slowest round", margin=0.3)
    if labels:
        axes.legend(ncols=2, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)


def _draw_cpu(axes: Axes, section: Mapping[str, Any]) -> None:
    axes.set_title("CPU time of one child until then", loc="left", fontsize=11)
    rows = {f"1 of {n}": f"fork.{n}.cpu" for n in section["settings"]["n"]}
    labels = _draw_pairs(axes, section, rows, _render_beside)
    finish(axes, labels, "milliseconds, all its processes, mean", margin=0.3)


def _draw_memory(axes: Axes, section: Mapping[str, Any]) -> None:
    """As a share: guests of two engines do not touch the same memory."""
    axes.set_title("Unique memory of an idle child", loc="left", fontsize=11)
    most = max(section["settings"]["n"])

    def beside(engine: str, share: Mapping[str, Any]) -> str:
        held = section["figures"][f"{engine}.fork.{most}.idle_unique.largest"]
        return f"{render_value(share['median'])} % ({render_median(held)})"

    labels = _draw_pairs(axes, section, {f"largest of {most}": f"fork.{most}.unique_share"}, beside)
    axes.axvline(UNIQUE_SHARE_PERCENT, zorder=0.5, color="#222222", linewidth=1, linestyle=(0, (4, 3)))
    finish(axes, labels, "% of the guest's resident memory; dashed: its bound", margin=0.65)
    axes.set_ylim(*_ONE_ROW)


def _draw_pairs(axes: Axes, section: Mapping[str, Any], rows: Mapping[str, str], beside: Beside) -> list[str]:
    """The bars of all engines for each row that has one; returns the rows that have."""
    found, engines = section["figures"], section["settings"]["engines"]
    shown = [label for label, name in rows.items() if any(f"{engine}.{name}" in found for engine in engines)]
    for at, engine in enumerate(engines):
        entries = [(row, found.get(f"{engine}.{rows[label]}")) for row, label in enumerate(shown)]
        _draw_bars(axes, engine, [(row + (at - 0.5) * _HEIGHT, entry) for row, entry in entries if entry], beside)
    return shown


def _draw_bars(
    axes: Axes,
    engine: str,
    bars: Sequence[tuple[float, Mapping[str, Any]]],
    beside: Beside,
) -> None:
    for number, (row, entry) in enumerate(bars):
        median = entry["median"]
        label = None if number else engine
        axes.barh(row, median, color=_COLOURS.get(engine, _OTHERS), height=_HEIGHT, label=label)
        spread = [[median - entry["min"]], [entry["max"] - median]]
        axes.errorbar(median, row, xerr=spread, fmt="none", ecolor="#222222", elinewidth=1, capsize=2)
        annotate(axes, row, entry["max"], beside(engine, entry))


def _render_beside(_engine: str, figure: Mapping[str, Any]) -> str:
    return render_median(figure)


def _caption(section: Mapping[str, Any]) -> str:
    settings = section["settings"]
    return f"{render_host(section['host'])}; {settings['memory_mib']} MiB guests; {render_rounds(settings)}"
