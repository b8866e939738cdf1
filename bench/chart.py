"""The chart of the docs, of a report as written to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.host import render_host
from bench.report import render_value

# Steps of a fork from the outside in: QEMU's in greys, the guest's in colour.
_STEP_COLOURS = {
    "process start": "#8a94a3",
    "state load": "#b3bac5",
    "resume": "#d3d8de",
    "contract": "#5b9bd5",
    "first eval": "#1f5f9e",
}
_COLD = "#d9822b"
_FORK = "#1f5f9e"
_INK = "#222222"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#888888",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.hashsalt": "forkd",  # the same report gives the same file
}


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Two panels: all of a fork against one cold boot, and where the time of a child goes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 5.6), facecolor="white", layout="constrained")
        above, below = figure.subplots(2, 1)
        _draw_totals(above, report)
        _draw_steps(below, report)
        save(figure, path, _caption(report))


def _draw_totals(axes: Axes, report: Mapping[str, Any]) -> None:
    bars = [("cold boot of 1", report["figures"].get("cold_boot.total"), _COLD)]
    bars += [(f"fork of {n}", report["figures"].get(f"fork.{n}.wall"), _FORK) for n in report["settings"]["n"]]
    shown = [(label, entry, colour) for label, entry, colour in bars if entry is not None]
    axes.set_title("Until every VM has answered numpy.zeros(5).tolist()", loc="left", fontsize=11)
    for row, (_, entry, colour) in enumerate(shown):
        median = entry["median"]
        spread = [[median - entry["min"]], [entry["max"] - median]]
        axes.barh(row, median, color=colour, height=0.6)
        axes.errorbar(median, row, xerr=spread, fmt="none", ecolor=_INK, elinewidth=1, capsize=3)
        annotate(axes, row, entry["max"], f"{render_value(median)} s")
    finish(axes, [label for label, _, _ in shown], "seconds; whiskers: fastest and slowest round")


def _draw_steps(axes: Axes, report: Mapping[str, Any]) -> None:
    figures, sizes = report["figures"], report["settings"]["n"]
    axes.set_title("Where the time of one child goes (p50 of each step, and of the whole)", loc="left", fontsize=11)
    labelled = set()
    rows = [n for n in sizes if f"fork.{n}.wall" in figures]
    for row, n in enumerate(rows):
        left = 0.0
        for step, colour in _STEP_COLOURS.items():
            entry = figures.get(f"fork.{n}.step.{step}.p50")
            if entry is None:
                continue
            label = None if step in labelled else step
            labelled.add(step)
            axes.barh(row, entry["median"], left=left, color=colour, height=0.6, label=label)
            left += entry["median"]
        child = figures[f"fork.{n}.child.p50"]["median"]
        annotate(axes, row, left, f"{child:.0f} ms")
    if labelled:
        axes.legend(ncols=len(_STEP_COLOURS), loc="upper left", bbox_to_anchor=(0, -0.3), frameon=False, fontsize=9)
    finish(axes, [f"1 of {n}" for n in rows], "milliseconds from the start of its process")


def annotate(axes: Axes, row: float, at: float, text: str) -> None:
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.annotate(text, (at, row), xytext=(7, 0), textcoords="offset points", va="center", bbox=behind)


def finish(axes: Axes, labels: list[str], xlabel: str, *, margin: float = 0.12) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(x=margin)
    if axes.get_xscale() == "linear":
        axes.set_xlim(left=0)
    axes.set_xlabel(xlabel, fontsize=9)


def save(figure: Figure, path: Path, caption: str) -> None:
    figure.supxlabel(caption, fontsize=8, color="#555555")
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=120, metadata=metadata)


def render_rounds(settings: Mapping[str, Any]) -> str:
    return f"median of {settings['rounds_done']} rounds" if settings["rounds_done"] > 1 else "one round"


def _caption(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    guests = f"{settings['memory_mib']} MiB guests"
    return f"{render_host(report['host'])}; {guests}; {render_rounds(settings)}; no process started ahead"
