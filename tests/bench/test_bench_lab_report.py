"""What the benchmark makes of its readings in the lab, by value."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from bench import figures
from bench.__main__ import print_report
from bench.figures import Figure
from bench.lab import read_section, render_command
from bench.lab_chart import draw_lab
from bench.lab_figures import by_engine, cold_to_fork, versus
from bench.lab_inside import parse_args
from bench.lab_report import ENGINES, compose_round, judge_lab, render_lab, render_lab_markdown
from bench.report import Round, Run, summarize
from bench.results import read_results, write_results
from forkd.errors import EngineFailed

HOST = {
    "cpu": "Example 1",
    "cores": 2,
    "ram_mib": 4096,
    "qemu": "7.2.22 (Debian 1)",
    "accelerator": "kvm",
    "firecracker": "1.12.1",
    "emulated": True,
}
STEPS = ("process start", "state load", "resume", "contract")
SETTINGS = {"engines": list(ENGINES), "rounds": 1, "n": [1, 30], "memory_mib": 512}


def engine_round(factor: float = 1.0) -> Round:
    readings: dict[Figure, float] = {
        figures.cold_boot(): 30.0,
        figures.resident_memory(): 100.0,
        figures.unique_share(30): 5.0 * factor,
        figures.idle_unique_memory(30, "largest", 2): 5.0 * factor,
    }
    for n in (1, 30):
        readings[figures.fork_wall(n)] = n * factor
        readings[figures.fork_ok(n)] = n
        readings[figures.fork_cpu(n, "all processes")] = 400.0 * factor
        readings[figures.fork_step(n, "contract", "p50")] = 100.0 * factor
        readings[figures.fork_step(n, "contract", "p99")] = 200.0 * factor
    return Round(readings)


def both(first: Round, second: Round) -> Round:
    return compose_round(dict(zip(ENGINES, (first, second), strict=True)), [1, 30])


def section_of(*rounds: Round) -> dict[str, Any]:
    run = Run("2024-01-01T00:00:00+0000", HOST, SETTINGS, list(rounds))
    section = json.loads(json.dumps(render_lab(run)))
    assert isinstance(section, dict)
    return section


def test_a_round_of_both_engines_has_the_readings_of_each_and_their_ratios() -> None:
    readings = both(engine_round(), engine_round(2.0)).readings
    wall, cpu = figures.fork_wall(30), figures.fork_cpu(30, "all processes")
    assert readings[by_engine("firecracker", wall)] == 30
    assert readings[by_engine("qemu", wall)] == 60
    assert readings[versus(wall, ENGINES)] == readings[versus(cpu, ENGINES)] == 0.5
    assert readings[by_engine("firecracker", cold_to_fork(1))] == 30
    assert readings[by_engine("qemu", cold_to_fork(1))] == 15


def test_ratios_are_of_amounts_and_not_of_counts_shares_or_steps() -> None:
    compared = [figure.name for figure in both(engine_round(), engine_round()).readings if "versus" in figure.name]
    assert "versus.cold_boot.total" in compared and "versus.fork.30.cpu" in compared
    assert not [name for name in compared if "step" in name or name.endswith((".ok", ".unique_share"))]


def test_what_one_engine_did_not_yield_has_no_ratio_and_its_failures_are_kept() -> None:
    done = both(engine_round(), Round({}, ("round 1 of 1, qemu: engine_failed: no",)))
    assert not [figure for figure in done.readings if figure.name.startswith(("versus.", "qemu."))]
    assert done.failures == ("round 1 of 1, qemu: engine_failed: no",)


def test_good_rounds_reach_every_target_of_the_lab() -> None:
    targets = judge_lab(summarize([both(engine_round(), engine_round(1.5))]))
    assert [(target.bound, target.reached) for target in targets] == [
        (">= 20", True),
        ("< 1", True),
        ("= 30", True),
        ("= 30", True),
        ("< 10", True),
        ("< 10", True),
    ]


def test_the_worst_round_of_a_speedup_is_the_slowest() -> None:
    speedup = judge_lab(summarize([both(engine_round(factor), engine_round(9.0)) for factor in (1.0, 1.2, 3.0)]))[0]
    assert (speedup.value, speedup.worst, speedup.reached, speedup.reached_in_every_round) == (25, 10, True, False)


def test_an_engine_that_needs_more_of_everything_misses_its_targets() -> None:
    targets = judge_lab(summarize([both(engine_round(2.0), engine_round())]))
    assert [target.reached for target in targets] == [False, False, True, True, False, True]


def test_one_child_of_thirty_that_is_lost_once_misses_the_target() -> None:
    good = engine_round()
    lost = Round({**good.readings, figures.fork_ok(30): 29})
    targets = judge_lab(summarize([both(good, good), both(good, good), both(lost, good)]))
    assert [target.reached for target in targets if target.bound == "= 30"] == [False, True]


def test_what_was_not_measured_in_the_lab_is_neither_reached_nor_missed() -> None:
    assert {target.reached for target in judge_lab({})} == {None}


def test_the_tables_have_both_engines_side_by_side_and_say_what_they_are_good_for() -> None:
    text = render_lab_markdown({"lab": section_of(both(engine_round(), engine_round(2.0)))})
    assert text.startswith("### firecracker and qemu on KVM, in the lab: ratios only\n")
    assert "| fork of 30, all ready | 30 s (30 to 30) | 60 s (60 to 60) | 0.500 |" in text
    assert "| fork of 30: children that answered right | 30 children (30 to 30) | 30 children (30 to 30) | - |" in text
    assert "| cold boot of one / fork of 1 | 30 (30 to 30) | 15 (15 to 15) | - |" in text
    assert "| fork of 1, firecracker | fork of 1, qemu | fork of 30, firecracker | fork of 30, qemu |" in text
    assert "| contract | 100 / 200 | 200 / 400 | 100 / 200 | 200 / 400 |" in text
    assert "| CPU time per child of 30, firecracker / qemu | < 1 | 0.500 | 0.500 | yes |" in text
    assert "versus" not in text


def test_steps_are_in_their_order_although_one_engine_lacks_some() -> None:
    rounds = [Round({figures.fork_step(1, step, "p50"): 1.0 for step in steps}) for steps in (("resume",), STEPS)]
    text = render_lab_markdown({"lab": section_of(both(*rounds))})
    assert "| process start | - | 1 |\n| state load | - | 1 |\n| resume | 1 | 1 |\n| contract | - | 1 |\n" in text


def test_what_one_engine_lacks_is_a_gap_in_the_table() -> None:
    text = render_lab_markdown({"lab": section_of(both(Round({}), engine_round()))})
    assert "| fork of 30, all ready | - | 30 s (30 to 30) | - |" in text


def test_on_a_machine_that_is_not_emulated_times_are_times() -> None:
    section = section_of(both(engine_round(), engine_round()))
    section["host"]["emulated"] = False
    assert render_lab_markdown({"lab": section}).startswith("### firecracker and qemu on KVM\n")


def test_a_report_without_the_lab_has_no_table_of_it() -> None:
    assert render_lab_markdown({"figures": {}}) == ""


@pytest.mark.parametrize("first", [engine_round(), Round({})])
def test_the_chart_of_the_lab_is_the_same_for_the_same_report(tmp_path: Path, first: Round) -> None:
    section = section_of(both(first, engine_round(2.0)))
    draw_lab(section, tmp_path / "one.svg")
    draw_lab(section, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_text().rstrip().endswith("</svg>")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_lab_is_a_section_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_results(path, {"lab": {"figures": {"a": 1}}})
    write_results(path, {"format": 1, "figures": {}, "targets": []})
    assert read_results(path) == {"format": 1, "figures": {}, "targets": [], "lab": {"figures": {"a": 1}}}
    assert list(read_results(path))[-1] == "lab"


def test_what_is_run_in_the_lab_is_what_is_understood_there() -> None:
    words = shlex.split(render_command("python3", 3, (1, 10, 30), emulated=True))
    assert words[:3] == ["python3", "-m", "bench.lab_inside"]
    args = parse_args(words[3:])
    assert (args.rounds, args.n, args.emulated, str(args.out)) == (3, [1, 10, 30], True, "$FORKD_LAB_OUT/bench.json")
    assert "--emulated" not in render_command("/usr/bin/python3", 3, (1,), emulated=False)


def test_a_lab_that_broke_off_gives_the_rounds_that_were_done_and_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(section_of(both(engine_round(), engine_round()))))
    assert read_section(path, 0)["failures"] == []
    assert read_section(path, 124)["failures"] == ["lab: ended with exit status 124"]
    with pytest.raises(EngineFailed, match="exit status 124"):
        read_section(tmp_path / "absent.json", 124)


def test_a_lab_that_could_not_be_used_fails_the_run_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_report({}, {"lab"}, ["lab: host_lacks: no QEMU"]) == 1
    assert capsys.readouterr().err == "failed: lab: host_lacks: no QEMU\n"
    report = {"lab": section_of(both(engine_round(9.0), engine_round()))}
    assert print_report(report, {"lab"}, []) == 0, "slow is no failure"
    assert "ratios only" in capsys.readouterr().out
