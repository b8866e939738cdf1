"""The parts of the benchmark about forks of live VMs, small, with real VMs: every figure is read, nothing is left."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import figures, fork_figures
from bench.__main__ import run_rounds
from bench.crowd import CrowdSpec
from bench.endurance import EnduranceSpec
from bench.engine_report import render_json, render_markdown
from bench.figures import FORK, START
from bench.fork_parts import ForkSpecs, run_fork_parts
from bench.fork_report import PARTS, render_part
from bench.live import LiveSpec
from bench.measure import Bench, begin_run, describe_work
from bench.report import Run
from forkd.engines.base import Machine
from forkd.errors import NotForkable
from forkd.host.marked import find_marked
from forkd.image import Image
from forkd.image.progress import Silent
from forkd.model.machine import MachineSpec
from forkd.runtime import demo
from forkd.runtime.engines import open_engine
from forkd.store.snapshots import SnapshotStore

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": None, "accelerator": None}
MACHINE = MachineSpec(memory_mib=256, vcpus=1)
SPECS = ForkSpecs(
    LiveSpec(written_mib=(0, 8), forks=3, chain=3), CrowdSpec(3), EnduranceSpec(cycles=5, live=3, written_mib=1)
)


@pytest.fixture
def bench(python_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """On an engine that forks live VMs; nothing is in its directory or its store at the end."""
    engine = open_engine("qemu")
    if lack := engine.why_no_live_forks():
        pytest.skip(f"no live forks here: {lack}")
    monkeypatch.setattr(demo, "IDLE_S", 0.2)
    store = SnapshotStore(tmp_path / "snapshots")
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as runtime:
        parts = frozenset({"fork"})
        yield Bench(
            engine, store, python_image, Path(runtime), Silent(), (1, 2), parts, MACHINE, singles=2, ways=(FORK, START)
        )
        assert find_marked(Path(runtime)) == {}
        assert list(Path(runtime).iterdir()) == []
    assert store.list().snapshots == ()


def test_both_ways_are_measured_in_the_same_round(bench: Bench) -> None:
    settings = {**describe_work(1, bench.sizes, MACHINE), "ways": list(bench.ways)}
    run = begin_run(HOST, settings)
    asyncio.run(run_rounds(bench, run, 1, lambda done: None))
    (done,) = run.rounds
    assert done.failures == ()
    for figure in (figures.template_made(), figures.template_memory()):
        assert done.readings[figure] > 0
    steps = {FORK: ("quiescence", "clone", "descriptors", "threads"), START: ("process start", "state load")}
    for n in bench.sizes:
        for way in bench.ways:
            assert done.readings[figures.fork_ok(n, way)] == n
            for figure in (
                figures.fork_wall(n, way),
                figures.fork_child(n, "p99", way),
                figures.fork_cpu(n, "", way),
                figures.fork_host_cpu(n, way),
                figures.unique_memory(n, "mean", way),
                figures.kill(n, way),
                *(figures.fork_step(n, step, "p50", way) for step in (*steps[way], "resume", "contract", "first eval")),
            ):
                assert _names(run)[figure.name] > 0, figure.name
    assert done.readings[figures.versus_start(2, figures.fork_wall(2, FORK))] > 0
    text = render_markdown(render_json(run))
    assert "| fork of 2, all ready |" in text and "| clone |" in text and "| process start |" in text


def measured(bench: Bench, parts: tuple[str, ...]) -> dict[str, Run]:
    runs: dict[str, Run] = {}

    def write(part: str, run: Run) -> None:
        render_part(part, run)
        runs[part] = run

    asyncio.run(run_fork_parts(bench, parts, SPECS, 1, HOST, write))
    return runs


def _names(run: Run) -> dict[str, float]:
    return {figure.name: value for figure, value in run.rounds[0].readings.items()}


def test_live_forks_a_crowd_and_endurance_are_measured(bench: Bench) -> None:
    runs = measured(bench, PARTS)
    assert {part: run.rounds[0].failures for part, run in runs.items()} == dict.fromkeys(PARTS, ())
    live, crowd, endurance = (_names(runs[part]) for part in PARTS)
    for mib in (0, 8):
        assert live[f"live.{mib}.ok"] == 3
        assert 0 < live[f"live.{mib}.pause.p50"] < live[f"live.{mib}.answer.p50"]
    assert live["live.chain.answer.ratio"] > 0
    assert crowd.keys() == {fork_figures.crowd(3, name).name for name in fork_figures.CROWD}
    assert crowd["crowd.3.ok"] == crowd["crowd.3.distinct"] == 3
    assert endurance["endurance.cycles.done"] == 5 and endurance["endurance.live.done"] == 3
    for kind in ("cycles", "live"):
        assert endurance[f"endurance.{kind}.errors"] == endurance[f"endurance.{kind}.left"] == 0
        assert endurance[f"endurance.{kind}.memory.last"] > 0
    assert endurance["endurance.live.guest_gained"] >= 0


def test_live_forks_that_fail_are_findings_and_the_rest_is_measured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_live = bench.engine.fork_live

    async def refuse(*args: Any, settled: bool = False, **others: Any) -> Machine:
        if not settled:
            raise NotForkable("Not today")
        return await fork_live(*args, settled=settled, **others)

    monkeypatch.setattr(bench.engine, "fork_live", refuse)
    runs = measured(bench, ("live", "endurance"))
    assert _names(runs["live"])["live.0.ok"] == 0
    assert "live: 8 MiB written: fork 3: not_forkable: Not today" in runs["live"].rounds[0].failures
    endurance, failures = _names(runs["endurance"]), runs["endurance"].rounds[0].failures
    assert (endurance["endurance.cycles.done"], endurance["endurance.live.done"]) == (5, 0)
    assert endurance["endurance.live.errors"] == 3
    assert failures[0] == "endurance: live forks of a busy VM: fork 1: not_forkable: Not today"


def test_children_that_are_started_instead_of_forked_are_findings(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any, **__: Any) -> Machine:
        raise NotForkable("Not today")

    monkeypatch.setattr(bench.engine, "fork_live", refuse)
    runs = measured(bench, ("crowd", "endurance"))
    assert runs["crowd"].rounds[0].failures == ("crowd: 3 VMs were started, and not forked from the template",)
    assert _names(runs["crowd"])["crowd.3.ok"] == 0
    assert "and not forked from the template" in runs["endurance"].rounds[0].failures[0]
