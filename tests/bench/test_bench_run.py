"""Runs of the benchmark on the fake engine, by itself and beside another: every part is measured, nothing is left."""

import asyncio
import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import engine, lab
from bench.__main__ import main
from bench.charts import draw
from bench.engine import PARTS, TAG, Bench, run_rounds
from bench.figures import Run, by_name
from bench.forks import FORK, START, Children, Probe, resident_bytes
from bench.lab import ENGINES, read_section, render_command, tag_of, write_section
from bench.report import TOP, render_run, write_run
from forkd.engines.base import BootSpec, Frozen, Machine, Nic
from forkd.engines.fake import FakeEngine
from forkd.errors import EngineFailed, InvalidInput
from forkd.image import Image
from forkd.image.spec import Silent
from forkd.model.machine import NO_LIMITS, Limits, MachineSpec
from forkd.runtime import demo
from forkd.runtime.freeze import Warmup
from forkd.store.snapshots import SnapshotStore

SETTINGS = {"rounds": 1, "n": [1, 3], "memory_mib": 512, "vcpus": 1}
HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": None, "accelerator": None}


class Watched(FakeEngine):
    """Notes what is booted, counts the forks, and refuses what it is told to."""

    def __init__(self, name: str = "fake", *, boots: bool = True, most: int = 99) -> None:
        super().__init__()
        self.name = name
        self.turns: list[str] = []
        self.forks = 0
        self._boots, self._most = boots, most

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path, nic: Nic | None = None) -> Machine:
        self.turns.append(f"{self.name} {directory.name}")
        if not self._boots:
            raise EngineFailed("Cannot boot")
        return await super().boot(spec, directory, memory_in, nic)

    async def fork(
        self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS, nic: Nic | None = None
    ) -> Machine:
        self.forks += 1
        if self.forks > self._most:
            raise EngineFailed("No more machines")
        return await super().fork(frozen, directory, limits, nic)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fake engine evaluates its past again in every child: numpy would be most of its fork.
    light = {"IDLE_S": 0.1, "WARMUP": Warmup(code="import json"), "CODE": "json.loads('[0.0]') * 5"}
    for name, value in light.items():
        monkeypatch.setattr(demo, name, value)
    for name, count in {"_WARMING_TRIPS": 1, "_EVAL_TRIPS": 3, "_EXEC_TRIPS": 3}.items():
        monkeypatch.setattr(engine, name, count)


def make_bench(place: Path, engine: FakeEngine, parts: tuple[str, ...], *sizes: int, **others: Any) -> Bench:
    (place / "run").mkdir(exist_ok=True)
    store = SnapshotStore(place / "snapshots")
    image = Image("0" * 32, "python", place, place, place, place, "6.1", "/usr/bin/python3", 0, 0.0, {}, {})
    return Bench(engine, store, image, place / "run", Silent(), sizes, frozenset(parts), **others)


def measured(bench: Bench) -> Run:
    """One round. Nothing is in the directory or the store afterwards."""
    run = Run("now", HOST, SETTINGS)
    asyncio.run(run_rounds(bench, run, 1, partial(write_run, bench.directory.parent / "results.json", TOP)))
    assert list(bench.directory.iterdir()) == []
    assert not bench.store.has(TAG)
    return run


def measured_in_turns(place: Path, engines: Sequence[FakeEngine], rounds: int) -> Run:
    parts = ("cold", "snapshot", "fork")
    benches = {each.name: make_bench(place, each, parts, 2, tag=tag_of(each.name)) for each in engines}
    run = Run("now", {}, {})
    asyncio.run(lab.run_rounds(benches, run, rounds, lambda done: write_section(done, place / "bench.json")))
    assert list((place / "run").iterdir()) == []
    assert benches[engines[0].name].store.list().snapshots == ()
    return run


def test_a_round_measures_every_part_and_leaves_nothing(tmp_path: Path) -> None:
    run = measured(make_bench(tmp_path, FakeEngine(), PARTS, 1, 3))
    readings = by_name(run.rounds[0].readings)
    names = (
        "cold_boot.total cold_boot.step.warm-up snapshot.total fork.1.wall fork.3.child.p99 fork.3.step.contract.p50"
    )
    names += " fork.3.unique.mean fork.3.kill trip.eval.p50 trip.exec.p99 ratio.fork_3_to_cold_boot"
    for name in (*names.split(), "fork.3.step.first eval.p50"):
        assert readings[name] > 0, name
    assert readings["fork.3.ok"] == 3
    assert (tmp_path / "results.json").stat().st_size > 0
    report = render_run(TOP, run)
    for name in ("one.svg", "two.svg"):
        draw(TOP, report, tmp_path / name)
    assert (tmp_path / "one.svg").read_text().rstrip().endswith("</svg>")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_a_fork_of_one_is_repeated_as_often_as_asked_for(tmp_path: Path) -> None:
    watched = Watched()
    run = measured(make_bench(tmp_path, watched, ("fork",), 1, singles=3))
    assert watched.forks == 3
    assert by_name(run.rounds[0].readings)["fork.1.ok"] == 1


def test_of_what_was_repeated_percentiles_are_over_all_and_the_median_of_whole_forks_is_read() -> None:
    children = Children(1, FORK, Probe(), wall_s=[9.0, 1.0, 2.0], kill_s=[1.0, 3.0, 2.0])
    children.total_ms += [90.0, 10.0, 20.0]
    children.cpu_ms += [1.0, 2.0, 6.0]
    children.host_cpu_ms += [1.0, 2.0, 3.0]
    children.unique_mib += [1.0, 2.0, 3.0]
    children.steps_ms["contract"] = [5.0, 6.0, 7.0]
    assert by_name(children.readings()) == {
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


@pytest.mark.parametrize(
    ("way", "ways", "failures"),
    [
        (FORK, {"fork": 1, "start": 1}, ("round 1: 1 children did not come from the template",)),
        ("", {"start": 2}, ()),
    ],
)
def test_a_child_that_was_started_instead_of_forked_is_a_finding(
    way: str, ways: dict[str, int], failures: tuple[str, ...]
) -> None:
    children = Children(2, way, Probe())
    children.ways.update(ways)
    assert children.failures("round 1") == failures


def test_where_there_is_a_template_each_child_has_to_come_from_it() -> None:
    template: Any = object()
    children = Children(2, "", Probe(), template)
    children.ways.update({"fork": 1, "start": 1})
    assert children.failures("round 1") == ("round 1: 1 children did not come from the template",)


def test_a_template_that_a_bench_needs_and_that_cannot_be_made_leaves_no_forks_to_be_taken_for_its_own(
    tmp_path: Path,
) -> None:
    (done,) = measured(make_bench(tmp_path, FakeEngine(), ("fork",), 1, templated=True)).rounds
    assert len(done.failures) == 1 and done.failures[0].startswith("round 1 of 1: template: unsupported: ")
    assert not [name for name in by_name(done.readings) if name.startswith("fork.")]


def test_a_template_that_cannot_be_made_is_a_finding_and_the_rest_is_measured(tmp_path: Path) -> None:
    (done,) = measured(make_bench(tmp_path, FakeEngine(), ("fork",), 1, ways=(FORK, START))).rounds
    assert len(done.failures) == 1 and done.failures[0].startswith("round 1 of 1: template: unsupported: ")
    readings = by_name(done.readings)
    assert readings["fork.1.start.ok"] == 1
    assert not [name for name in readings if name.startswith("fork.1.fork.")]


def test_a_fork_that_fails_is_a_finding_and_the_rest_is_measured(tmp_path: Path) -> None:
    (done,) = measured(make_bench(tmp_path, Watched(most=2), ("cold", "fork"), 1, 3)).rounds
    readings = by_name(done.readings)
    assert (readings["fork.1.ok"], readings["fork.3.ok"]) == (1, 0)
    assert "fork.3.wall" not in readings
    assert len(done.failures) == 1 and "engine_failed: No more machines" in done.failures[0]


def test_engines_take_turns_part_by_part_and_at_being_the_first(tmp_path: Path) -> None:
    turns: list[str] = []
    engines = [Watched(name) for name in ENGINES]
    for each in engines:
        each.turns = turns
    run = measured_in_turns(tmp_path, engines, 2)
    first = [f"{name} {what}" for what in ("cold", "parent") for name in ENGINES]
    second = [f"{name} {what}" for what in ("cold", "parent") for name in ENGINES[::-1]]
    assert turns == first + second
    for done in run.rounds:
        assert done.failures == ()
        readings = by_name(done.readings)
        for name in ("cold_boot.total", "snapshot.total", "fork.2.wall", "ratio.cold_boot_to_fork_2"):
            assert all(readings[f"{each}.{name}"] > 0 for each in ENGINES)
        assert readings["versus.cold_boot.total"] > 0
    assert json.loads((tmp_path / "bench.json").read_text())["settings"]["rounds_done"] == 2


def test_an_engine_that_cannot_be_measured_is_a_finding_and_the_other_is(tmp_path: Path) -> None:
    run = measured_in_turns(tmp_path, [Watched("firecracker", boots=False), Watched("qemu")], 1)
    assert run.rounds[0].failures == ("round 1 of 1, firecracker: engine_failed: Cannot boot",)
    assert by_name(run.rounds[0].readings)["qemu.fork.2.ok"] == 2


def test_memory_that_a_guest_never_touched_is_not_resident(tmp_path: Path) -> None:
    with (tmp_path / "memory").open("wb") as memory:
        memory.write(b"x" * 2**20)
        memory.truncate(2**30)
    spec = BootSpec(MachineSpec(), tmp_path, tmp_path, tmp_path)
    assert 2**20 <= resident_bytes(Frozen(tmp_path, spec, {})) < 2**21


def test_what_is_run_in_the_lab_is_what_is_understood_there() -> None:
    words = shlex.split(render_command("python3", 3, (1, 10, 30), emulated=True))
    assert words[:3] == ["python3", "-m", "bench.lab"]
    args = lab.parse_args(words[3:])
    assert (args.rounds, args.n, args.emulated, str(args.out)) == (3, [1, 10, 30], True, "$FORKD_LAB_OUT/bench.json")
    assert "--emulated" not in render_command("/usr/bin/python3", 3, (1,), emulated=False)


def test_a_lab_that_broke_off_gives_the_rounds_that_were_done_and_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write_section(Run("now", {}, {}), path)
    assert read_section(path, 0)["failures"] == []
    assert read_section(path, 124)["failures"] == ["lab: ended with exit status 124"]
    with pytest.raises(EngineFailed, match="exit status 124"):
        read_section(tmp_path / "absent.json", 124)


@pytest.mark.parametrize(
    "words", ["--rounds 0", "-n 0", "-n 1000000", "--crowd 0", "--live-forks 0", "--endurance 5 0"]
)
def test_impossible_requests_are_refused_before_anything_is_done(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == InvalidInput.exit_code
    assert capsys.readouterr().err.startswith("error: Cannot ")


def test_what_is_in_the_file_is_shown_without_measuring_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    write_run(tmp_path / "kept.json", "crowd", Run("now", HOST, {}))
    kept = (tmp_path / "kept.json").read_bytes()
    assert main(["--render", "--out", "kept.json"]) == 0
    assert capsys.readouterr().out.startswith("### Many VMs alive at once\n\n| target |")
    assert (tmp_path / "kept.json").read_bytes() == kept
