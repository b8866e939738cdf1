"""What forks of live VMs, crowds and endurance are meant to reach, and the tables about them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from bench import fork_figures as figures
from bench.report import (
    Run,
    Summary,
    Target,
    at_most,
    below,
    in_every_round,
    none_of,
    render_figures,
    render_median,
    render_section,
    render_targets,
    render_value,
    summarize,
)

PARTS = ("live", "crowd", "endurance")
PAUSE_MS = {"p50": 10.0, "p99": 30.0}
ANSWER_MS = 80.0
# With how much just written both are judged.
JUDGED_MIB = 64
# How many VMs the targets of a crowd speak of.
CROWD_N = 1000
CROWD_MADE_S = 25.0
CROWD_KILLED_S = 15.0
CROWD_IDLE_PERCENT = 0.1
# What "flat" means over thousands of forks.
GAINED_MIB = 1.0

_TITLES = {
    "live": "Forks of a running VM",
    "crowd": "Many VMs alive at once",
    "endurance": "Forks that come and go",
}
_LIVE = re.compile(r"live\.(?P<mib>\d+)\.ok")
_BY_AMOUNT = re.compile(r"live\.\d+\..+")


def render_part(part: str, run: Run) -> dict[str, Any]:
    """The section of a report, as written to JSON."""
    return render_section(run, judge_part(part, summarize(run.rounds), run.settings))


def judge_part(part: str, summaries: Mapping[str, Summary], settings: Mapping[str, Any]) -> list[Target]:
    judges: dict[str, Callable[[Mapping[str, Summary], Mapping[str, Any]], list[Target]]] = {
        "live": _judge_live,
        "crowd": lambda found, _: _judge_crowd(found),
        "endurance": lambda found, _: _judge_endurance(found),
    }
    return judges[part](summaries, settings)


def _judge_live(summaries: Mapping[str, Summary], settings: Mapping[str, Any]) -> list[Target]:
    judged = f"live fork, {JUDGED_MIB} MiB just written"
    targets = [
        at_most(f"{judged}: pause of the source, {share}", summaries, figures.live(JUDGED_MIB, "pause", share), limit)
        for share, limit in PAUSE_MS.items()
    ]
    targets.append(at_most(f"{judged}: answer, p50", summaries, figures.live(JUDGED_MIB, "answer", "p50"), ANSWER_MS))
    for mib in settings["written_mib"]:
        name = f"live fork, {mib} MiB just written: all forks right in every round"
        targets.append(in_every_round(name, summaries, figures.live_ok(mib), settings["forks"]))
    return targets


def _judge_crowd(summaries: Mapping[str, Summary], n: int = CROWD_N) -> list[Target]:
    return [
        at_most(f"{n} VMs made", summaries, figures.crowd(n, "made"), CROWD_MADE_S),
        below(f"{n} VMs: idle CPU each", summaries, figures.crowd(n, "idle"), CROWD_IDLE_PERCENT),
        at_most(f"{n} VMs killed and cleaned up", summaries, figures.crowd(n, "killed"), CROWD_KILLED_S),
        in_every_round(f"{n} of {n} VMs right in every round", summaries, figures.crowd(n, "ok"), n),
        in_every_round(f"{n} of {n} VMs distinct in every round", summaries, figures.crowd(n, "distinct"), n),
    ]


def _judge_endurance(summaries: Mapping[str, Summary]) -> list[Target]:
    targets = []
    for kind, title in figures.TITLES.items():
        targets += [
            none_of(f"{title}: no error", summaries, figures.endurance(kind, "errors")),
            none_of(f"{title}: nothing is left", summaries, figures.endurance(kind, "left")),
        ]
    # A VM that is busy may need more of its memory as it goes on; a template stands still.
    name = f"{figures.TITLES['cycles']}: memory the template gained"
    return [*targets, at_most(name, summaries, figures.endurance("cycles", "gained"), GAINED_MIB)]


def render_forks_markdown(report: Mapping[str, Any]) -> str:
    """The tables of docs/bench.md about these, of a report as written to JSON; nothing where it has none."""
    blocks = []
    for part in PARTS:
        if (section := report.get(part)) is not None:
            amounts = [_render_amounts(section)] if part == "live" else []
            others = render_figures(section, lambda name: _BY_AMOUNT.fullmatch(name) is not None)
            blocks += [[f"### {_TITLES[part]}"], *amounts, others, render_targets(section)]
    return "".join("\n".join(rows) + "\n\n" for rows in blocks)


def _render_amounts(section: Mapping[str, Any]) -> list[str]:
    """One row for each amount of memory that was just written."""
    found = section["figures"]
    rows = ["| just written | pause of the source, p50 / p99 | answer, p50 / p99 | right |", "|---|---|---|---|"]

    def pair(mib: str, name: str) -> str:
        values = (found.get(f"live.{mib}.{name}.{share}") for share in ("p50", "p99"))
        return f"{' / '.join(render_value(value and value['median']) for value in values)} ms"

    for name in found:
        if match := _LIVE.fullmatch(name):
            mib = match["mib"]
            cells = (pair(mib, "pause"), pair(mib, "answer"), render_median(found[name]))
            rows.append(f"| {mib} MiB | {' | '.join(cells)} |")
    return rows
