"""What the benchmark makes of its readings about the daemon, by value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import service_figures as figures
from bench.figures import Figure
from bench.inventory import Inventory, find_leaks
from bench.load import parse_head
from bench.report import Round, Run
from bench.results import merge_results, read_results, write_results
from bench.service_chart import draw_daemon
from bench.service_report import judge_part, render_part, render_service_markdown
from forkd.errors import InvalidInput

HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": None, "accelerator": None}
NOTHING = Inventory(frozenset({7}), {"socket": 2}, 1, 3, {"sandboxes": 0, "events": 5}, frozenset({"home/registry.db"}))


def costs_round(factor: float = 1.0) -> Round:
    readings: dict[Figure, float] = {}
    for share, times in (("p50", factor), ("p99", factor * 2)):
        for n, total in ((1, 60.0), (100, 6000.0)):
            readings[figures.spawn_total("fake", n, share)] = total + 4 * times
            readings[figures.spawn_fork("fake", n, share)] = total
            readings[figures.spawn_own("fake", n, share)] = 4 * times
        for kind in ("exec", "eval"):
            readings[figures.call_agent("fake", kind, share)] = 0.5
            for way in figures.WAYS:
                readings[figures.call_total("fake", kind, way, share)] = 0.5 + times
                readings[figures.call_more("fake", kind, way, share)] = times
    return Round(readings)


def run_of(*rounds: Round) -> Run:
    return Run("2024-01-01T00:00:00+0000", HOST, {"engines": ["fake"]}, list(rounds))


def test_good_rounds_reach_every_target_of_the_costs() -> None:
    targets = render_part("daemon", run_of(costs_round(), costs_round()))["targets"]
    assert [(target["bound"], target["reached"]) for target in targets] == [
        ("<= 5", True),
        ("<= 40", True),
        *[("<= 2", True)] * 4,
    ]


def test_a_call_that_costs_too_much_misses_its_target_and_no_other() -> None:
    slow = costs_round()
    slow = Round({**slow.readings, figures.call_more("fake", "exec", "tcp", "p50"): 2.5})
    missed = [one["name"] for one in render_part("daemon", run_of(slow))["targets"] if not one["reached"]]
    assert missed == ["fake: exec by plain HTTP, TCP, on top of the agent, p50"]


@pytest.mark.parametrize("part", ["daemon", "load", "cycles"])
def test_what_was_not_measured_of_the_daemon_is_neither_reached_nor_missed(part: str) -> None:
    assert {target.reached for target in judge_part(part, {}, ["fake"])} == {None}


def test_one_error_or_one_thing_left_misses_the_target() -> None:
    fine = {figures.cycles("fake", "errors"): 0.0, figures.cycles("fake", "left"): 0.0}
    lost = {**fine, figures.cycles("fake", "left"): 1.0}
    assert [one["reached"] for one in render_part("cycles", run_of(Round(fine)))["targets"]] == [True, True]
    assert [one["reached"] for one in render_part("cycles", run_of(Round(lost)))["targets"]] == [True, False]
    crowd = {figures.load("errors"): 1.0, figures.load("left"): 0.0, figures.load("growth"): 0.1}
    assert [one["reached"] for one in render_part("load", run_of(Round(crowd)))["targets"]] == [False, True, True]


def test_the_table_of_costs_divides_what_the_client_waits_for() -> None:
    text = render_service_markdown({"daemon": render_part("daemon", run_of(costs_round()))})
    assert "| fake, spawn of 1 | 64 / 68 | 60 / 60 | 4 / 8 |" in text
    assert "| fake, spawn of 100 | 6004 / 6008 | 6000 / 6000 | 4 / 8 |" in text
    assert "| fake, eval, plain HTTP, unix socket | 1.50 / 2.50 | 0.500 / 0.500 | 1 / 2 |" in text
    assert "| fake: the daemon's part of a spawn of 1, p50 | <= 5 ms | 4 | 4 | yes |" in text


def test_a_report_without_the_daemon_has_no_table_of_it() -> None:
    assert render_service_markdown({"figures": {}}) == ""


def test_the_chart_of_the_daemon_is_the_same_for_the_same_report(tmp_path: Path) -> None:
    section = json.loads(json.dumps(render_part("daemon", run_of(costs_round(3.0)))))
    draw_daemon(section, tmp_path / "one.svg")
    draw_daemon(section, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_text().rstrip().endswith("</svg>")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_a_part_that_is_measured_again_replaces_that_part_only(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    engine = {"format": 1, "figures": {"cold_boot.total": {}}, "targets": []}
    write_results(path, engine)
    write_results(path, {"daemon": {"figures": {"a": 1}}})
    write_results(path, {"load": {"figures": {"b": 1}}})
    write_results(path, {"daemon": {"figures": {"a": 2}}})
    assert read_results(path) == {**engine, "daemon": {"figures": {"a": 2}}, "load": {"figures": {"b": 1}}}
    write_results(path, {"format": 1, "figures": {}, "targets": []})
    assert read_results(path)["figures"] == {} and read_results(path)["load"] == {"figures": {"b": 1}}
    assert list(read_results(path))[-2:] == ["daemon", "load"]


def test_nothing_of_an_old_report_of_the_engine_survives_a_new_one() -> None:
    assert merge_results({"format": 1, "figures": {"old": 1}, "odd": 1}, {"format": 1, "figures": {}}) == {
        "format": 1,
        "figures": {},
    }


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_that_holds_no_results_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="holds no results"):
        write_results(path, {"daemon": {}})
    assert path.read_text() == text


def test_everything_that_is_new_is_a_leak_and_what_went_is_none() -> None:
    after = Inventory(
        frozenset({8}),
        {"socket": 3, "anon_inode:[pidfd]": 1},
        2,
        4,
        {"sandboxes": 1, "events": 900},
        frozenset({"run/vms/sb-1", "home/audit.log", "home/audit.log.1", "home/registry.db-wal"}),
    )
    assert find_leaks(NOTHING, NOTHING) == []
    assert find_leaks(NOTHING, after) == [
        "process 8",
        "descriptor of anon_inode:[pidfd]",
        "descriptor of socket",
        "listening socket",
        "task",
        "row of sandboxes",
        "file run/vms/sb-1",
    ]
    assert find_leaks(after, Inventory(frozenset(), {}, 0, 0, {}, frozenset())) == []


def test_the_head_of_an_answer_gives_status_and_length() -> None:
    assert parse_head(b"HTTP/1.1 201 Created\r\nContent-Length: 12\r\nx: y: z\r\n\r\n") == (201, 12)
    assert parse_head(b"HTTP/1.1 204 No Content\r\n\r\n") == (204, 0)
