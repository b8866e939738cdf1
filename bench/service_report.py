"""What the daemon is meant to reach, and the tables about it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench import service_figures as figures
from bench.report import (
    Run,
    Summary,
    Target,
    at_most,
    none_of,
    render_figures,
    render_section,
    render_targets,
    render_value,
    summarize,
)

PARTS = ("daemon", "load", "cycles")
SPAWN_ONE_MS = 5.0
SPAWN_MANY = 100
SPAWN_MANY_MS = 40.0
CALL_MS = 2.0
# What "no growth without bound" means here: memory that is still gained when all clients have been there for long.
GROWTH_MIB = 2.0

_TITLES = {
    "daemon": "The daemon on top of the engine and the agent",
    "load": "Many clients at once",
    "cycles": "Sandboxes that come and go",
}
_SPAWN = re.compile(r"daemon\.(?P<engine>\w+)\.spawn\.(?P<n>\d+)\.own\.p50")
_CALL = re.compile(r"daemon\.(?P<engine>\w+)\.(?P<kind>exec|eval)\.(?P<way>\w+)\.more\.p50")


def render_part(part: str, run: Run) -> dict[str, Any]:
    """The section of a report, as written to JSON."""
    return render_section(run, judge_part(part, summarize(run.rounds), run.settings["engines"]))


def judge_part(part: str, summaries: Mapping[str, Summary], engines: Sequence[str]) -> list[Target]:
    judges: dict[str, Callable[[Mapping[str, Summary], Sequence[str]], list[Target]]] = {
        "daemon": _judge_costs,
        "load": lambda found, _: _judge_load(found),
        "cycles": _judge_cycles,
    }
    return judges[part](summaries, engines)


def _judge_costs(summaries: Mapping[str, Summary], engines: Sequence[str]) -> list[Target]:
    targets = []
    for engine in engines:
        for n, limit in ((1, SPAWN_ONE_MS), (SPAWN_MANY, SPAWN_MANY_MS)):
            name = f"{engine}: the daemon's part of a spawn of {n}, p50"
            targets.append(at_most(name, summaries, figures.spawn_own(engine, n, "p50"), limit))
        for kind in ("exec", "eval"):
            for way in ("unix", "tcp"):
                name = f"{engine}: {kind} by {figures.WAYS[way]}, on top of the agent, p50"
                targets.append(at_most(name, summaries, figures.call_more(engine, kind, way, "p50"), CALL_MS))
    return targets


def _judge_load(summaries: Mapping[str, Summary]) -> list[Target]:
    return [
        none_of("load: no error, no wrong answer", summaries, figures.load("errors")),
        none_of("load: nothing is left of the clients", summaries, figures.load("left")),
        at_most("load: memory gained in the last two thirds", summaries, figures.load("growth"), GROWTH_MIB),
    ]


def _judge_cycles(summaries: Mapping[str, Summary], engines: Sequence[str]) -> list[Target]:
    targets = []
    for engine in engines:
        targets.append(none_of(f"{engine}, cycles: no error", summaries, figures.cycles(engine, "errors")))
        targets.append(none_of(f"{engine}, cycles: nothing is left", summaries, figures.cycles(engine, "left")))
    return targets


def render_service_markdown(report: Mapping[str, Any]) -> str:
    """The tables of docs/bench.md about the daemon, of a report as written to JSON; nothing where it has none."""
    blocks = []
    for part in PARTS:
        if (section := report.get(part)) is not None:
            figured = _render_costs(section) if part == "daemon" else render_figures(section)
            blocks += [[f"### {_TITLES[part]}"], figured, render_targets(section)]
    return "".join("\n".join(rows) + "\n\n" for rows in blocks)


def _render_costs(section: Mapping[str, Any]) -> list[str]:
    """One row for each kind of request: what the client waits, and how that is divided."""
    rows = ["| p50 / p99 in ms | the client waits | engine or agent | the daemon's part |", "|---|---|---|---|"]
    found = section["figures"]

    def pair(name: str) -> str:
        return " / ".join(render_value(found[f"{name}.{share}"]["median"]) for share in ("p50", "p99"))

    for name in found:
        if spawn := _SPAWN.fullmatch(name):
            place = f"daemon.{spawn['engine']}.spawn.{spawn['n']}"
            cells = (f"{place}.total", f"{place}.fork", f"{place}.own")
            rows.append(f"| {spawn['engine']}, spawn of {spawn['n']} | " + " | ".join(map(pair, cells)) + " |")
        if call := _CALL.fullmatch(name):
            place = f"daemon.{call['engine']}.{call['kind']}"
            cells = (f"{place}.{call['way']}.total", f"{place}.agent", f"{place}.{call['way']}.more")
            what = f"{call['engine']}, {call['kind']}, {figures.WAYS[call['way']]}"
            rows.append(f"| {what} | " + " | ".join(map(pair, cells)) + " |")
    return rows
