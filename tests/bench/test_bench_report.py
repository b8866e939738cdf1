"""What the benchmark makes of its readings, by value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import figures
from bench.chart import draw
from bench.engine_report import judge, render_json, render_markdown, with_ratios
from bench.figures import FORK, START, Figure
from bench.host import parse_cpu_model, render_host
from bench.report import Round, Run, render_value, shares, step_lengths, summarize

HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": "7.2.22 (Debian 1)", "accelerator": "tcg"}


def good_round(factor: float = 1.0) -> Round:
    readings: dict[Figure, float] = {
        figures.cold_boot(): 10.0,
        figures.template_made(): 1.0,
        figures.fork_child(1, "p50", FORK): 20.0 * factor,
        figures.trip("eval", "p50"): 1.5 * factor,
    }
    for way, wall, unique in ((FORK, 1.6, 5.5), (START, 8.0, 22.0)):
        readings |= {
            figures.fork_wall(100, way): wall * factor,
            figures.fork_ok(100, way): 100,
            figures.fork_child(100, "p50", way): wall * 10,
            figures.fork_step(100, "resume", "p50", way): 1.0,
            figures.fork_step(100, "resume", "p99", way): 2.5,
            figures.unique_memory(100, "largest", way): unique * factor,
            figures.idle_cpu(100, 5, way): 0.2 * factor,
            figures.kill(100, way): 0.5,
        }
    readings[figures.fork_step(100, "clone", "p50", FORK)] = 4.0
    readings[figures.fork_step(100, "process start", "p50", START)] = 100.0
    return Round(with_ratios(readings, [100]))


def run_of(*rounds: Round) -> Run:
    settings = {"rounds": len(rounds), "n": [100], "ways": [FORK, START], "memory_mib": 512}
    return Run("2024-01-01T00:00:00+0000", HOST, settings, list(rounds))


def started_round() -> Round:
    """As an engine that forks no live VM, and as before there were templates."""
    steps = {figures.fork_step(1, "contract", "p50"): 90.0, figures.fork_step(1, "contract", "p99"): 99.0}
    return Round({figures.fork_wall(1): 0.2, figures.fork_child(1, "p50"): 190.0, **steps})


def test_shares_are_values_that_were_measured() -> None:
    assert shares([float(v) for v in range(1, 101)]) == {"p50": 50.0, "p99": 99.0}
    assert shares([3.0]) == {"p50": 3.0, "p99": 3.0}
    assert shares([2.0, 1.0]) == {"p50": 1.0, "p99": 2.0}


def test_steps_are_told_apart_by_when_they_ended_not_by_when_they_were_noted() -> None:
    lengths = step_lengths(10.0, {"contract": 10.7, "process start": 10.2, "resume": 10.5})
    assert list(lengths) == ["process start", "resume", "contract"]
    assert list(lengths.values()) == pytest.approx([0.2, 0.3, 0.2])


def test_a_ratio_is_of_one_round_and_absent_where_a_part_of_it_is() -> None:
    cold, wall = figures.cold_boot(), figures.fork_wall(10)
    assert with_ratios({cold: 10.0, wall: 2.5}, [1, 10])[figures.fork_to_cold(10)] == 0.25
    assert with_ratios({wall: 2.5}, [1, 10]) == {wall: 2.5}


def test_each_way_has_its_ratio_to_a_cold_boot_and_the_two_have_one_to_each_other() -> None:
    readings = {figure.name: value for figure, value in good_round().readings.items()}
    assert readings["ratio.fork_100_fork_to_cold_boot"] == pytest.approx(0.16)
    assert readings["ratio.fork_100_start_to_cold_boot"] == pytest.approx(0.8)
    assert readings["ratio.fork.100.fork_to_start.wall"] == pytest.approx(0.2)
    assert readings["ratio.fork.100.fork_to_start.unique.largest"] == pytest.approx(0.25)
    compared = [name for name in readings if "fork_to_start" in name]
    assert not [name for name in compared if "step" in name or name.endswith((".ok", ".idle"))]


def test_a_ratio_of_the_two_ways_needs_both() -> None:
    forked = {figures.fork_wall(100, FORK): 1.6}
    assert with_ratios(forked, [100]) == forked


def test_a_summary_has_the_median_and_every_round() -> None:
    wall = figures.fork_wall(1)
    rounds = [Round({wall: 3.0}), Round({}), Round({wall: 1.0}), Round({wall: 9.0})]
    summary = summarize(rounds)[wall.name]
    assert summary.values == (3.0, 1.0, 9.0)
    assert summary.median == 3.0


def test_every_target_is_reached_by_good_rounds() -> None:
    targets = judge(summarize([good_round(), good_round()]))
    assert [target.bound for target in targets] == [
        *("<= 0.2", "< 1", "<= 25", "<= 7", "<= 24", "< 0.5", "< 0.5", "<= 2", "= 100", "= 100")
    ]
    assert [target.reached for target in targets] == [True] * 10
    assert [target.reached_in_every_round for target in targets] == [True] * 10


def test_one_bad_round_of_three_shows_although_the_median_is_good() -> None:
    targets = judge(summarize([good_round(), good_round(), good_round(3.0)]))
    assert [target.reached for target in targets] == [True] * 10
    assert [target.reached_in_every_round for target in targets] == [False] * 8 + [True] * 2
    assert targets[1].worst == pytest.approx(2.4)


def test_a_single_child_missing_in_a_single_round_misses_the_target() -> None:
    lost = Round({figures.fork_ok(100, START): 99})
    target = judge(summarize([good_round(), good_round(), lost]))[-1]
    assert (target.value, target.worst, target.reached) == (100, 99, False)


def test_what_was_not_measured_is_neither_reached_nor_missed() -> None:
    assert {target.reached for target in judge({})} == {None}
    started = {figure: value for figure, value in good_round().readings.items() if ".fork." not in figure.name}
    unreached = [target.name for target in judge(summarize([Round(started)])) if target.reached is None]
    assert len(unreached) == 4 and all("from a template" in name for name in unreached)


def test_json_has_for_every_figure_where_it_stops_and_what_was_prepared() -> None:
    report = json.loads(json.dumps(render_json(run_of(good_round(), Round({}, ("round 2: fork of 100: lost",))))))
    assert set(report) == {"format", "started", "host", "settings", "failures", "targets", "figures"}
    assert report["settings"]["rounds_done"] == 2
    assert report["failures"] == ["round 2: fork of 100: lost"]
    for figure in report["figures"].values():
        assert {"what", "unit", "median", "min", "max", "stops_at", "prepared", "rounds"} == set(figure)
        assert figure["stops_at"] and figure["prepared"]
    for target in report["targets"]:
        assert {"name", "bound", "unit", "value", "worst", "reached", "reached_in_every_round"} == set(target)


def test_no_fork_figure_counts_processes_started_ahead() -> None:
    assert figures.fork_wall(100, START).prepared.endswith("no process started ahead")
    assert figures.fork_child(100, "p50", START).prepared.endswith("no process started ahead")
    assert "no process started ahead but its template" in figures.fork_wall(100, FORK).prepared


def test_the_tables_have_a_row_for_each_figure_step_and_target() -> None:
    text = render_markdown(render_json(run_of(good_round(), good_round(1.25))))
    assert "| cold boot of one VM, warmed, first eval | 10 s | 10 to 10 |" in text
    assert "| template: made in all | 1 s | 1 to 1 |" in text
    assert "| fork of 100, all ready | 1.80 s (1.60 to 2) | 9 s (8 to 10) | 0.200 |" in text
    assert "| end of all 100 children | 0.500 s (0.500 to 0.500) | 0.500 s (0.500 to 0.500) | 1 |" in text
    assert "| step of one child made from a template, p50 / p99 in ms | fork of 100 |" in text
    assert "| clone | 4 |\n| resume | 1 / 2.50 |\n" in text
    assert "| process start | 100 |\n| resume | 1 / 2.50 |\n" in text
    assert "| fork of 100 from a template / cold boot of one | <= 0.2 | 0.180 | 0.200 | yes |" in text
    assert "| eval round trip on a warm child, p50 | <= 2 ms | 1.69 | 1.88 | yes |" in text
    assert "fork_to_start" not in text and text.count("fork of 100, all ready") == 1


def test_what_was_measured_in_one_way_only_has_a_table_without_ways() -> None:
    text = render_markdown(render_json(run_of(started_round())))
    assert "| fork of 1, all ready | 0.200 s | 0.200 to 0.200 |" in text
    assert "| step of one child, p50 / p99 in ms | fork of 1 |\n|---|---|\n| contract | 90 / 99 |" in text


@pytest.mark.parametrize("done", [good_round(), started_round()])
def test_the_chart_is_the_same_for_the_same_report(tmp_path: Path, done: Round) -> None:
    report = json.loads(json.dumps(render_json(run_of(done))))
    if done.readings == started_round().readings:
        del report["settings"]["ways"]
    draw(report, tmp_path / "one.svg")
    draw(report, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_text().rstrip().endswith("</svg>")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_without_forks_there_is_no_table_of_steps() -> None:
    assert "step of one child" not in render_markdown(render_json(run_of(Round({figures.cold_boot(): 1.0}))))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (100, "100"), (0.12345, "0.123"), (1.2345, "1.23"), (12.345, "12.3"), (1234.5, "1234")],
)
def test_values_are_shown_with_about_three_digits(value: float | None, text: str) -> None:
    assert render_value(value) == text


def test_the_processor_is_named_once_and_without_extra_space() -> None:
    assert parse_cpu_model("processor\t: 0\nmodel name\t: Example  CPU 1\nflags\t\t: fpu") == "Example CPU 1"
    assert parse_cpu_model("") == "unknown"
    assert render_host(HOST) == "Example 1, 2 cores, 8 GiB RAM, QEMU 7.2.22 (tcg)"
