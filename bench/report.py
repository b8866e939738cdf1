"""From the readings of each round to figures, targets, JSON and tables: what all parts share. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import figures
from bench.figures import Figure
from forkd.errors import ForkdError
from forkd.runtime.demo import percentile

_STEP = re.compile(
    r"(?:(?P<engine>\w+)\.)?fork\.(?P<n>\d+)\.(?:(?P<way>fork|start)\.)?step\.(?P<step>.+)\.(?P<share>p\d+)"
)

Readings = Mapping[Figure, float]


@dataclass(frozen=True)
class Round:
    """What one round read, and what failed in it."""

    readings: Readings
    failures: tuple[str, ...] = ()


def joined(parts: Iterable[Round]) -> Round:
    """What was read one after the other, as one round."""
    readings: dict[Figure, float] = {}
    failures: list[str] = []
    for part in parts:
        readings |= part.readings
        failures += part.failures
    return Round(readings, tuple(failures))


@dataclass(frozen=True)
class Run:
    """Everything a report is made of."""

    started: str
    host: Mapping[str, Any]
    settings: Mapping[str, Any]
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    figure: Figure
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Target:
    """`reached` is None where this run did not measure it. `value` is the median, `worst` the worst round."""

    name: str
    bound: str
    unit: str
    value: float | None
    worst: float | None
    reached: bool | None
    reached_in_every_round: bool | None


def render_failure(title: str, error: ForkdError) -> str:
    """With the last line of its details: there the VMM says what it did not like."""
    lines = (error.details or "").strip().splitlines()
    return f"{title}: {error.code}: {error.message}{f' ({lines[-1]})' if lines else ''}"


def shares(values: Sequence[float]) -> dict[str, float]:
    return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}


def step_lengths(begun: float, marks: Mapping[str, float]) -> dict[str, float]:
    """How long each step took, of the times at which they were over, in the order they happened."""
    lengths, before = {}, begun
    for step, at in sorted(marks.items(), key=lambda mark: mark[1]):
        lengths[step] = at - before
        before = at
    return lengths


def summarize(rounds: Sequence[Round]) -> dict[str, Summary]:
    """By name, in the order they were first read. A figure that a round lacks has fewer values."""
    collected: dict[Figure, list[float]] = {}
    for each in rounds:
        for figure, value in each.readings.items():
            collected.setdefault(figure, []).append(value)
    return {figure.name: Summary(figure, tuple(values)) for figure, values in collected.items()}


def within(
    name: str,
    summaries: Mapping[str, Summary],
    figure: Figure,
    bound: str,
    fits: Callable[[float], bool],
    worst_of: Callable[[Sequence[float]], float] = max,
) -> Target:
    summary = summaries.get(figure.name)
    if summary is None:
        return Target(name, bound, figure.unit, None, None, None, None)
    worst = worst_of(summary.values)
    return Target(name, bound, figure.unit, summary.median, worst, fits(summary.median), fits(worst))


def at_most(name: str, summaries: Mapping[str, Summary], figure: Figure, limit: float) -> Target:
    return within(name, summaries, figure, f"<= {limit:g}", lambda value: value <= limit)


def below(name: str, summaries: Mapping[str, Summary], figure: Figure, limit: float) -> Target:
    return within(name, summaries, figure, f"< {limit:g}", lambda value: value < limit)


def none_of(name: str, summaries: Mapping[str, Summary], figure: Figure) -> Target:
    return within(name, summaries, figure, "= 0", lambda value: value == 0)


def in_every_round(name: str, summaries: Mapping[str, Summary], figure: Figure, n: int) -> Target:
    """One that a good median does not reach."""
    summary = summaries.get(figure.name)
    if summary is None:
        return Target(name, f"= {n}", figure.unit, None, None, None, None)
    worst = min(summary.values)
    return Target(name, f"= {n}", figure.unit, summary.median, worst, worst == n, worst == n)


def render_section(run: Run, targets: Sequence[Target]) -> dict[str, Any]:
    return {
        "started": run.started,
        "host": dict(run.host),
        "settings": {**run.settings, "rounds_done": len(run.rounds)},
        "failures": [failure for each in run.rounds for failure in each.failures],
        "targets": [_render_target(target) for target in targets],
        "figures": {name: _render_summary(summary) for name, summary in summarize(run.rounds).items()},
    }


def _render_summary(summary: Summary) -> dict[str, Any]:
    figure = summary.figure
    return {
        "what": figure.what,
        "unit": figure.unit,
        "median": _rounded(summary.median),
        "min": _rounded(min(summary.values)),
        "max": _rounded(max(summary.values)),
        "stops_at": figure.stops_at,
        "prepared": figure.prepared,
        "rounds": [_rounded(value) for value in summary.values],
    }


def _render_target(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "bound": target.bound,
        "unit": target.unit,
        "value": _rounded(target.value),
        "worst": _rounded(target.worst),
        "reached": target.reached,
        "reached_in_every_round": target.reached_in_every_round,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def is_step(name: str) -> bool:
    """Whether a figure is about one step of a fork; those have a table of their own."""
    return _STEP.fullmatch(name) is not None


def render_figures(report: Mapping[str, Any], leave_out: Callable[[str], bool] = is_step) -> list[str]:
    """`leave_out`: those that other tables have, by name."""
    rows = ["| what | median | fastest to slowest round |", "|---|---|---|"]
    for name, figure in report["figures"].items():
        if not leave_out(name):
            low, high = render_value(figure["min"]), render_value(figure["max"])
            rows.append(f"| {figure['what']} | {render_median(figure)} | {low} to {high} |")
    return rows


def render_cell(figure: Mapping[str, Any] | None) -> str:
    """Where several figures stand in one row."""
    if figure is None:
        return "-"
    low, high = render_value(figure["min"]), render_value(figure["max"])
    return f"{render_median(figure)} ({low} to {high})"


def render_median(figure: Mapping[str, Any]) -> str:
    return f"{render_value(figure['median'])} {figure['unit']}".strip()


def render_steps(report: Mapping[str, Any], way: str | None = None) -> list[str]:
    """One row for each step of a fork, one column for each number of children, by engine where there are several."""
    cells: dict[str, dict[tuple[int, str], dict[str, str]]] = {}
    for name, figure in report["figures"].items():
        if (found := _STEP.fullmatch(name)) and found["way"] == way:
            column = cells.setdefault(found["step"], {}).setdefault((int(found["n"]), found["engine"] or ""), {})
            column[found["share"]] = render_value(figure["median"])
    columns = sorted({column for row in cells.values() for column in row})
    if not columns:
        return []
    titles = (f"fork of {n}, {engine}" if engine else f"fork of {n}" for n, engine in columns)
    made = f" made {figures.WAYS[way]}" if way else ""
    rows = [f"| step of one child{made}, p50 / p99 in ms | " + " | ".join(titles) + " |"]
    rows.append("|---|" + "---|" * len(columns))
    for step, row in sorted(cells.items(), key=lambda cell: figures.step_rank(cell[0])):
        shown = (" / ".join(row[column].values()) if column in row else "-" for column in columns)
        rows.append(f"| {step} | " + " | ".join(shown) + " |")
    return rows


def render_targets(report: Mapping[str, Any]) -> list[str]:
    rows = ["| target | bound | median | worst round | reached |", "|---|---|---|---|---|"]
    words = {True: "yes", False: "no", None: "not measured"}
    for target in report["targets"]:
        bound = f"{target['bound']} {target['unit']}".strip()
        value, worst = render_value(target["value"]), render_value(target["worst"])
        rows.append(f"| {target['name']} | {bound} | {value} | {worst} | {words[target['reached']]} |")
    return rows


def render_value(value: float | None) -> str:
    """About three digits, never an exponent; whole numbers as they are."""
    if value is None:
        return "-"
    if value == int(value):
        return str(int(value))
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"
