"""The parts of the benchmark about the daemon, small, on the fake engine: every figure is read, and nothing is left."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from bench import daemon, load
from bench.daemon import PARTS, WAYS, CostSpec, Service, begin_part, run_part
from bench.figures import Run, by_name
from bench.load import CycleSpec, LoadSpec
from bench.report import render_run
from bench.siege import SiegeSpec
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.image import Image
from forkd.image.spec import Silent

HOST = {"cpu": "Example 1", "cores": 2, "ram_mib": 8192, "qemu": None, "accelerator": None}

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_WARMING", 1)
    monkeypatch.setattr(daemon, "_WARMING_SPAWNS", 1)
    monkeypatch.setattr(load, "_WARMING_S", 0.2)


def measured(images: Path, root: Path, part: str, warm: str = "import sys") -> Run:
    root.mkdir()
    (root / "images").symlink_to(images, target_is_directory=True)
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as runtime:
        service = Service(
            home=Home(root, Path(runtime)),
            directory=Path(runtime),
            progress=Silent(),
            engines=("fake",),
            costs={"fake": CostSpec(spawns={1: 1, 3: 1}, execs=3, evals=3)},
            load=LoadSpec(clients=5, sandboxes=2, seconds=0.5),
            cycles={"fake": CycleSpec(cycles=5, at_once=2)},
            siege=SiegeSpec(idle=20, unread=5, commands=40, rounds=1),
            rounds=2,
            warm={"fake": warm},
        )
        run = begin_part(service, part, HOST)
        asyncio.run(run_part(service, part, run, lambda done: render_run(part, done)))
        assert find_marked(Path(runtime)) == {}
        assert list(Path(runtime).iterdir()) == []
    assert [entry.name for entry in root.iterdir()] == ["images"]
    return run


def test_the_costs_of_every_kind_of_request_are_measured(python_image: Image, built_home: Home, tmp_path: Path) -> None:
    run = measured(built_home.images, tmp_path / "home", "daemon")
    assert [done.failures for done in run.rounds] == [(), ()]
    for readings in (by_name(done.readings) for done in run.rounds):
        for n in (1, 3):
            place = f"daemon.fake.spawn.{n}"
            assert 0 < readings[f"{place}.fork.p50"] < readings[f"{place}.total.p50"]
            assert readings[f"{place}.direct.p99"] > 0 and readings[f"{place}.own.p50"] > 0
        for kind in ("exec", "eval"):
            assert readings[f"daemon.fake.{kind}.agent.p50"] > 0
            for way in WAYS:
                assert readings[f"daemon.fake.{kind}.{way}.more.p50"] > 0


def test_a_load_and_cycles_are_measured(python_image: Image, built_home: Home, tmp_path: Path) -> None:
    rounds = [measured(built_home.images, tmp_path / part, part).rounds for part in ("load", "cycles")]
    assert [[done.failures for done in each] for each in rounds] == [[()], [()]]
    readings = {name: value for (done,) in rounds for name, value in by_name(done.readings).items()}
    assert readings["load.requests"] >= 5
    assert readings["load.errors"] == readings["load.left"] == 0
    assert readings["cycles.fake.done"] == 5
    assert readings["cycles.fake.left"] == 0


def test_a_siege_is_measured(python_image: Image, built_home: Home, tmp_path: Path) -> None:
    (done,) = measured(built_home.images, tmp_path / "home", "siege").rounds
    readings = by_name(done.readings)
    assert done.failures == () and readings["siege.errors"] == 0
    assert 0 < readings["siege.quiet.p50"] <= readings["siege.quiet.p99"]
    assert readings["siege.meanwhile.p99"] > 0 and readings["siege.begins.p99"] > 0
    assert readings["siege.slower"] == pytest.approx(readings["siege.meanwhile.p99"] / readings["siege.quiet.p99"])
    assert readings["siege.most"] > 10


@pytest.mark.parametrize("part", PARTS)
def test_a_daemon_that_cannot_be_measured_is_a_finding(
    python_image: Image, built_home: Home, tmp_path: Path, part: str
) -> None:
    run = measured(built_home.images, tmp_path / "home", part, warm="raise ValueError('cold')")
    assert len(run.rounds) == 1 and run.rounds[0].readings == {}
    assert "warmup_failed" in run.rounds[0].failures[0]
