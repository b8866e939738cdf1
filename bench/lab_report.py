"""What two engines are meant to reach beside each other in the lab, and the tables about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import figures
from bench.figures import Figure
from bench.lab_figures import by_engine, cold_to_fork, versus
from bench.report import (
    Readings,
    Round,
    Run,
    Summary,
    Target,
    in_every_round,
    is_step,
    render_cell,
    render_section,
    render_steps,
    render_targets,
    render_value,
    summarize,
    within,
)

PART = "lab"
# The first is judged, the second is what it is compared with.
ENGINES = ("firecracker", "qemu")
# How many children the targets speak of.
TARGET_N = 30
SPEEDUP = 20.0
UNIQUE_SHARE_PERCENT = 10.0

_COMPARED = ("s", "ms", "MiB")


def compose_round(done: Mapping[str, Round], sizes: Sequence[int]) -> Round:
    """Of the rounds of each engine one, with the ratios between their readings."""
    readings: dict[Figure, float] = {}
    for engine, each in done.items():
        ours = {**each.readings, **_speedups(each.readings, sizes)}
        readings |= {by_engine(engine, figure): value for figure, value in ours.items()}
    first, second = (done[engine].readings if engine in done else {} for engine in ENGINES)
    for figure, value in first.items():
        if figure.unit in _COMPARED and not is_step(figure.name) and second.get(figure):
            readings[versus(figure, ENGINES)] = value / second[figure]
    return Round(readings, tuple(failure for each in done.values() for failure in each.failures))


def _speedups(readings: Readings, sizes: Sequence[int]) -> dict[Figure, float]:
    cold = readings.get(figures.cold_boot())
    walls = {n: readings.get(figures.fork_wall(n)) for n in sizes}
    return {cold_to_fork(n): cold / wall for n, wall in walls.items() if wall and cold is not None}


def render_lab(run: Run) -> dict[str, Any]:
    """The section of a report, as written to JSON."""
    return render_section(run, judge_lab(summarize(run.rounds)))


def judge_lab(summaries: Mapping[str, Summary], n: int = TARGET_N) -> list[Target]:
    engine, other = ENGINES
    targets = [
        within(
            f"{engine}: a fork of 1 is at least {SPEEDUP:g} times as fast as a cold boot",
            summaries,
            by_engine(engine, cold_to_fork(1)),
            f">= {SPEEDUP:g}",
            lambda value: value >= SPEEDUP,
            worst_of=min,
        ),
        within(
            f"CPU time per child of {n}, {engine} / {other}",
            summaries,
            versus(figures.fork_cpu(n, ""), ENGINES),
            "< 1",
            lambda value: value < 1,
        ),
    ]
    for each in ENGINES:
        name = f"{each}: {n} of {n} children right, the contract kept by each, in every round"
        targets.append(in_every_round(name, summaries, by_engine(each, figures.fork_ok(n)), n))
    for each in ENGINES:
        targets.append(
            within(
                f"{each}: unique memory of the largest of {n} idle children, of the guest's resident",
                summaries,
                by_engine(each, figures.unique_share(n)),
                f"< {UNIQUE_SHARE_PERCENT:g}",
                lambda value: value < UNIQUE_SHARE_PERCENT,
            )
        )
    return targets


def render_lab_markdown(report: Mapping[str, Any]) -> str:
    """The tables of docs/bench.md about the lab, of a report as written to JSON; nothing where it has none."""
    section = report.get(PART)
    if section is None:
        return ""
    blocks = ([f"### {render_title(section)}"], _render_beside(section), render_steps(section), render_targets(section))
    return "".join("\n".join(rows) + "\n\n" for rows in blocks if rows)


def render_title(section: Mapping[str, Any]) -> str:
    """Times of an emulated machine are not to be taken for times."""
    beside = f"{' and '.join(ENGINES)} on KVM"
    return f"{beside}, in the lab: ratios only" if section["host"]["emulated"] else beside


def _render_beside(section: Mapping[str, Any]) -> list[str]:
    """One row for each figure: of both engines, and the ratio of the two."""
    found = section["figures"]
    rows = [f"| median (fastest to slowest round) | {' | '.join(ENGINES)} | ratio |", "|---|---|---|---|"]
    parted = [name.partition(".") for name in found]
    for name in dict.fromkeys(name for engine, _, name in parted if engine in ENGINES and not is_step(name)):
        pair = {engine: found[full] for engine in ENGINES if (full := f"{engine}.{name}") in found}
        what = next(entry["what"].removeprefix(f"{engine}, ") for engine, entry in pair.items())
        ratio = found.get(f"versus.{name}")
        cells = [*(render_cell(pair.get(engine)) for engine in ENGINES), render_value(ratio and ratio["median"])]
        rows.append(f"| {what} | {' | '.join(cells)} |")
    return rows
