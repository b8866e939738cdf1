"""What forks are meant to reach, and the tables about the engine: cold boot, snapshot, forks in each way. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bench import figures
from bench.figures import FORK, START, WAYS, Figure
from bench.report import (
    Readings,
    Run,
    Summary,
    Target,
    at_most,
    below,
    in_every_round,
    is_step,
    render_cell,
    render_figures,
    render_section,
    render_steps,
    render_targets,
    render_value,
    summarize,
)

FORMAT = 1
# How many children the targets speak of.
TARGET_N = 100
FORK_TO_COLD = 0.2
FORK_ONE_MS = 25.0
UNIQUE_MIB = {FORK: 7.0, START: 24.0}
IDLE_PERCENT = 0.5
EVAL_MS = 2.0

_BY_WAY = re.compile(r"fork\.(?P<n>\d+)\.(?P<way>fork|start)\.(?P<rest>.+)")
_VERSUS = re.compile(r"ratio\.fork\.\d+\.fork_to_start\..+")
# Of amounts there is a ratio of the two ways; not of counts, nor of what is nearly nothing.
_COMPARED = ("s", "ms", "MiB")


def with_ratios(readings: Readings, sizes: Sequence[int]) -> dict[Figure, float]:
    """The readings of a round, with the ratios between them."""
    cold = readings.get(figures.cold_boot())
    walls = {(n, way): readings.get(figures.fork_wall(n, way)) for n in sizes for way in ("", *WAYS)}
    ratios = {
        figures.fork_to_cold(n, way): wall / cold for (n, way), wall in walls.items() if wall is not None and cold
    }
    return {**readings, **ratios, **_versus_start(readings)}


def _versus_start(readings: Readings) -> dict[Figure, float]:
    values = {figure.name: value for figure, value in readings.items()}
    ratios = {}
    for figure in (each for each in readings if each.unit in _COMPARED and not is_step(each.name)):
        found = _BY_WAY.fullmatch(figure.name)
        if found and found["way"] == FORK and (started := values.get(f"fork.{found['n']}.{START}.{found['rest']}")):
            ratios[figures.versus_start(int(found["n"]), figure)] = readings[figure] / started
    return ratios


def judge(summaries: Mapping[str, Summary], n: int = TARGET_N) -> list[Target]:
    """Each thing forkd is meant to reach, against what was measured."""
    forked, started = (f"fork of {n} {WAYS[way]}" for way in (FORK, START))
    one = f"fork of 1 {WAYS[FORK]}: one child, p50"
    targets = [
        at_most(f"{forked} / cold boot of one", summaries, figures.fork_to_cold(n, FORK), FORK_TO_COLD),
        below(f"{started} / cold boot of one", summaries, figures.fork_to_cold(n, START), 1),
        at_most(one, summaries, figures.fork_child(1, "p50", FORK), FORK_ONE_MS),
    ]
    for way in WAYS:
        name = f"unique memory of the largest of {n} children {WAYS[way]}"
        targets.append(at_most(name, summaries, figures.unique_memory(n, "largest", way), UNIQUE_MIB[way]))
    for way in WAYS:
        name = f"idle CPU per child {WAYS[way]}"
        targets.append(below(name, summaries, figures.idle_cpu(n, 0, way), IDLE_PERCENT))
    targets.append(at_most("eval round trip on a warm child, p50", summaries, figures.trip("eval", "p50"), EVAL_MS))
    for way in WAYS:
        name = f"{n} of {n} children {WAYS[way]} succeed in every round"
        targets.append(in_every_round(name, summaries, figures.fork_ok(n, way), n))
    return targets


def render_json(run: Run) -> dict[str, Any]:
    return {"format": FORMAT, **render_section(run, judge(summarize(run.rounds)))}


def render_markdown(report: Mapping[str, Any]) -> str:
    """The tables of docs/bench.md, of a report as written to JSON."""
    steps = (render_steps(report, way) for way in (None, *WAYS))
    tables = (render_figures(report, _is_elsewhere), render_ways(report), *steps, render_targets(report))
    return "\n\n".join("\n".join(rows) for rows in tables if rows) + "\n"


def _is_elsewhere(name: str) -> bool:
    return is_step(name) or _BY_WAY.fullmatch(name) is not None or _VERSUS.fullmatch(name) is not None


def render_ways(report: Mapping[str, Any]) -> list[str]:
    """One row for each figure of a fork that was measured in several ways, beside each other."""
    found = report["figures"]
    parsed = [match for name in found if not is_step(name) and (match := _BY_WAY.fullmatch(name))]
    rows = [f"| median (fastest to slowest round) | {' | '.join(WAYS.values())} | ratio |", "|---|---|---|---|"]
    for n, rest in dict.fromkeys((match["n"], match["rest"]) for match in parsed):
        pair = {way: found.get(f"fork.{n}.{way}.{rest}") for way in WAYS}
        what = next(_without_way(figure["what"], way) for way, figure in pair.items() if figure)
        ratio = found.get(f"ratio.fork.{n}.fork_to_start.{rest}")
        cells = [*(render_cell(figure) for figure in pair.values()), render_value(ratio and ratio["median"])]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    return rows if parsed else []


def _without_way(what: str, way: str) -> str:
    return what.replace(f" made {WAYS[way]}", "").replace(f" {WAYS[way]}", "")
