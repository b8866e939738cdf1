"""What the benchmark makes of its readings: targets, results.json, tables and charts, by value."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import parse_args, print_report
from bench.branch import BRANCH, KINDS, BranchTimes, branched, read_repeated
from bench.chain import LIVE as LIVE_TEMPLATE
from bench.chain import LOADED, Chain, read_pack
from bench.chain import read_chain as read_depths
from bench.charts import CHARTS, draw
from bench.daemon import CALLS, SPAWNS, WAYS, called
from bench.engine import ENGINE, with_ratios
from bench.figures import Figure, Round, Run, Values, by_name, joined, shares, step_lengths, summarize
from bench.forks import FORK, FORKS, START, forked, stepped
from bench.ground import parse_cpu_model, render_host
from bench.inventory import Inventory, find_leaks
from bench.lab import ENGINES, compose_round, render_lab
from bench.leasing import LEASES
from bench.live import LIVE, LiveTimes, after_writing, read_chain, read_forks, render_write, sum_of
from bench.load import CYCLES as DAEMON_CYCLES
from bench.load import LOAD, parse_head
from bench.many import CROWD, CYCLES, LIVES, drift
from bench.network import CELL, NETWORK, PLAIN, Sample, compare_samples, read_samples
from bench.packets import BARE, GATE, PACKETS, SLOT, Sent, read_sending
from bench.report import (
    SECTIONS,
    TOP,
    merge_results,
    read_results,
    render_report,
    render_run,
    render_value,
    write_results,
)
from bench.siege import SIEGE
from forkd.errors import InvalidInput

HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": "7.2.22 (Debian 1)", "accelerator": "tcg"}
LAB_HOST = {**HOST, "accelerator": "kvm", "firecracker": "1.12.1", "emulated": True}
SETTINGS: dict[str, dict[str, Any]] = {
    TOP: {"n": [100], "ways": [FORK, START], "memory_mib": 512},
    "live": {"written_mib": [0, 64], "forks": 3, "chain": 4, "memory_mib": 512},
    "branch": {
        "branches": 3,
        "written": 1,
        "forks": 1,
        "rewinds": 1,
        "children": 5,
        "repeated": 4,
        "written_mib": 64,
        "memory_mib": 512,
        "chain": {"depth": 10, "spawns": 2},
    },
    "network": {"n": 100, "variants": [PLAIN, CELL, NETWORK], "packets": 3, "memory_mib": 512},
    "crowd": {"n": 1000},
    "endurance": {"cycles": 20, "live": 3},
    "lab": {"engines": list(ENGINES), "n": [1, 30], "memory_mib": 512},
    **{part: {"engines": ["fake"]} for part in ("daemon", "load", "cycles", "siege")},
}
NOTHING = Inventory(frozenset({7}), {"socket": 2}, 1, 3, {"sandboxes": 0, "events": 5}, frozenset({"home/registry.db"}))


def steps(n: int, way: str = "", **lengths: list[float]) -> dict[Figure, float]:
    read: dict[Figure, float] = {}
    for step, values in lengths.items():
        read |= FORKS.read({"step.{step}": values}, **stepped(step.replace("_", " ")), **forked(n, way))
    return read


def engine_round(factor: float = 1.0) -> Round:
    readings = ENGINE.read({"cold_boot.total": 10.0, "template.made": 1.0, "trip.eval": [1.5 * factor]})
    readings |= FORKS.read({"child": [20.0 * factor]}, **forked(1, FORK))
    for way, wall, unique in ((FORK, 1.6, 5.5), (START, 8.0, 22.0)):
        values = {
            "wall": wall * factor,
            "ok": 100,
            "child": [wall * 10],
            "unique.largest": unique * factor,
            "idle": 0.2 * factor,
            "kill": 0.5,
        }
        readings |= FORKS.read(values, window_s=5, **forked(100, way)) | steps(100, way, resume=[1.0, 2.5])
    readings |= steps(100, FORK, clone=[4.0]) | steps(100, START, process_start=[100.0])
    return Round(with_ratios(readings, [100]))


def started_round() -> Round:
    """As an engine that forks no live VM, and as before there were templates."""
    return Round({**FORKS.read({"wall": 0.2, "child": [190.0]}, **forked(1)), **steps(1, contract=[90.0, 99.0])})


def times(*pauses: float) -> list[LiveTimes]:
    return [LiveTimes(pause, pause * 4) for pause in pauses]


def live_round(factor: float = 1.0) -> Round:
    forks = {**read_forks(0, times(6, 7 * factor, 20)), **read_forks(64, times(8, 9 * factor, 25))}
    return Round({**forks, **read_chain(times(10, 10, 12, 12))})


def branch_round(factor: float = 1.0, lost: int = 0) -> Round:
    readings: dict[Figure, float] = {}
    for kind in KINDS:
        values: Values = {"ok": 6 - lost, "pause": [8.0 * factor], "returns": [12.0], "usable": [50.0 * factor]}
        values |= {"written": [600.0], "fork": [150.0], "rewind": [40.0], "dirty": 66.0, "stored": 66.5}
        readings |= BRANCH.read(values, **branched(kind, 64))
    readings |= read_repeated([BranchTimes(each, each, each) for each in (10, 10, 12, 12)], 4)
    chain = Chain(layers={1: (11, 10), 10: (11, 10)}, load_ms={0: 90.0})
    chain.spawns = {(kind, depth): [20.0, 20.0 + depth / 10] for kind in (LIVE_TEMPLATE, LOADED) for depth in (0, 10)}
    chain.tries.right = 2 * 7
    readings |= read_depths(chain).readings
    for with_image in (True, False):
        readings |= read_pack(with_image, [60 << 20], [120.0], 512)
    return Round(readings)


def forked_once(kept: float, unique: float, contract: float) -> Sample:
    values = {"kept": kept, "ready": kept + 1, "unique.mean": unique, "cpu": contract, "ok": 100}
    return Sample(values, [contract], {"contract": [contract]})


def network_round(factor: float = 1.0, more: float = 0.5, sent: float = 0.9, arrived: int = 3) -> Round:
    samples = {
        **{kind: [forked_once(kept, 3.5, 10.0) for kept in (2.0, 4.0, 3.0)] for kind in (PLAIN, CELL)},
        NETWORK: [forked_once(kept, 3.5 + more, 12.0) for kept in (2.2 * factor, 4.8 * factor, 3.3 * factor)],
    }
    readings = compare_samples(samples, 100)
    readings |= PACKETS.read({"frame": [20.0], "way": [0.1, 0.4], "arrival": [20.1], "ok": arrived})
    rates = {BARE: [10.0, 20.0], SLOT: [10 * sent, 20 * sent], GATE: [5.0]}
    readings |= read_sending({road: [Sent(rate, 40.0) for rate in each] for road, each in rates.items()})
    return Round({**readings, **LEASES.read({"made": [9.0], "same": [1.0], "other": [3.0], "released": [1.0]})})


def crowd_round(factor: float = 1.0, lost: int = 0) -> Round:
    slower = {"made": 20, "idle": 0.06, "killed": 10, "all_memory": 6000}
    values = {"ok": 1000 - lost, "distinct": 1000, **{name: value * factor for name, value in slower.items()}}
    return Round(CROWD.read(values, n=1000))


def endurance_round(errors: int = 0, gained: float = 0.1) -> Round:
    values = {"done": 20, "errors": errors, "left": 0, "gained": gained}
    return Round({**CYCLES.read(values), **LIVES.read(values)})


def costs_round(factor: float = 1.0) -> Round:
    times = [factor, factor * 2]
    readings: dict[Figure, float] = {}
    for n, fork in ((1, 60.0), (100, 6000.0)):
        own = [4 * each for each in times]
        values = {"total": [fork + each for each in own], "fork": [fork], "own": own}
        readings |= SPAWNS.read(values, engine="fake", n=n)
    for kind in ("exec", "eval"):
        readings |= CALLS.read({"agent": [0.5]}, **called("fake", kind))
        for way in WAYS:
            values = {"{way}.total": [0.5 + each for each in times], "{way}.more": times}
            readings |= CALLS.read(values, **called("fake", kind, way))
    return Round(readings)


def daemon_cycles(left: int = 0) -> Round:
    return Round(DAEMON_CYCLES.read({"errors": 0, "left": left}, engine="fake"))


def one_engine(factor: float = 1.0, ok: int = 30, share: float = 5.0) -> Round:
    readings = ENGINE.read({"cold_boot.total": 30.0})
    for n in (1, 30):
        cpu = {"cpu": 400.0 * factor, "cpu_in_all": 500.0 * factor}
        values = {"wall": n * factor, "ok": n if n == 1 else ok, **cpu}
        readings |= FORKS.read(values, of="all processes", **forked(n))
        readings |= steps(n, contract=[100.0 * factor, 200.0 * factor])
    held = {"unique_share": share, "idle_unique.mean": 4.0 * factor, "idle_unique.largest": 5.0 * factor}
    readings |= FORKS.read(held, **forked(30))
    return Round(readings)


def together(
    first: Round, second: Round | None = None, third: Round | None = None, pause_ms: float = 100.0, live: int = 8
) -> Round:
    """The engines of the lab, the first of which forks what runs."""
    forks = LIVE.read({"pause": [pause_ms], "ok": live}, **after_writing(64)) if first.readings else {}
    rounds = (joined([first, Round(forks)]), second or one_engine(2.0), third or one_engine(3.0))
    return compose_round(dict(zip(ENGINES, rounds, strict=True)), [1, 30])


LOST_CHILD = Round(FORKS.read({"ok": 99}, **forked(100, START)))
LOST_FORK = Round(LIVE.read({"ok": 2}, **after_writing(64)))
LAB_LOST = together(one_engine(0.5, ok=29))
SLOW_CALL = Round(CALLS.read({"{way}.more": [2.5]}, **called("fake", "exec", "tcp")))
GOOD = {
    TOP: engine_round(),
    "live": live_round(),
    "branch": branch_round(),
    "network": network_round(),
    "crowd": crowd_round(),
    "endurance": endurance_round(),
    "daemon": costs_round(),
    "load": Round(LOAD.read({"errors": 0, "left": 0, "growth": 0.1})),
    "cycles": daemon_cycles(),
    "siege": Round(SIEGE.read({"errors": 0, "slower": 2.5, "most": 120.0})),
    "lab": together(one_engine(0.5)),
}


def section_of(part: str, *rounds: Round) -> dict[str, Any]:
    run = Run("2024-01-01T00:00:00+0000", LAB_HOST if part == "lab" else HOST, SETTINGS[part], list(rounds))
    section = json.loads(json.dumps(render_lab(run) if part == "lab" else render_run(part, run)))
    assert isinstance(section, dict)
    return section


def text_of(part: str, *rounds: Round) -> str:
    section = section_of(part, *rounds)
    return render_report({part: section} if part else section)


def targets_of(part: str, *rounds: Round) -> list[dict[str, Any]]:
    targets: list[dict[str, Any]] = section_of(part, *rounds)["targets"]
    return targets


def missed(part: str, *rounds: Round) -> list[str]:
    return [target["name"] for target in targets_of(part, *rounds) if target["reached"] is False]


def test_shares_are_values_that_were_measured() -> None:
    assert shares([float(v) for v in range(1, 101)]) == {"p50": 50.0, "p99": 99.0}
    assert shares([3.0]) == {"p50": 3.0, "p99": 3.0}
    assert shares([2.0, 1.0]) == {"p50": 1.0, "p99": 2.0}


def test_a_family_reads_samples_as_shares_in_its_order_and_nothing_it_does_not_declare() -> None:
    read = LIVE.read({"ok": 2, "pause": [1.0, 2.0], "answer": []}, **after_writing(0))
    assert by_name(read) == {"live.0.pause.p50": 1.0, "live.0.pause.p99": 2.0, "live.0.ok": 2}
    assert next(iter(read)).what == "live fork, 0 MiB just written: its source stands still, p50"
    with pytest.raises(KeyError, match="pauses"):
        LIVE.read({"pauses": 1.0}, **after_writing(0))


def test_steps_are_told_apart_by_when_they_ended_not_by_when_they_were_noted() -> None:
    lengths = step_lengths(10.0, {"contract": 10.7, "process start": 10.2, "resume": 10.5})
    assert list(lengths) == ["process start", "resume", "contract"]
    assert list(lengths.values()) == pytest.approx([0.2, 0.3, 0.2])


def test_a_ratio_is_of_one_round_and_absent_where_a_part_of_it_is() -> None:
    cold, wall = ENGINE.read({"cold_boot.total": 10.0}), FORKS.read({"wall": 2.5}, **forked(10))
    assert by_name(with_ratios(cold | wall, [1, 10]))["ratio.fork_10_to_cold_boot"] == 0.25
    assert with_ratios(wall, [1, 10]) == wall
    alone = FORKS.read({"wall": 1.6}, **forked(100, FORK))
    assert with_ratios(alone, [100]) == alone, "a ratio of the two ways needs both"


def test_each_way_has_its_ratio_to_a_cold_boot_and_the_two_have_one_to_each_other() -> None:
    readings = by_name(engine_round().readings)
    assert readings["ratio.fork_100_fork_to_cold_boot"] == pytest.approx(0.16)
    assert readings["ratio.fork_100_start_to_cold_boot"] == pytest.approx(0.8)
    assert readings["ratio.fork.100.fork_to_start.wall"] == pytest.approx(0.2)
    assert readings["ratio.fork.100.fork_to_start.unique.largest"] == pytest.approx(0.25)
    compared = [name for name in readings if "fork_to_start" in name]
    assert not [name for name in compared if "step" in name or name.endswith((".ok", ".idle"))]


def test_a_round_of_all_engines_has_the_readings_of_each_and_the_ratios_of_the_first_two() -> None:
    readings = by_name(together(one_engine(), one_engine(2.0), one_engine(3.0), pause_ms=200.0).readings)
    assert [readings[f"{engine}.fork.30.wall"] for engine in ENGINES] == [30, 60, 90]
    assert readings["versus.fork.30.wall"] == readings["versus.fork.30.cpu_in_all"] == 0.5
    assert [readings[f"{engine}.ratio.cold_boot_to_fork_1"] for engine in ENGINES] == [30, 15, 10]
    assert readings["ratio.pause_to_restore"] == pytest.approx(0.1)
    # Of amounts; not of counts, shares or steps.
    compared = [name for name in readings if "versus" in name]
    assert "versus.cold_boot.total" in compared
    assert not [name for name in compared if "step" in name or name.endswith((".ok", ".unique_share"))]


def test_what_one_engine_did_not_yield_has_no_ratio_and_its_failures_are_kept() -> None:
    done = together(one_engine(), Round({}, ("round 1 of 1, restored: engine_failed: no",)))
    names = list(by_name(done.readings))
    assert not [name for name in names if name.startswith(("versus.", "restored.", "ratio."))]
    assert done.failures == ("round 1 of 1, restored: engine_failed: no",)


def test_a_summary_has_the_median_and_every_round_that_has_the_figure() -> None:
    walls = [Round(FORKS.read({"wall": value}, **forked(1))) for value in (3.0, 1.0, 9.0)]
    summary = summarize([walls[0], Round({}), *walls[1:]])["fork.1.wall"]
    assert summary.values == (3.0, 1.0, 9.0) and summary.median == 3.0
    assert summarize([live_round(), Round({})])["live.chain.pause.ratio"].values == (pytest.approx(1.2),)


@pytest.mark.parametrize(
    ("part", "bounds"),
    [
        (TOP, ["<= 0.2", "< 1", "= 100", "= 100", "<= 25", "<= 7", "<= 24", "< 0.5", "< 0.5", "<= 2"]),
        ("live", ["<= 10", "<= 30", "<= 80", "= 3", "= 3"]),
        (
            "branch",
            [
                *["<= 10"] * 2,
                *["<= 30"] * 2,
                *["<= 80"] * 2,
                *["<= 200"] * 2,
                *["<= 60"] * 2,
                *["= 6"] * 2,
                *["<= 1.25"] * 2,
                "= 4",
                *["<= 1.1"] * 2,
                *["<= 1.2"] * 2,
                "= 14",
                *["<= 0.125"] * 2,
            ],
        ),
        ("network", [*["= 100"] * 3, "<= 1.3", "<= 1.3", "<= 1.5", "<= 5", "<= 5", "= 3", ">= 0.6"]),
        ("crowd", ["<= 25", "= 1000", "= 1000", "< 0.1", "<= 15"]),
        ("endurance", ["= 0", "<= 1", "= 0", "= 0", "= 0"]),
        ("daemon", ["<= 5", "<= 40", *["<= 2"] * 4]),
        ("load", ["= 0", "<= 2", "= 0"]),
        ("cycles", ["= 0", "= 0"]),
        ("siege", ["= 0", "<= 3", "< 250"]),
        ("lab", [">= 40", "<= 0.25", "<= 0.2", "<= 0.25", "<= 1", "= 8", *["= 30"] * 3, *["< 10"] * 3]),
    ],
)
def test_good_rounds_reach_every_target_and_what_was_not_measured_is_neither_reached_nor_missed(
    part: str, bounds: list[str]
) -> None:
    section = section_of(part, GOOD[part], GOOD[part])
    assert [target["bound"] for target in section["targets"]] == bounds
    assert {target["reached"] for target in section["targets"]} == {True}
    assert {target["reached_in_every_round"] for target in section["targets"]} == {True}
    assert section["settings"]["rounds_done"] == 2
    unmeasured = targets_of(part, Round({}))
    assert [target["bound"] for target in unmeasured] == bounds
    assert {target["reached"] for target in unmeasured} == {None}


@pytest.mark.parametrize("part", GOOD)
def test_json_has_for_every_figure_where_it_stops_and_what_was_prepared(part: str) -> None:
    section = section_of(part, GOOD[part], Round({}, ("round 2: fork of 100: lost",)))
    keys = {"started", "host", "settings", "failures", "targets", "figures"}
    assert set(section) == (keys | {"format"} if part == TOP else keys)
    assert section["failures"] == ["round 2: fork of 100: lost"]
    for figure in section["figures"].values():
        assert {"what", "unit", "median", "min", "max", "stops_at", "prepared", "rounds"} == set(figure)
        assert figure["what"] and figure["stops_at"] and figure["prepared"]
        assert "{" not in json.dumps(list(figure.values())[:-1])
    for target in section["targets"]:
        assert {"name", "bound", "unit", "value", "worst", "reached", "reached_in_every_round"} == set(target)


def test_one_bad_round_of_three_shows_although_the_median_is_good() -> None:
    targets = targets_of(TOP, engine_round(), engine_round(), engine_round(3.0))
    assert [target["reached"] for target in targets] == [True] * 10
    counts = [target["bound"] == "= 100" for target in targets]
    assert [target["reached_in_every_round"] for target in targets] == counts
    assert targets[1]["worst"] == pytest.approx(2.4)


def test_without_templates_the_targets_about_them_are_not_measured() -> None:
    started = Round({figure: value for figure, value in engine_round().readings.items() if ".fork." not in figure.name})
    unmeasured = [target["name"] for target in targets_of(TOP, started) if target["reached"] is None]
    assert len(unmeasured) == 4 and all("from a template" in name for name in unmeasured)


@pytest.mark.parametrize(
    ("part", "done", "names"),
    [
        ("live", live_round(1.2), ["live fork, 64 MiB just written: pause of the source, p50"]),
        ("branch", branch_round(1.5), [f"branch of {who}, 64 MiB written: pause, p50" for who in KINDS.values()]),
        ("branch", branch_round(lost=1), [f"branches of {who}: all right in every round" for who in KINDS.values()]),
        (
            "network",
            network_round(1.25),
            ["fork of 100 in a cell, with a network / without: all contracts kept"],
        ),
        ("network", network_round(more=1.6), ["unique memory per child in a cell, with a network, more than without"]),
        ("network", network_round(sent=0.5), ["throughput out through its network and the uplink / on a bare tap"]),
        ("network", network_round(arrived=2), ["all first packets arrive in every round"]),
        ("crowd", crowd_round(1.4), ["1000 VMs made"]),
        ("crowd", crowd_round(1.7), ["1000 VMs made", "1000 VMs: idle CPU each", "1000 VMs killed and cleaned up"]),
        ("crowd", crowd_round(lost=1), ["1000 of 1000 VMs right in every round"]),
        ("endurance", endurance_round(errors=1), ["fork, eval, kill: no error", "live forks of a busy VM: no error"]),
        ("endurance", endurance_round(gained=1.5), ["fork, eval, kill: memory the template gained"]),
        ("daemon", joined([costs_round(), SLOW_CALL]), ["fake: exec by plain HTTP, TCP, on top of the agent, p50"]),
        (
            "cycles",
            Round(DAEMON_CYCLES.read({"errors": 0, "left": 1}, engine="fake")),
            ["fake, cycles: nothing is left"],
        ),
        ("load", Round(LOAD.read({"errors": 1, "left": 0, "growth": 0.1})), ["load: no error, no wrong answer"]),
        (
            "lab",
            together(one_engine(2.0, share=12.0), one_engine(), pause_ms=300.0),
            [
                "firecracker: a fork of 1 is at least 40 times as fast as a cold boot",
                "fork of 1, firecracker / restored",
                "pause of a live fork, 64 MiB just written, p50 / fork of 1, restored",
                "CPU time per child of 30, firecracker / restored",
                "unique memory of an idle child of 30, firecracker / restored",
                "firecracker: unique memory of the largest of 30 idle children, of the guest's resident",
            ],
        ),
        (
            "lab",
            together(one_engine(0.5), live=7),
            ["firecracker, live fork, 64 MiB just written: all forks right"],
        ),
    ],
)
def test_what_is_too_slow_too_large_or_wrong_misses_its_target_and_no_other(
    part: str, done: Round, names: list[str]
) -> None:
    assert missed(part, done) == names


@pytest.mark.parametrize(
    ("part", "done", "name", "value", "worst"),
    [
        (TOP, LOST_CHILD, "100 of 100 children by start succeed in every round", 100, 99),
        ("live", LOST_FORK, "live fork, 64 MiB just written: all forks right in every round", 3, 2),
        ("lab", LAB_LOST, "firecracker: 30 of 30 children right, the contract kept by each, in every round", 30, 29),
    ],
)
def test_a_single_child_missing_in_a_single_round_misses_the_target(
    part: str, done: Round, name: str, value: float, worst: float
) -> None:
    (target,) = [each for each in targets_of(part, GOOD[part], GOOD[part], done) if each["reached"] is False]
    assert (target["name"], target["value"], target["worst"]) == (name, value, worst)


def test_of_forks_in_turns_the_ratio_is_the_median_of_those_within_a_turn() -> None:
    samples = {PLAIN: [forked_once(1.0, 3.0, 5.0), forked_once(10.0, 3.0, 5.0)]}
    samples[NETWORK] = [forked_once(1.1, 3.0, 5.0), forked_once(13.0, 3.0, 5.0)]
    readings = by_name(compare_samples(samples, 10))
    assert readings["network.versus.10.network.kept"] == pytest.approx(1.2)
    assert readings["network.fork.10.network.kept"] == pytest.approx(7.05)
    samples[NETWORK].pop()
    assert not [name for name in by_name(compare_samples(samples, 10)) if "versus" in name], "a turn is missing"
    assert by_name(read_samples({PLAIN: []}, 10)) == {}


def test_what_was_not_sent_has_no_rate_and_a_turn_that_ended_early_counts_as_far_as_it_came() -> None:
    sent = {BARE: [Sent(10.0, 1.0), Sent(20.0, 3.0)], SLOT: [Sent(8.0, 5.0)], GATE: []}
    assert by_name(read_sending(sent)) == {
        "network.send.bare": 15.0,
        "network.send.cpu.bare": 2.0,
        "network.send.slot": 8.0,
        "network.send.cpu.slot": 5.0,
        "network.send.ratio.slot": 0.8,
    }


def test_a_crowd_of_another_size_is_not_judged() -> None:
    assert {target["reached"] for target in targets_of("crowd", Round(CROWD.read({"made": 1.0}, n=3)))} == {None}


def test_the_worst_round_of_a_speedup_is_the_slowest() -> None:
    speedup = targets_of("lab", *(together(one_engine(factor)) for factor in (0.5, 0.6, 1.5)))[0]
    assert (speedup["value"], speedup["worst"]) == (50, 20)
    assert (speedup["reached"], speedup["reached_in_every_round"]) == (True, False)


def test_no_fork_figure_counts_processes_started_ahead() -> None:
    assert FORKS.at("wall", **forked(100, START)).prepared.endswith("no process started ahead")
    assert FORKS.at("child", **forked(100, START)).prepared.endswith("no process started ahead")
    assert "no process started ahead but its template" in FORKS.at("wall", **forked(100, FORK)).prepared


@pytest.mark.parametrize(
    ("part", "rounds", "begin", "rows", "absent"),
    [
        (
            TOP,
            (engine_round(), engine_round(1.25)),
            "| what | median | fastest to slowest round |",
            [
                "| cold boot of one VM, warmed, first eval | 10 s | 10 to 10 |",
                "| template: made in all | 1 s | 1 to 1 |",
                "| fork of 100, all ready | 1.80 s (1.60 to 2) | 9 s (8 to 10) | 0.200 |",
                "| end of all 100 children | 0.500 s (0.500 to 0.500) | 0.500 s (0.500 to 0.500) | 1 |",
                "| step of one child made from a template, p50 / p99 in ms | fork of 100 |",
                "| clone | 4 / 4 |\n| resume | 1 / 2.50 |",
                "| process start | 100 / 100 |\n| resume | 1 / 2.50 |",
                "| fork of 100 from a template / cold boot of one | <= 0.2 | 0.180 | 0.200 | yes |",
                "| eval round trip on a warm child, p50 | <= 2 ms | 1.69 | 1.88 | yes |",
            ],
            "fork_to_start",
        ),
        (
            TOP,
            (started_round(),),
            "| what | median |",
            [
                "| fork of 1, all ready | 0.200 s | 0.200 to 0.200 |",
                "| step of one child, p50 / p99 in ms | fork of 1 |\n|---|---|\n| contract | 90 / 99 |",
            ],
            "ratio",
        ),
        (TOP, (Round(ENGINE.read({"cold_boot.total": 1.0})),), "| what |", ["| 1 s | 1 to 1 |"], "step of one child"),
        (
            "live",
            (live_round(),),
            "### Forks of a running VM\n\n| just written |",
            [
                "| 64 MiB | 9 / 25 ms | 36 / 100 ms | 3 forks |",
                "| live forks 3 to 4 of one VM / 1 to 2: its source stands still | 1.20 | 1.20 to 1.20 |",
                "| live fork, 64 MiB just written: pause of the source, p50 | <= 10 ms | 9 | 9 | yes |",
            ],
            "live.64",
        ),
        (
            "live",
            (Round(read_forks(0, [])),),
            "### Forks",
            ["| 0 MiB | - / - ms | - / - ms | 0 forks |"],
            "stands still",
        ),
        (
            "branch",
            (branch_round(),),
            "### Branches, chains and packs\n\n| 64 MiB just written, p50 / p99 in ms |",
            [
                "| a sandbox that writes | 8 / 8 | 12 / 12 | 50 / 50 | 600 / 600 | 150 / 150 | 40 / 40 | 66 / 66.5 |",
                "| branches 3 to 4 of one sandbox / 1 to 2: it stands still | 1.20 | 1.20 to 1.20 |",
                "| template of depth 0, loaded from files | 90 ms | 90 to 90 |",
                "| layer at depth 10 / what differs | <= 1.2 | 1.10 | 1.10 | yes |",
                "| pack without image: of the memory size | 0.117 | 0.117 to 0.117 |",
            ],
            "branch.",
        ),
        (
            "network",
            (network_round(),),
            "### Forks with a cell and a network\n\n| median (fastest to slowest round) | without | in a cell |",
            [
                "| fork of 100: all contracts kept | 3 s (3 to 3) | 3 s (3 to 3) | 3.30 s (3.30 to 3.30) | 1.10 |",
                "| fork of 100: contract, p50 | 10 ms (10 to 10) | 10 ms (10 to 10) | 12 ms (12 to 12) | 1.20 |",
                " with a network: unique memory per child, more than without, mean | 0.500 MiB | 0.500 to 0.500 |",
                "| first packet of a child: from its tap to a server behind the uplink, p99 | 0.400 ms |",
                "| throughput out through the gate for TLS / on a bare tap | 0.500 | 0.500 to 0.500 |",
                "| network: made and leased, the pool being empty, p50 | 9 ms | 9 to 9 |",
            ],
            "network.",
        ),
        (
            "crowd",
            (crowd_round(),),
            "### Many VMs",
            ["| 1000 VMs at once: made, all ready | 20 s | 20 to 20 |"],
            "crowd.",
        ),
        (
            "endurance",
            (endurance_round(),),
            "### Forks that come and go",
            ["| fork, eval, kill: errors and wrong answers | 0 | 0 to 0 |"],
            "endurance.",
        ),
        (
            "daemon",
            (costs_round(),),
            "### The daemon on top",
            [
                "| fake, spawn of 1 | 64 / 68 | 60 / 60 | 4 / 8 |",
                "| fake, spawn of 100 | 6004 / 6008 | 6000 / 6000 | 4 / 8 |",
                "| fake, eval, plain HTTP, unix socket | 1.50 / 2.50 | 0.500 / 0.500 | 1 / 2 |",
                "| fake: the daemon's part of a spawn of 1, p50 | <= 5 ms | 4 | 4 | yes |",
            ],
            "daemon.fake",
        ),
        (
            "lab",
            (together(one_engine(), one_engine(4.0), one_engine(2.0)),),
            "### firecracker, restored and qemu on KVM, in the lab: ratios only\n",
            [
                "| fork of 30, all ready | 30 s (30 to 30) | 120 s (120 to 120) | 60 s (60 to 60) | 0.250 |",
                "| cold boot of one / fork of 1 | 30 (30 to 30) | 7.50 (7.50 to 7.50) | 15 (15 to 15) | - |",
                "| fork of 1, firecracker | fork of 1, qemu | fork of 1, restored | fork of 30, firecracker |",
                "| contract | 100 / 200 | 200 / 400 | 400 / 800 | 100 / 200 | 200 / 400 | 400 / 800 |",
                "| CPU time per child of 30, firecracker / restored | <= 0.25 | 0.250 | 0.250 | yes |",
            ],
            "versus",
        ),
        (
            "lab",
            (together(Round({}), one_engine()),),
            "### firecracker",
            ["| fork of 30, all ready | - | 30 s (30 to 30) | 90 s (90 to 90) | - |"],
            "versus",
        ),
        (
            "lab",  # steps are in their order although one engine lacks some
            (
                together(
                    Round(steps(1, resume=[1.0])),
                    Round(steps(1, contract=[1.0], process_start=[1.0], resume=[1.0])),
                    Round(steps(1, resume=[2.0])),
                ),
            ),
            "### firecracker",
            ["| process start | - | - | 1 / 1 |\n| resume | 1 / 1 | 2 / 2 | 1 / 1 |\n| contract | - | - | 1 / 1 |"],
            "versus",
        ),
    ],
)
def test_the_tables_have_a_row_for_each_figure_step_and_target(
    part: str, rounds: tuple[Round, ...], begin: str, rows: list[str], absent: str
) -> None:
    text = text_of(part, *rounds)
    assert text.startswith(begin)
    for row in rows:
        assert row in text
    assert absent not in text
    assert text.count("fork of 100, all ready") <= 1


def test_on_a_machine_that_is_not_emulated_times_are_times() -> None:
    section = section_of("lab", GOOD["lab"])
    section["host"]["emulated"] = False
    assert render_report({"lab": section}).startswith("### firecracker, restored and qemu on KVM\n")


def test_a_report_has_no_table_of_what_it_lacks() -> None:
    assert render_report({}) == ""
    whole = render_report({**section_of(TOP, GOOD[TOP]), "crowd": section_of("crowd", GOOD["crowd"])})
    assert [line for line in whole.splitlines() if line.startswith("#")] == ["### Many VMs alive at once"]


@pytest.mark.parametrize(
    ("part", "done"),
    [
        *((part, GOOD[part]) for part in CHARTS),
        (TOP, started_round()),
        ("live", Round(read_forks(0, times(7)))),
        ("daemon", costs_round(3.0)),
        ("lab", together(Round({}))),
    ],
)
def test_a_chart_is_the_same_for_the_same_report(tmp_path: Path, part: str, done: Round) -> None:
    section = section_of(part, done)
    if done.readings == started_round().readings:
        del section["settings"]["ways"]
        section["settings"]["n"] = [1]
    draw(part, section, tmp_path / "one.svg")
    draw(part, section, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_text().rstrip().endswith("</svg>")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize("part", [part for part in SECTIONS if part != TOP])
def test_a_part_that_is_measured_again_replaces_that_part_only(tmp_path: Path, part: str) -> None:
    path, other = tmp_path / "results.json", "load" if part != "load" else "crowd"
    engine = {"format": 1, "figures": {"cold_boot.total": {}}, "targets": []}
    for new in (engine, {part: {"figures": {"a": 1}}}, {other: {"figures": {"b": 1}}}, {part: {"figures": {"a": 2}}}):
        write_results(path, new)
    assert read_results(path) == {**engine, part: {"figures": {"a": 2}}, other: {"figures": {"b": 1}}}
    write_results(path, {"format": 1, "figures": {}, "targets": []})
    assert read_results(path)["figures"] == {} and read_results(path)[other] == {"figures": {"b": 1}}
    assert set(list(read_results(path))[-2:]) == {part, other}, "sections last"


def test_nothing_of_an_old_report_of_the_engine_survives_a_new_one() -> None:
    new = {"format": 1, "figures": {}}
    assert merge_results({"format": 1, "figures": {"old": 1}, "odd": 1}, new) == new


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_that_holds_no_results_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="Expected results of the bench in"):
        write_results(path, {"daemon": {}})
    assert path.read_text() == text


def test_the_results_in_the_repository_can_be_shown() -> None:
    report = read_results(Path(__file__).parents[2] / "bench/results.json")
    assert set(SECTIONS) - {TOP} <= set(report)
    assert render_report(report).count("### ") == len(SECTIONS) - 1


@pytest.mark.parametrize(
    ("part", "slow", "wrong"),
    [
        ("live", live_round(9.0), "live: 64 MiB written: fork 2: contract_broken: no"),
        ("lab", together(one_engine(9.0)), "lab: ended with exit status 124"),
    ],
)
def test_a_wrong_answer_fails_the_run_and_a_slow_one_does_not(
    part: str, slow: Round, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_report({part: section_of(part, slow)}, {part}, []) == 0
    assert capsys.readouterr().out.startswith("### ")
    assert print_report({part: section_of(part, Round(slow.readings, (wrong,)))}, {part}, []) == 1
    assert capsys.readouterr().err == f"failed: {wrong}\n"
    assert print_report({}, {part}, [f"{part}: host_lacks: no QEMU"]) == 1
    assert capsys.readouterr().err == f"failed: {part}: host_lacks: no QEMU\n"


def test_forks_of_one_amount_are_read_with_their_shares() -> None:
    assert by_name(read_forks(64, times(8, 9, 25))) == {
        "live.64.ok": 3,
        "live.64.pause.p50": 9,
        "live.64.pause.p99": 25,
        "live.64.answer.p50": 36,
        "live.64.answer.p99": 100,
    }
    assert by_name(read_forks(64, [])) == {"live.64.ok": 0}


def test_the_last_forks_of_a_chain_are_compared_with_the_first() -> None:
    read = by_name(read_chain(times(*[10] * 5, *[99] * 40, *[20] * 5)))
    assert read["live.chain.pause.1 to 5"] == 10 and read["live.chain.pause.46 to 50"] == 20
    assert read["live.chain.pause.ratio"] == read["live.chain.answer.ratio"] == 2
    assert by_name(read_chain(times(10)))["live.chain.pause.ratio"] == 1


@pytest.mark.parametrize("size", [0, 8 * 4096])
def test_what_is_written_in_a_guest_is_what_is_expected_of_it(size: int) -> None:
    guest: dict[str, Any] = {}
    exec(render_write(size, 7), guest)  # noqa: S102
    assert sum(guest["written"][::4096]) == sum_of(size, 7)
    exec(render_write(size and 4096, 0), guest)  # noqa: S102
    assert len(guest["written"]) == size
    assert sum(guest["written"][::4096]) == sum_of(size, 7) - (7 if size else 0)


def test_getting_slower_shows_in_the_last_tenth() -> None:
    assert drift([1.0] * 10 + [5.0] * 80 + [2.0] * 10) == {"drift": 2.0}
    assert drift([1.0] * 9) == {}


def test_everything_that_is_new_is_a_leak_and_what_went_is_none() -> None:
    after = Inventory(
        frozenset({8}),
        {"socket": 3, "anon_inode:[pidfd]": 1},
        2,
        4,
        {"sandboxes": 1, "events": 900},
        frozenset({"run/vms/sb-1", "home/audit.log", "home/audit.log.1", "home/registry.db-wal"}),
        threads=1,
    )
    assert find_leaks(NOTHING, NOTHING) == []
    assert find_leaks(NOTHING, after) == [
        "process 8",
        "descriptor of anon_inode:[pidfd]",
        "descriptor of socket",
        "listening socket",
        "task",
        "thread",
        "row of sandboxes",
        "file run/vms/sb-1",
    ]
    assert find_leaks(after, Inventory(frozenset(), {}, 0, 0, {}, frozenset())) == []


def test_the_head_of_an_answer_gives_status_and_length() -> None:
    assert parse_head(b"HTTP/1.1 201 Created\r\nContent-Length: 12\r\nx: y: z\r\n\r\n") == (201, 12)
    assert parse_head(b"HTTP/1.1 204 No Content\r\n\r\n") == (204, 0)


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


def test_how_much_is_done_can_be_said() -> None:
    args = parse_args(["--live-forks", "3", "--crowd", "5", "--endurance", "7", "2", "--live-chart", "x.png"])
    assert (args.live_forks, args.crowd, args.endurance, args.live_chart) == (3, 5, [7, 2], Path("x.png"))
    args = parse_args([])
    assert (args.live_forks, args.crowd, args.endurance) == (20, 1000, (5000, 500))
