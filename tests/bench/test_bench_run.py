"""A whole run of the benchmark, on the fake engine: every part is measured, and nothing is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench import figures, measure
from bench.__main__ import main, run_rounds, write_report
from bench.chart import draw
from bench.children import Children
from bench.engine_report import render_json
from bench.measure import Bench
from bench.probes import OF_VMM
from bench.report import Run
from forkd.engines.base import Frozen, Machine
from forkd.engines.fake import FakeEngine
from forkd.errors import EngineFailed, InvalidInput
from forkd.image import Image
from forkd.image.progress import Silent
from forkd.model.limits import NO_LIMITS, Limits
from forkd.runtime import demo
from forkd.store.snapshots import SnapshotStore

SETTINGS = {"rounds": 1, "n": [1, 3], "memory_mib": 512, "vcpus": 1}
HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": None, "accelerator": None}


class Failing(FakeEngine):
    """Starts two machines and refuses the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.forks = 0

    async def fork(self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS) -> Machine:
        self.forks += 1
        if self.forks > 2:
            raise EngineFailed("No more machines")
        return await super().fork(frozen, directory, limits)


def image(place: Path) -> Image:
    return Image("0" * 32, "python", place, place, place, place, "6.1", "/usr/bin/python3", 0, 0.0, {}, {})


def measured(
    place: Path, engine: FakeEngine, parts: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[Run, SnapshotStore]:
    monkeypatch.setattr(demo, "IDLE_S", 0.1)
    monkeypatch.setattr(measure, "_WARMING_TRIPS", 1)
    monkeypatch.setattr(measure, "_EVAL_TRIPS", 3)
    monkeypatch.setattr(measure, "_EXEC_TRIPS", 3)
    runtime = place / "run"
    runtime.mkdir()
    store = SnapshotStore(place / "snapshots")
    run = Run("now", HOST, SETTINGS)
    bench = Bench(engine, store, image(place), runtime, Silent(), (1, 3), parts)
    asyncio.run(run_rounds(bench, run, 1, lambda done: write_report(done, place / "results.json")))
    assert list(runtime.iterdir()) == []
    return run, store


def test_a_round_measures_every_part_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, store = measured(tmp_path, FakeEngine(), frozenset(measure.PARTS), monkeypatch)
    readings = run.rounds[0].readings
    for figure in (
        figures.cold_boot(),
        figures.cold_boot_step("warm-up"),
        figures.snapshot_total(),
        figures.fork_wall(1),
        figures.fork_child(3, "p99"),
        figures.fork_step(3, "contract", "p50"),
        figures.fork_step(3, "first eval", "p50"),
        figures.unique_memory(3, "mean"),
        figures.kill(3),
        figures.trip("eval", "p50"),
        figures.trip("exec", "p99"),
        figures.fork_to_cold(3),
    ):
        assert readings[figure] > 0, figure.name
    assert readings[figures.fork_ok(3)] == 3
    assert not store.has(measure.TAG)
    assert (tmp_path / "results.json").stat().st_size > 0


def test_a_fork_of_one_is_repeated_as_often_as_asked_for(tmp_path: Path) -> None:
    class Counting(FakeEngine):
        forks = 0

        async def fork(self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS) -> Machine:
            self.forks += 1
            return await super().fork(frozen, directory, limits)

    engine, store = Counting(), SnapshotStore(tmp_path / "snapshots")
    bench = Bench(engine, store, image(tmp_path), tmp_path / "run", Silent(), (1,), frozenset({"fork"}), singles=3)
    bench.directory.mkdir()
    done = asyncio.run(measure.run_round(bench, "repeated"))
    assert engine.forks == 3
    assert done.readings[figures.fork_ok(1)] == 1


def test_of_what_was_repeated_percentiles_are_over_all_and_the_median_of_whole_forks_is_read() -> None:
    children = Children(1, figures.FORK, OF_VMM, wall_s=[9.0, 1.0, 2.0], kill_s=[1.0, 3.0, 2.0])
    children.total_ms += [90.0, 10.0, 20.0]
    children.cpu_ms += [1.0, 2.0, 6.0]
    children.host_cpu_ms += [1.0, 2.0, 3.0]
    children.unique_mib += [1.0, 2.0, 3.0]
    children.steps_ms["contract"] = [5.0, 6.0, 7.0]
    read = {figure.name: value for figure, value in children.readings().items()}
    assert read == {
        "fork.1.fork.wall": 2.0,
        "fork.1.fork.ok": 1,
        "fork.1.fork.child.p50": 20.0,
        "fork.1.fork.child.p99": 90.0,
        "fork.1.fork.step.contract.p50": 6.0,
        "fork.1.fork.step.contract.p99": 7.0,
        "fork.1.fork.cpu": 3.0,
        "fork.1.fork.host_cpu": 2.0,
        "fork.1.fork.unique.mean": 2.0,
        "fork.1.fork.unique.largest": 3.0,
        "fork.1.fork.kill": 2.0,
    }


def test_a_child_that_was_started_instead_of_forked_is_a_finding() -> None:
    children = Children(2, figures.FORK, OF_VMM)
    children.ways.update({"fork": 1, "start": 1})
    assert children.failures("round 1") == ("round 1: 1 children did not come from the template",)
    children = Children(2, "", OF_VMM)
    children.ways.update({"start": 2})
    assert children.failures("round 1") == ()


def test_a_template_that_cannot_be_made_is_a_finding_and_the_rest_is_measured(tmp_path: Path) -> None:
    bench = Bench(
        FakeEngine(),
        SnapshotStore(tmp_path / "snapshots"),
        image(tmp_path),
        tmp_path / "run",
        Silent(),
        (1,),
        frozenset({"fork"}),
        ways=(figures.FORK, figures.START),
    )
    bench.directory.mkdir()
    done = asyncio.run(measure.run_round(bench, "round 1"))
    assert len(done.failures) == 1 and done.failures[0].startswith("round 1: template: unsupported: ")
    assert done.readings[figures.fork_ok(1, figures.START)] == 1
    assert not [figure for figure in done.readings if figure.name.startswith("fork.1.fork.")]


def test_the_chart_is_drawn_from_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = measured(tmp_path, FakeEngine(), frozenset({"fork"}), monkeypatch)
    report = render_json(run)
    draw(report, tmp_path / "one.svg")
    draw(report, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_text().rstrip().endswith("</svg>")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_a_fork_that_fails_is_a_finding_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = measured(tmp_path, Failing(), frozenset({"cold", "fork"}), monkeypatch)
    done = run.rounds[0]
    assert done.readings[figures.fork_ok(1)] == 1
    assert done.readings[figures.fork_ok(3)] == 0
    assert figures.fork_wall(3) not in done.readings
    assert len(done.failures) == 1 and "engine_failed: No more machines" in done.failures[0]
    assert not store.has(measure.TAG)


@pytest.mark.parametrize(
    "words",
    [
        ["--rounds", "0"],
        ["-n", "0"],
        ["-n", "1000000"],
        ["--crowd", "0"],
        ["--live-forks", "0"],
        ["--endurance", "5", "0"],
    ],
)
def test_impossible_requests_are_refused_before_anything_is_done(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == InvalidInput.exit_code
    assert capsys.readouterr().err.startswith("error: Cannot ")
