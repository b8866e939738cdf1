"""The chart of the daemon's costs, of the section `daemon` of a report as written to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.chart import STYLE, annotate, finish, render_rounds, save
from bench.host import render_host
from bench.report import render_value
from bench.service_report import CALL_MS, SPAWN_MANY, SPAWN_MANY_MS, SPAWN_ONE_MS

_WITHIN = "#1f5f9e"
_BEYOND = "#d9822b"
_BELOW = "#b3bac5"
_INK = "#222222"
_WAYS = {"unix": "unix socket", "tcp": "TCP", "sdk": "SDK, unix socket"}


def draw_daemon(section: Mapping[str, Any], path: Path) -> None:
    """Two panels: the daemon's part against what it may cost, and how much of a call it is."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.6, 6.4), facecolor="white", layout="constrained")
        above, below = figure.subplots(2, 1)
        _draw_parts(above, section)
        _draw_calls(below, section)
        save(figure, path, f"{render_host(section['host'])}; {render_rounds(section['settings'])}")


def _draw_parts(axes: Axes, section: Mapping[str, Any]) -> None:
    found = section["figures"]
    kinds = [
        ("spawn of 1", "spawn.1.own", SPAWN_ONE_MS),
        (f"spawn of {SPAWN_MANY}", f"spawn.{SPAWN_MANY}.own", SPAWN_MANY_MS),
    ]
    kinds += [("exec", "exec.unix.more", CALL_MS), ("eval", "eval.unix.more", CALL_MS)]
    labels: list[str] = []
    axes.set_title("The daemon's own part of a request, in percent of what it may cost", loc="left", fontsize=11)
    for engine in section["settings"]["engines"]:
        for label, place, limit_ms in kinds:
            half, most = (found.get(f"daemon.{engine}.{place}.{share}") for share in ("p50", "p99"))
            if half is None or most is None:
                continue
            row = len(labels)
            labels.append(f"{label}, {engine}")
            p50, p99 = (100 * value["median"] / limit_ms for value in (half, most))
            axes.barh(row, p50, color=_WITHIN if p50 <= 100 else _BEYOND, height=0.6)
            axes.plot([p50, p99], [row, row], color=_INK, linewidth=1)
            text = f"{render_value(half['median'])} of {limit_ms:g} ms (p99 {render_value(most['median'])})"
            annotate(axes, row, max(p50, p99), text)
    # Behind the texts, which say the same in numbers.
    axes.axvline(100, zorder=0.5, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
    finish(axes, labels, "bar: p50; line: to p99; dashed: the most it may cost", margin=0.3)


def _draw_calls(axes: Axes, section: Mapping[str, Any]) -> None:
    found = section["figures"]
    axes.set_title("What a client waits for when it evaluates 6 * 7 (p50 of each part)", loc="left", fontsize=11)
    labels: list[str] = []
    for engine in section["settings"]["engines"]:
        for way, name in _WAYS.items():
            parts = (f"daemon.{engine}.eval.agent.p50", f"daemon.{engine}.eval.{way}.more.p50")
            if not all(part in found for part in parts):
                continue
            agent, more = (found[part]["median"] for part in parts)
            row, first = len(labels), not labels
            labels.append(f"{name}, {engine}")
            axes.barh(row, agent, color=_BELOW, height=0.6, label="agent" if first else None)
            axes.barh(row, more, left=agent, color=_WITHIN, height=0.6, label="daemon, HTTP, client" if first else None)
            annotate(axes, row, agent + more, f"{render_value(agent)} + {render_value(more)} ms")
    if labels:
        axes.legend(ncols=2, loc="upper left", bbox_to_anchor=(0, -0.24), frameon=False, fontsize=9)
    finish(axes, labels, "milliseconds", margin=0.3)
