"""What the benchmark makes of its readings about forks of live VMs, by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import fork_figures as figures
from bench.__main__ import parse_args, print_report
from bench.endurance import drift
from bench.fork_report import PARTS, judge_part, render_forks_markdown, render_part
from bench.ground import LiveTimes
from bench.inventory import Inventory, find_leaks
from bench.live import read_chain, read_forks, render_write, sum_of
from bench.live_chart import draw_live
from bench.report import Round, Run, summarize
from bench.results import SECTIONS, read_results, write_results

HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": "7.2.22 (Debian 1)", "accelerator": "tcg"}
SETTINGS: dict[str, dict[str, Any]] = {
    "live": {"written_mib": [0, 64], "forks": 3, "chain": 4, "memory_mib": 512},
    "crowd": {"n": 1000},
    "endurance": {"cycles": 20, "live": 3},
}


def times(*pauses: float) -> list[LiveTimes]:
    return [LiveTimes(pause, pause * 4) for pause in pauses]


def live_round(factor: float = 1.0) -> Round:
    forks = {**read_forks(0, times(6, 7 * factor, 20)), **read_forks(64, times(8, 9 * factor, 25))}
    return Round({**forks, **read_chain(times(10, 10, 12, 12))})


def crowd_round(factor: float = 1.0, lost: int = 0) -> Round:
    slower = {"made": 20, "idle": 0.06, "killed": 10, "all_memory": 6000}
    values = {"ok": 1000 - lost, "distinct": 1000, **{name: value * factor for name, value in slower.items()}}
    return Round({figures.crowd(1000, name): value for name, value in values.items()})


def endurance_round(errors: int = 0, gained: float = 0.1) -> Round:
    values = {"done": 20, "errors": errors, "left": 0, "gained": gained}
    return Round(
        {figures.endurance(kind, name): value for kind in ("cycles", "live") for name, value in values.items()}
    )


GOOD = {"live": live_round(), "crowd": crowd_round(), "endurance": endurance_round()}


def section_of(part: str, *rounds: Round) -> dict[str, Any]:
    run = Run("2024-01-01T00:00:00+0000", HOST, SETTINGS[part], list(rounds))
    section = json.loads(json.dumps(render_part(part, run)))
    assert isinstance(section, dict)
    return section


def missed(part: str, *rounds: Round) -> list[str]:
    return [target["name"] for target in section_of(part, *rounds)["targets"] if target["reached"] is False]


@pytest.mark.parametrize("part", PARTS)
def test_good_rounds_reach_every_target_of_forks(part: str) -> None:
    section = section_of(part, GOOD[part], GOOD[part])
    assert {target["reached"] for target in section["targets"]} == {True}
    assert section["settings"]["rounds_done"] == 2
    for figure in section["figures"].values():
        assert figure["stops_at"] and figure["prepared"] and figure["what"]


@pytest.mark.parametrize("part", PARTS)
def test_what_was_not_measured_of_forks_is_neither_reached_nor_missed(part: str) -> None:
    assert {target.reached for target in judge_part(part, {}, SETTINGS[part])} == {None}


def test_a_source_that_stands_still_for_too_long_misses_its_target_and_no_other() -> None:
    assert missed("live", live_round(1.2)) == ["live fork, 64 MiB just written: pause of the source, p50"]


def test_a_live_fork_that_was_wrong_once_misses_the_target() -> None:
    lost = Round({**live_round().readings, figures.live_ok(64): 2})
    wanted = "live fork, 64 MiB just written: all forks right in every round"
    assert missed("live", live_round(), live_round(), lost) == [wanted]


def test_a_slow_crowd_or_one_that_lacks_a_vm_misses_its_targets() -> None:
    assert missed("crowd", crowd_round(1.4)) == ["1000 VMs made"]
    slow = ["1000 VMs made", "1000 VMs: idle CPU each", "1000 VMs killed and cleaned up"]
    assert missed("crowd", crowd_round(1.7)) == slow
    assert missed("crowd", crowd_round(lost=1)) == ["1000 of 1000 VMs right in every round"]


def test_a_crowd_of_another_size_is_not_judged() -> None:
    small = Round({figures.crowd(3, "made"): 1.0})
    assert {target["reached"] for target in section_of("crowd", small)["targets"]} == {None}


def test_one_error_and_memory_that_grows_miss_the_targets_of_endurance() -> None:
    assert missed("endurance", endurance_round(errors=1)) == [
        "fork, eval, kill: no error",
        "live forks of a busy VM: no error",
    ]
    assert missed("endurance", endurance_round(gained=1.5)) == ["fork, eval, kill: memory the template gained"]


def test_forks_of_one_amount_are_read_with_their_shares() -> None:
    read = {figure.name: value for figure, value in read_forks(64, times(8, 9, 25)).items()}
    assert read == {
        "live.64.ok": 3,
        "live.64.pause.p50": 9,
        "live.64.pause.p99": 25,
        "live.64.answer.p50": 36,
        "live.64.answer.p99": 100,
    }
    assert {figure.name: value for figure, value in read_forks(64, []).items()} == {"live.64.ok": 0}


def test_the_last_forks_of_a_chain_are_compared_with_the_first() -> None:
    read = {figure.name: value for figure, value in read_chain(times(*[10] * 5, *[99] * 40, *[20] * 5)).items()}
    assert read["live.chain.pause.1 to 5"] == 10 and read["live.chain.pause.46 to 50"] == 20
    assert read["live.chain.pause.ratio"] == read["live.chain.answer.ratio"] == 2
    assert read_chain(times(10))[figures.chain_ratio("pause", 1, 1)] == 1


def test_what_is_written_in_a_guest_is_what_is_expected_of_it() -> None:
    for size, mark in ((0, 7), (8 * 4096, 7)):
        guest: dict[str, Any] = {}
        exec(render_write(size, mark), guest)  # noqa: S102
        assert sum(guest["written"][::4096]) == sum_of(size, mark)
        exec(render_write(size and 4096, 0), guest)  # noqa: S102
        assert len(guest["written"]) == size
        assert sum(guest["written"][::4096]) == sum_of(size, mark) - (mark if size else 0)


def test_getting_slower_shows_in_the_last_tenth() -> None:
    assert drift([1.0] * 10 + [5.0] * 80 + [2.0] * 10) == {"drift": 2.0}
    assert drift([1.0] * 9) == {}


def test_the_tables_of_forks_have_a_row_for_each_amount_figure_and_target() -> None:
    text = render_forks_markdown({part: section_of(part, done) for part, done in GOOD.items()})
    assert text.startswith("### Forks of a running VM\n\n| just written |")
    assert "| 64 MiB | 9 / 25 ms | 36 / 100 ms | 3 forks |" in text
    assert "| live forks 3 to 4 of one VM / 1 to 2: its source stands still | 1.20 | 1.20 to 1.20 |" in text
    assert "| live fork, 64 MiB just written: pause of the source, p50 | <= 10 ms | 9 | 9 | yes |" in text
    assert "| 1000 VMs at once: made, all ready | 20 s | 20 to 20 |" in text
    assert "| fork, eval, kill: errors and wrong answers | 0 | 0 to 0 |" in text
    assert "live.64" not in text
    assert render_forks_markdown({"figures": {}}) == ""


def test_amounts_that_no_fork_answered_with_are_a_gap_in_the_table() -> None:
    text = render_forks_markdown({"live": section_of("live", Round(read_forks(0, [])))})
    assert "| 0 MiB | - / - ms | - / - ms | 0 forks |" in text


@pytest.mark.parametrize("done", [live_round(), Round(read_forks(0, times(7)))])
def test_the_chart_of_live_forks_is_the_same_for_the_same_report(tmp_path: Path, done: Round) -> None:
    section = section_of("live", done)
    draw_live(section, tmp_path / "one.svg")
    draw_live(section, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_text().rstrip().endswith("</svg>")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize("part", PARTS)
def test_each_part_about_forks_is_a_section_of_its_own(tmp_path: Path, part: str) -> None:
    assert part in SECTIONS
    path = tmp_path / "results.json"
    write_results(path, {part: {"figures": {"a": 1}}})
    write_results(path, {"format": 1, "figures": {}, "targets": []})
    assert read_results(path) == {"format": 1, "figures": {}, "targets": [], part: {"figures": {"a": 1}}}


def test_a_wrong_answer_fails_the_run_and_a_slow_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_report({"live": section_of("live", live_round(9.0))}, {"live"}, []) == 0
    wrong = Round(live_round().readings, ("live: 64 MiB written: fork 2: contract_broken: no",))
    assert print_report({"live": section_of("live", wrong)}, {"live"}, []) == 1
    assert capsys.readouterr().err == "failed: live: 64 MiB written: fork 2: contract_broken: no\n"


def test_summaries_of_rounds_with_and_without_a_chain_are_of_those_that_have_it() -> None:
    ratio = figures.chain_ratio("pause", 4, 2)
    assert summarize([live_round(), Round({})])[ratio.name].values == (pytest.approx(1.2),)


def test_a_thread_that_still_traces_is_a_leak() -> None:
    before = Inventory(frozenset(), {}, 0, 1, {}, frozenset())
    after = Inventory(frozenset(), {}, 0, 1, {}, frozenset(), threads=1)
    assert find_leaks(before, after) == ["thread"]
    assert find_leaks(after, before) == []


def test_how_much_is_done_can_be_said() -> None:
    args = parse_args(["--live-forks", "3", "--crowd", "5", "--endurance", "7", "2", "--live-chart", "x.png"])
    assert (args.live_forks, args.crowd, args.endurance, args.live_chart) == (3, 5, [7, 2], Path("x.png"))
    args = parse_args([])
    assert (args.live_forks, args.crowd, args.endurance) == (20, 1000, (5000, 500))
