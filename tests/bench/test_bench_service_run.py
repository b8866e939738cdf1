"""The parts of the benchmark about the daemon, small, on the fake engine: every figure is read, and nothing is left."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from bench import service_figures as figures
from bench.costs import CostSpec
from bench.cycles import CycleSpec
from bench.load import LoadSpec
from bench.report import Run
from bench.service import Service, begin_part, run_part
from bench.service_report import PARTS, render_part
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.image import Image
from forkd.image.progress import Silent

HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": None, "accelerator": None}

pytestmark = pytest.mark.usefixtures("nothing_left")


def measured(images: Path, root: Path, part: str, warm: str = "import sys") -> Run:
    root.mkdir()
    (root / "images").symlink_to(images, target_is_directory=True)
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as runtime:
        service = Service(
            home=Home(root, Path(runtime)),
            directory=Path(runtime),
            progress=Silent(),
            engines=("fake",),
            costs={"fake": CostSpec(spawns={1: 2, 3: 1}, execs=3, evals=3)},
            load=LoadSpec(clients=5, sandboxes=2, seconds=0.5),
            cycles={"fake": CycleSpec(cycles=5, at_once=2)},
            rounds=2,
            warm={"fake": warm},
        )
        run = begin_part(service, part, HOST)
        asyncio.run(run_part(service, part, run, lambda done: render_part(part, done)))
        assert find_marked(Path(runtime)) == {}
        assert list(Path(runtime).iterdir()) == []
    assert [entry.name for entry in root.iterdir()] == ["images"]
    return run


def test_the_costs_of_every_kind_of_request_are_measured(python_image: Image, built_home: Home, tmp_path: Path) -> None:
    run = measured(built_home.images, tmp_path / "home", "daemon")
    assert [done.failures for done in run.rounds] == [(), ()]
    for done in run.rounds:
        for n in (1, 3):
            total, fork = (at("fake", n, "p50") for at in (figures.spawn_total, figures.spawn_fork))
            assert 0 < done.readings[fork] < done.readings[total]
            assert done.readings[figures.spawn_direct("fake", n, "p99")] > 0
            assert done.readings[figures.spawn_own("fake", n, "p50")] > 0
        for kind in ("exec", "eval"):
            assert done.readings[figures.call_agent("fake", kind, "p50")] > 0
            for way in figures.WAYS:
                assert done.readings[figures.call_more("fake", kind, way, "p50")] > 0


def test_a_load_and_cycles_are_measured(python_image: Image, built_home: Home, tmp_path: Path) -> None:
    (load,) = measured(built_home.images, tmp_path / "one", "load").rounds
    assert load.failures == ()
    assert load.readings[figures.load("requests")] >= 5
    assert load.readings[figures.load("errors")] == load.readings[figures.load("left")] == 0
    (cycles,) = measured(built_home.images, tmp_path / "two", "cycles").rounds
    assert cycles.failures == ()
    assert cycles.readings[figures.cycles("fake", "done")] == 5
    assert cycles.readings[figures.cycles("fake", "left")] == 0


@pytest.mark.parametrize("part", PARTS)
def test_a_daemon_that_cannot_be_measured_is_a_finding(
    python_image: Image, built_home: Home, tmp_path: Path, part: str
) -> None:
    run = measured(built_home.images, tmp_path / "home", part, warm="raise ValueError('cold')")
    assert len(run.rounds) == 1 and run.rounds[0].readings == {}
    assert "warmup_failed" in run.rounds[0].failures[0]
