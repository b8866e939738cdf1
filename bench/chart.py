"""The chart of the docs, of a report as written to JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.figures import FORK, START, WAYS
from bench.host import render_host
from bench.report import render_value

# Steps of a fork from the outside in: QEMU's in greys, the guest's in colour.
_STEP_COLOURS = {
    "process start": "#8a94a3",
    "state load": "#b3bac5",
    "confine": "#6b7480",
    "quiescence": "#6b7480",
    "clone": "#8a94a3",
    "descriptors": "#a5adb9",
    "threads": "#bfc6cf",
    "resume": "#d3d8de",
    "contract": "#5b9bd5",
    "first eval": "#1f5f9e",
}
_COLD = "#d9822b"
_BARS = {FORK: "#1f5f9e", START: "#8a94a3"}
_INK = "#222222"
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 9, "columnspacing": 1.2, "handlelength": 1.4}
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
    """All of a fork against one cold boot, and where the time of a child goes, on a scale of its own for each way."""
    ways = report["settings"].get("ways", [""])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 3.2 + 2.5 * len(ways)), facecolor="white", layout="constrained")
        heights = [1.0 + 0.35 * (len(ways) - 1), *[1.0] * len(ways)]
        above, *below = figure.subplots(1 + len(ways), 1, height_ratios=heights)
        _draw_totals(above, report, ways)
        for axes, way in zip(below, ways, strict=True):
            _draw_steps(axes, report, way)
        save(figure, path, _caption(report))


def _place(n: int, way: str) -> str:
    return f"fork.{n}.{way}" if way else f"fork.{n}"


def _draw_totals(axes: Axes, report: Mapping[str, Any], ways: Sequence[str]) -> None:
    found = report["figures"]
    bars = [("cold boot of 1", found.get("cold_boot.total"), _COLD)]
    for n in report["settings"]["n"]:
        for way in ways:
            label = f"fork of {n}{way and f' {WAYS[way]}'}"
            bars.append((label, found.get(f"{_place(n, way)}.wall"), _BARS[way or FORK]))
    shown = [(label, entry, colour) for label, entry, colour in bars if entry is not None]
    axes.set_title("Until every VM has answered numpy.zeros(5).tolist()", loc="left", fontsize=11)
    for row, (_, entry, colour) in enumerate(shown):
        median = entry["median"]
        spread = [[median - entry["min"]], [entry["max"] - median]]
        axes.barh(row, median, color=colour, height=0.6)
        axes.errorbar(median, row, xerr=spread, fmt="none", ecolor=_INK, elinewidth=1, capsize=3)
        annotate(axes, row, entry["max"], f"{render_value(median)} s")
    finish(axes, [label for label, _, _ in shown], "seconds; whiskers: fastest and slowest round")


def _draw_steps(axes: Axes, report: Mapping[str, Any], way: str) -> None:
    figures, sizes = report["figures"], report["settings"]["n"]
    title = f"Where the time of one child{way and f' {WAYS[way]}'} goes (p50 of each step, and of the whole)"
    axes.set_title(title, loc="left", fontsize=11)
    labelled = set()
    rows = [n for n in sizes if f"{_place(n, way)}.wall" in figures]
    for row, n in enumerate(rows):
        left = 0.0
        for step, colour in _STEP_COLOURS.items():
            entry = figures.get(f"{_place(n, way)}.step.{step}.p50")
            if entry is None:
                continue
            label = None if step in labelled else step
            labelled.add(step)
            axes.barh(row, entry["median"], left=left, color=colour, height=0.6, label=label)
            left += entry["median"]
        child = figures[f"{_place(n, way)}.child.p50"]["median"]
        annotate(axes, row, left, f"{render_value(child)} ms")
    if labelled:
        axes.legend(ncols=len(labelled), loc="upper left", bbox_to_anchor=(-0.12, -0.3), **_LEGEND)
    begin = "from the start of its process"
    if way == FORK:
        begin = "from when it is asked for; until quiescence it waits for its turn, too"
    finish(axes, [f"1 of {n}" for n in rows], f"milliseconds {begin}")


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
    ahead = (
        "no process started ahead but the template" if FORK in settings.get("ways", ()) else "no process started ahead"
    )
    return f"{render_host(report['host'])}; {guests}; {render_rounds(settings)}; {ahead}"
