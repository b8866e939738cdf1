"""What the benchmark makes of its readings, by value."""

from __future__ import annotations

import json

import pytest

from bench import figures
from bench.figures import Figure
from bench.host import parse_cpu_model, render_host
from bench.report import (
    Round,
    Run,
    judge,
    render_json,
    render_markdown,
    render_value,
    shares,
    step_lengths,
    summarize,
    with_ratios,
)

HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": "7.2.22 (Debian 1)", "accelerator": "tcg"}


def good_round(factor: float = 1.0) -> Round:
    readings: dict[Figure, float] = {
        figures.cold_boot(): 10.0,
        figures.fork_wall(100): 8.0 * factor,
        figures.fork_ok(100): 100,
        figures.fork_step(100, "resume", "p50"): 1.0,
        figures.fork_step(100, "resume", "p99"): 2.5,
        figures.unique_memory(100, "largest"): 22.0 * factor,
        figures.idle_cpu(100, 5): 0.2 * factor,
        figures.trip("eval", "p50"): 1.5 * factor,
    }
    return Round(with_ratios(readings, [100]))


def run_of(*rounds: Round) -> Run:
    return Run("2024-01-01T00:00:00+0000", HOST, {"rounds": len(rounds), "n": [100]}, list(rounds))


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


def test_a_summary_has_the_median_and_every_round() -> None:
    wall = figures.fork_wall(1)
    rounds = [Round({wall: 3.0}), Round({}), Round({wall: 1.0}), Round({wall: 9.0})]
    summary = summarize(rounds)[wall.name]
    assert summary.values == (3.0, 1.0, 9.0)
    assert summary.median == 3.0


def test_every_target_is_reached_by_good_rounds() -> None:
    targets = judge(summarize([good_round(), good_round()]))
    assert [target.reached for target in targets] == [True] * 5
    assert [target.reached_in_every_round for target in targets] == [True] * 5


def test_one_bad_round_of_three_shows_although_the_median_is_good() -> None:
    targets = judge(summarize([good_round(), good_round(), good_round(3.0)]))
    assert [target.reached for target in targets] == [True] * 5
    assert [target.reached_in_every_round for target in targets] == [False, False, False, False, True]
    assert targets[0].worst == pytest.approx(2.4)


def test_a_single_child_missing_in_a_single_round_misses_the_target() -> None:
    lost = Round({figures.fork_ok(100): 99})
    target = judge(summarize([good_round(), good_round(), lost]))[-1]
    assert (target.value, target.worst, target.reached) == (100, 99, False)


def test_what_was_not_measured_is_neither_reached_nor_missed() -> None:
    assert {target.reached for target in judge({})} == {None}


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
    assert "no process started ahead" in figures.fork_wall(100).prepared
    assert "no process started ahead" in figures.fork_child(100, "p50").prepared


def test_the_tables_have_a_row_for_each_figure_step_and_target() -> None:
    text = render_markdown(render_json(run_of(good_round(), good_round(1.25))))
    assert "| cold boot of one VM, warmed, first eval | 10 s | 10 to 10 |" in text
    assert "| fork of 100, all ready | 9 s | 8 to 10 |" in text
    assert "| step of one child, p50 / p99 in ms | fork of 100 |" in text
    assert "| resume | 1 / 2.50 |" in text
    assert "| eval round trip on a warm child, p50 | <= 2 ms | 1.69 | 1.88 | yes |" in text


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
