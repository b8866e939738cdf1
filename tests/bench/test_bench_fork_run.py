"""The parts of the benchmark about forks of live VMs, small, with real VMs: every figure is read, nothing is left."""

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.engine import (
    FORK_PARTS,
    Bench,
    ForkSpecs,
    begin_run,
    describe_work,
    measure_snapshot,
    remove_snapshot,
    run_fork_parts,
    run_rounds,
)
from bench.figures import Run, by_name
from bench.forks import FORK, START
from bench.live import LiveSpec
from bench.many import CROWD, CrowdSpec, EnduranceSpec
from bench.network import VARIANTS, NetworkSpec, run_network
from bench.packets import PacketSpec
from bench.report import TOP, render_report, render_run
from bench.wires import made_wires, why_no_wires
from forkd.engines.base import Machine
from forkd.errors import NotForkable
from forkd.host import netlink
from forkd.host.marked import find_marked
from forkd.image import Image
from forkd.image.spec import Silent
from forkd.model.machine import MachineSpec
from forkd.runtime import demo
from forkd.runtime.doctor import open_engine
from forkd.store.snapshots import SnapshotStore

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": None, "accelerator": None}
MACHINE = MachineSpec(memory_mib=256, vcpus=1)
SPECS = ForkSpecs(
    LiveSpec(written_mib=(0, 8), forks=3, chain=3), CrowdSpec(3), EnduranceSpec(cycles=5, live=3, written_mib=1)
)


def make_bench(image: Image, store: Path, directory: str) -> Bench:
    engine = open_engine("qemu")
    if lack := engine.why_no_live_forks():
        pytest.skip(f"no live forks here: {lack}")
    bench = Bench(engine, SnapshotStore(store), image, Path(directory), Silent(), (1, 2), frozenset({"fork"}), MACHINE)
    return replace(bench, singles=2, ways=(FORK, START))


@pytest.fixture(scope="module")
def parent(python_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the snapshot that is forked, made once."""
    store = tmp_path_factory.mktemp("parent") / "snapshots"
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as runtime:
        asyncio.run(measure_snapshot(make_bench(python_image, store, runtime)))
    return store


@pytest.fixture
def bench(parent: Path, python_image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """On an engine that forks live VMs; nothing is in its directory or its store at the end."""
    monkeypatch.setattr(demo, "IDLE_S", 0.2)
    subprocess.run(["cp", "--archive", "--sparse=always", parent, tmp_path], check=True)
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as runtime:
        bench = make_bench(python_image, tmp_path / parent.name, runtime)
        yield bench
        assert find_marked(bench.directory) == {}
        assert list(bench.directory.iterdir()) == []
    assert bench.store.list().snapshots == ()


def test_both_ways_are_measured_in_the_same_round(bench: Bench) -> None:
    settings = {**describe_work(1, bench.sizes, MACHINE), "ways": list(bench.ways)}
    run = begin_run(HOST, settings)
    asyncio.run(run_rounds(bench, run, 1, lambda done: None))
    (done,) = run.rounds
    assert done.failures == ()
    readings = by_name(done.readings)
    assert readings["template.made"] > 0 and readings["template.memory"] > 0
    steps = {FORK: ("quiescence", "clone", "descriptors", "threads"), START: ("process start", "state load")}
    for n in bench.sizes:
        for way in bench.ways:
            assert readings[f"fork.{n}.{way}.ok"] == n
            names = [f"step.{step}.p50" for step in (*steps[way], "resume", "contract", "first eval")]
            for name in ("wall", "child.p99", "cpu", "host_cpu", "unique.mean", "kill", *names):
                assert readings[f"fork.{n}.{way}.{name}"] > 0, name
    assert readings["ratio.fork.2.fork_to_start.wall"] > 0
    text = render_report(render_run(TOP, run))
    assert "| fork of 2, all ready |" in text and "| clone |" in text and "| process start |" in text


def measured(bench: Bench, parts: tuple[str, ...]) -> dict[str, Run]:
    runs: dict[str, Run] = {}

    def write(part: str, run: Run) -> None:
        render_run(part, run)
        runs[part] = run

    asyncio.run(run_fork_parts(bench, parts, SPECS, 1, HOST, write))
    return runs


def _names(run: Run) -> dict[str, float]:
    return by_name(run.rounds[0].readings)


def test_live_forks_a_crowd_and_endurance_are_measured_of_a_parent_made_for_them(bench: Bench) -> None:
    remove_snapshot(bench)
    runs = measured(bench, FORK_PARTS)
    assert {part: run.rounds[0].failures for part, run in runs.items()} == dict.fromkeys(FORK_PARTS, ())
    live, crowd, endurance = (_names(runs[part]) for part in FORK_PARTS)
    for mib in (0, 8):
        assert live[f"live.{mib}.ok"] == 3
        assert 0 < live[f"live.{mib}.pause.p50"] < live[f"live.{mib}.answer.p50"]
    assert live["live.chain.answer.ratio"] > 0
    assert crowd.keys() == {f"crowd.3.{name}" for name in CROWD.rows}
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


def test_forks_with_a_network_are_measured_in_a_network_made_for_them(bench: Bench) -> None:
    if lack := why_no_wires():
        pytest.skip(f"no networks here: {lack}")
    before = os.stat("/proc/self/ns/net").st_ino
    with netlink.Netlink() as links:
        links_before = {link.name for link in links.links()}
    spec = NetworkSpec(n=3, passes=2, leases=2, packet=PacketSpec(packets=2, transfers=1, mib=1))
    runs: list[Run] = []
    with made_wires() as wires:
        assert os.stat("/proc/self/ns/net").st_ino != before
        asyncio.run(run_network(bench, wires, spec, 1, HOST, runs.append))
    assert os.stat("/proc/self/ns/net").st_ino == before
    with netlink.Netlink() as links:
        assert {link.name for link in links.links()} == links_before
    (done,) = runs[0].rounds
    assert done.failures == ()
    readings = by_name(done.readings)
    for variant in VARIANTS:
        assert readings[f"network.fork.3.{variant}.ok"] == 3
        for name in ("kept", "ready", "child.p99", "step.contract.p50", "cpu", "host_cpu", "unique.mean", "kill"):
            assert readings[f"network.fork.3.{variant}.{name}"] > 0, name
    assert readings["network.fork.3.network.hub_cpu"] > 0
    for name in ("kept", "ready", "cpu", "step.clone.p50"):
        assert readings[f"network.versus.3.network.{name}"] > 0
    assert readings["network.packet.ok"] == 2
    assert 0 < readings["network.packet.way.p50"] < readings["network.packet.arrival.p50"]
    for name in ("bare", "slot", "gate", "ratio.slot", "ratio.gate"):
        assert readings[f"network.send.{name}"] > 0, name
    assert readings.keys() >= {f"network.lease.{name}" for name in ("first", "made.p50", "same.p99", "released.p50")}
    assert "| fork of 3: all contracts kept |" in render_report({"network": render_run("network", runs[0])})
