"""How a chart is drawn: panels of bars, with texts, whiskers and a limit. What each shows is made in charts.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

INK = "#222222"
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#888888",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "forkd",  # the same report gives the same file
}


@dataclass(frozen=True)
class Bar:
    """`parts` are lengths one after the other, each with its colour and its name in the legend.

    Whiskers go from the least to the most; a line goes from the end of the bar to `line_to`. `shift` is from the
    middle of its row.
    """

    label: str
    parts: Sequence[tuple[float, str, str]]
    text: str
    whiskers: tuple[float, float] | None = None
    line_to: float | None = None
    shift: float = 0.0


@dataclass(frozen=True)
class Panel:
    """A row for each of `labels`, or for each bar."""

    title: str
    below: str
    bars: Sequence[Bar] = ()
    labels: Sequence[str] = ()
    margin: float = 0.3
    height: float = 0.6
    cap: float = 3
    limit: float | None = None
    legend: Mapping[str, Any] | None = None
    rows: tuple[float, float] | None = None
    log: bool = False


@dataclass(frozen=True)
class Chart:
    """`layout` has in each row the names of its panels."""

    height: float
    layout: Sequence[Sequence[str]]
    panels: Mapping[str, Panel]
    caption: str
    title: str = ""
    heights: Sequence[float] | None = None


def draw_chart(chart: Chart, path: Path) -> None:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.6, chart.height), facecolor="white", layout="constrained")
        if chart.title:
            figure.suptitle(chart.title, fontsize=12, fontweight="bold")
        axes = figure.subplot_mosaic([list(row) for row in chart.layout], height_ratios=chart.heights)
        for name, panel in chart.panels.items():
            _draw_panel(axes[name], panel)
        figure.supxlabel(chart.caption, fontsize=8, color="#555555")
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11)
    named: set[str] = set()
    labels = panel.labels or [bar.label for bar in panel.bars]
    for bar in panel.bars:
        _draw_bar(axes, panel, bar, labels.index(bar.label) + bar.shift, named)
    if panel.limit is not None:
        # Behind the texts, which say the same in numbers.
        axes.axvline(panel.limit, zorder=0.5, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    if panel.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(x=panel.margin)
    if not panel.log:
        axes.set_xlim(left=0)
    axes.set_xlabel(panel.below, fontsize=9)
    if panel.rows:
        axes.set_ylim(*panel.rows)
    if panel.legend and named:
        axes.legend(**{"ncols": len(named), "frameon": False, "fontsize": 9, **panel.legend})


def _draw_bar(axes: Axes, panel: Panel, bar: Bar, row: float, named: set[str]) -> None:
    end = 0.0
    for length, colour, name in bar.parts:
        label = name if name and name not in named else None
        axes.barh(row, length, left=end, color=colour, height=panel.height, label=label)
        named |= {name} if name else set()
        end += length
    text_at = end
    if bar.whiskers:
        spread = [[end - bar.whiskers[0]], [bar.whiskers[1] - end]]
        axes.errorbar(end, row, xerr=spread, fmt="none", ecolor=INK, elinewidth=1, capsize=panel.cap)
        text_at = bar.whiskers[1]
    if bar.line_to is not None:
        axes.plot([end, bar.line_to], [row, row], color=INK, linewidth=1)
        text_at = max(end, bar.line_to)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    place: Any = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "bbox": behind}
    axes.annotate(bar.text, (text_at, row), **place)
