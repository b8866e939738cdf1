"""The chart of forks of a running VM, of the section `live` of a report as written to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.chart import STYLE, annotate, finish, render_rounds, save
from bench.fork_report import ANSWER_MS, JUDGED_MIB, PAUSE_MS
from bench.host import render_host
from bench.report import render_value

_COLOURS = {"pause": "#d9822b", "answer": "#1f5f9e"}
_INK = "#222222"


def draw_live(section: Mapping[str, Any], path: Path) -> None:
    """Two panels, as the source and the fork are two VMs: how long the one stands still, how soon the other answers."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 4.6), facecolor="white", layout="constrained")
        above, below = figure.subplots(2, 1)
        _draw(above, section, "pause", "The running VM stands still for", PAUSE_MS["p50"])
        title = "The fork has become someone of its own and answers numpy.zeros(5).tolist() after"
        _draw(below, section, "answer", title, ANSWER_MS)
        settings = section["settings"]
        forks = f"{settings['memory_mib']} MiB guests; {settings['forks']} forks each; {render_rounds(settings)}"
        save(figure, path, f"{render_host(section['host'])}; {forks}")


def _draw(axes: Axes, section: Mapping[str, Any], name: str, title: str, limit_ms: float) -> None:
    found = section["figures"]
    labels: list[str] = []
    axes.set_title(title, loc="left", fontsize=11)
    for mib in section["settings"]["written_mib"]:
        half, most = (found.get(f"live.{mib}.{name}.{share}") for share in ("p50", "p99"))
        if half is None or most is None:
            continue
        row = len(labels)
        labels.append(f"{mib} MiB just written")
        p50, p99 = half["median"], most["median"]
        axes.barh(row, p50, color=_COLOURS[name], height=0.6)
        axes.plot([p50, p99], [row, row], color=_INK, linewidth=1)
        annotate(axes, row, max(p50, p99), f"{render_value(p50)} ms (p99 {render_value(p99)})")
    axes.axvline(limit_ms, zorder=0.5, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
    dashed = f"what its p50 may be with {JUDGED_MIB} MiB"
    finish(axes, labels, f"milliseconds; bar: p50; line: to p99; dashed: {dashed}", margin=0.3)
