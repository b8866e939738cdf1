"""The part of the benchmark for the lab, small and on the fake engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench import figures
from bench.lab_figures import by_engine, cold_to_fork, versus
from bench.lab_inside import run_rounds, tag_of, write_section
from bench.lab_report import ENGINES
from bench.measure import Bench
from bench.probes import resident_bytes
from bench.report import Run
from forkd.engines.base import BootSpec, Frozen, Machine
from forkd.engines.fake import FakeEngine
from forkd.errors import EngineFailed
from forkd.image import Image
from forkd.image.progress import Silent
from forkd.model.machine import MachineSpec
from forkd.runtime import demo
from forkd.store.snapshots import SnapshotStore

PARTS = frozenset({"cold", "snapshot", "fork"})


class Named(FakeEngine):
    def __init__(self, name: str, turns: list[str]) -> None:
        super().__init__()
        self.name = name
        self._turns = turns

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path) -> Machine:
        self._turns.append(f"{self.name} {directory.name}")
        return await super().boot(spec, directory, memory_in)


class Broken(Named):
    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path) -> Machine:
        raise EngineFailed("Cannot boot")


def measured(place: Path, engines: list[FakeEngine], rounds: int, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(demo, "IDLE_S", 0.1)
    runtime = place / "run"
    runtime.mkdir()
    store = SnapshotStore(place / "snapshots")
    image = Image("0" * 32, "python", place, place, place, place, "6.1", "/usr/bin/python3", 0, 0.0, {}, {})
    benches = [Bench(engine, store, image, runtime, Silent(), (1, 2), PARTS, tag=tag_of(engine)) for engine in engines]
    run = Run("now", {}, {})
    asyncio.run(run_rounds(benches, run, rounds, lambda done: write_section(done, place / "bench.json")))
    assert list(runtime.iterdir()) == []
    assert store.list().snapshots == ()
    return run


def test_engines_take_turns_part_by_part_and_at_being_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    run = measured(tmp_path, [Named(name, turns) for name in ENGINES], 2, monkeypatch)
    first = ["firecracker cold", "qemu cold", "firecracker parent", "qemu parent"]
    second = ["qemu cold", "firecracker cold", "qemu parent", "firecracker parent"]
    assert turns == first + second
    for done in run.rounds:
        assert done.failures == ()
        for engine in ENGINES:
            for figure in (figures.cold_boot(), figures.snapshot_total(), figures.fork_wall(2), cold_to_fork(2)):
                assert done.readings[by_engine(engine, figure)] > 0
        assert done.readings[versus(figures.cold_boot(), ENGINES)] > 0
    assert json.loads((tmp_path / "bench.json").read_text())["settings"]["rounds_done"] == 2


def test_an_engine_that_cannot_be_measured_is_a_finding_and_the_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = measured(tmp_path, [Broken("firecracker", []), Named("qemu", [])], 1, monkeypatch)
    assert run.rounds[0].failures == ("round 1 of 1, firecracker: engine_failed: Cannot boot",)
    assert run.rounds[0].readings[by_engine("qemu", figures.fork_ok(2))] == 2


def test_memory_that_a_guest_never_touched_is_not_resident(tmp_path: Path) -> None:
    with (tmp_path / "memory").open("wb") as memory:
        memory.write(b"x" * 2**20)
        memory.truncate(2**30)
    spec = BootSpec(MachineSpec(), tmp_path, tmp_path, tmp_path)
    assert 2**20 <= resident_bytes(Frozen(tmp_path, spec, {})) < 2**21
