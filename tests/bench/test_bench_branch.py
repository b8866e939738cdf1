"""The part of the benchmark about branches, small: by value, on the fake engine, and with real VMs."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from bench.branch import (
    BRANCH,
    BUSY,
    IDLE,
    KINDS,
    Branching,
    BranchSpec,
    BranchTimes,
    begin_branches,
    branched,
    read_repeated,
    run_branches,
)
from bench.chain import LIVE, LOADED, REHEARSED, Chain, ChainSpec, PackSpec, count_differing, read_chain, read_pack
from bench.figures import Run, by_name
from bench.report import render_report, render_run
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.image import Image
from forkd.image.spec import Silent
from forkd.model.machine import MachineSpec
from forkd.runtime.doctor import open_engine

HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": None, "accelerator": None}
SPEC = BranchSpec(
    written_mib=1,
    branches=2,
    written=1,
    forks=1,
    children=2,
    rewinds=1,
    repeated=2,
    chain=ChainSpec(depth=3, written_mib=1, spawns=2),
    packs=PackSpec(times=1),
)


def measured(images: Path, root: Path, engine: str, warm: str) -> Run:
    """One round. Nothing is in the home afterwards, and no process."""
    root.mkdir()
    (root / "images").symlink_to(images, target_is_directory=True)
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as runtime:
        home = Home(root, Path(runtime))
        branching = Branching(home, Silent(), engine, 1, SPEC, MachineSpec(256), warm)
        run = begin_branches(branching, HOST)
        asyncio.run(run_branches(branching, run, lambda done: render_run("branch", done)))
        assert find_marked(Path(runtime)) == {}
    assert [entry.name for entry in root.iterdir()] == ["images"]
    return run


@pytest.mark.vm
@pytest.mark.usefixtures("nothing_left")
def test_branches_chains_and_packs_of_real_vms_are_measured(
    python_image: Image, built_home: Home, tmp_path: Path
) -> None:
    if lack := open_engine("qemu").why_no_live_forks():
        pytest.skip(f"no live forks here: {lack}")
    run = measured(built_home.images, tmp_path / "home", "qemu", "import numpy")
    (done,) = run.rounds
    assert done.failures == ()
    readings = by_name(done.readings)
    for kind in KINDS:
        place = f"branch.{kind}"
        assert readings[f"{place}.ok"] == 5
        assert 0 < readings[f"{place}.pause.p50"] < readings[f"{place}.usable.p50"]
        assert 0 < readings[f"{place}.returns.p50"] < readings[f"{place}.usable.p50"]
        for name in ("written", "fork", "rewind"):
            assert readings[f"{place}.{name}.p99"] > 0
        assert readings[f"{place}.stored"] >= 1 and readings[f"{place}.dirty"] >= 1
    assert readings["branch.repeated.ok"] == 2 and readings["branch.repeated.usable.ratio"] > 0
    assert readings["branch.chain.ok"] == 2 * 7
    for depth in (1, 3):
        assert readings[f"branch.chain.differs.{depth}"] >= 1
        assert 0 < readings[f"branch.chain.larger.{depth}"] <= 1.2
    for depth in (0, 1, 3):
        assert readings[f"branch.chain.load.{depth}"] > 0
        for kind in (LIVE, LOADED):
            assert readings[f"branch.chain.spawn.{kind}.{depth}.p50"] > 0
    assert readings["branch.chain.spawn.rehearsed.0.p50"] > 0
    assert readings["branch.pack.without.size"] < readings["branch.pack.with.size"]
    assert readings["branch.pack.without.rate"] > 0
    section = render_run("branch", run)
    correct = [target for target in section["targets"] if target["bound"].startswith("=")]
    assert len(correct) == 4 and all(target["reached"] for target in correct)
    assert "| an idle sandbox |" in render_report({"branch": section})


@pytest.mark.usefixtures("nothing_left")
def test_a_daemon_whose_branches_cannot_be_measured_is_a_finding(
    python_image: Image, built_home: Home, tmp_path: Path
) -> None:
    run = measured(built_home.images, tmp_path / "home", "fake", "raise ValueError('cold')")
    assert run.rounds[0].readings == {}
    assert "warmup_failed" in run.rounds[0].failures[0]


def test_both_kinds_of_sandbox_say_what_was_prepared() -> None:
    idle, busy = (BRANCH.at("usable", "p50", **branched(kind, 64)) for kind in (IDLE, BUSY))
    assert (
        idle.name == "branch.idle.usable.p50"
        and busy.what == "branch of a sandbox that writes: a child of it answers, p50"
    )
    assert "64 MiB" in idle.prepared and "goes on writing" not in idle.prepared
    assert "goes on writing" in busy.prepared


def times(*each: float) -> list[BranchTimes]:
    return [BranchTimes(value, value * 2, value * 4) for value in each]


def test_the_last_branches_of_a_sandbox_are_compared_with_the_first() -> None:
    read = by_name(read_repeated(times(*[10] * 5, *[99] * 40, *[20] * 5), 50))
    assert read["branch.repeated.ok"] == 50
    assert read["branch.repeated.usable.1 to 5"] == 40 and read["branch.repeated.usable.46 to 50"] == 80
    assert {read[f"branch.repeated.{name}.ratio"] for name in ("pause", "returns", "usable")} == {2}
    assert by_name(read_repeated(times(10, 20), 3)) == {"branch.repeated.ok": 2}, "one failed"


def test_depths_are_compared_with_a_template_of_the_same_kind() -> None:
    chain = Chain(layers={1: (11 << 20, 10 << 20), 10: (0, 0)}, load_ms={10: 70.0})
    chain.spawns = {(LIVE, 0): [20.0], (LIVE, 10): [22.0], (LOADED, 10): [30.0], (REHEARSED, 0): [15.0]}
    chain.tries.right = 4
    assert by_name(read_chain(chain).readings) == {
        "branch.chain.ok": 4,
        "branch.chain.spawn.live.0.p50": 20,
        "branch.chain.spawn.live.0.p99": 20,
        "branch.chain.spawn.live.10.p50": 22,
        "branch.chain.spawn.live.10.p99": 22,
        "branch.chain.spawn.loaded.10.p50": 30,
        "branch.chain.spawn.loaded.10.p99": 30,
        "branch.chain.spawn.rehearsed.0.p50": 15,
        "branch.chain.spawn.rehearsed.0.p99": 15,
        "branch.chain.deeper.live": pytest.approx(1.1),
        "branch.chain.load.10": 70,
        "branch.chain.layer.1": 11,
        "branch.chain.differs.1": 10,
        "branch.chain.larger.1": 1.1,
    }


def test_a_pack_is_weighed_against_the_memory() -> None:
    read = by_name(read_pack(with_image=False, sizes=[32 << 20], rates=[100.0, 300.0], memory_mib=512))
    assert read == {
        "branch.pack.without.size": 32,
        "branch.pack.without.share": 0.0625,
        "branch.pack.without.rate": 200,
    }


def test_pages_that_differ_are_counted_whole(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(bytes(8 * 4096))
    other.write_bytes(bytes(4095) + b"x" + bytes(4096) + b"y" * 4097 + bytes(5 * 4096 - 1))
    assert count_differing(one, other) == count_differing(one, other, 4096) == 3 * 4096
    assert count_differing(one, one) == 0
