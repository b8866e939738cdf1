"""The daemon is killed at every step of what has to do with branches; the next one finds or makes everything right.

Every snapshot it lists starts and holds the right value, nothing it does not list is there, the same request works.
"""

import signal
from pathlib import Path

import pytest
from agreement import check_agreement, end_all, find_staging
from branch_scenarios import (
    TAG,
    Branching,
    BranchingWhole,
    Compacting,
    Deriving,
    Forking,
    Promoting,
    Removing,
    Resuming,
    Rewinding,
    Scenario,
    Suspending,
    Unpacking,
)
from support_daemon import served
from support_images import made_home, make_image

from forkd.errors import ForkdError
from forkd.host.faults import POINTS
from forkd.host.paths import Home

pytestmark = pytest.mark.usefixtures("nothing_left")

# What is done, where the daemon is killed, and whether it holds from there on.
Case = tuple[type[Scenario], str, bool]
WITHOUT_VMS: list[Case] = [
    (Branching, "branch.recorded", False),
    (Branching, "branch.saved", False),
    (Branching, "branch.pages", False),
    (Branching, "layer.sealed", False),
    (Branching, "branch.sealed", False),
    (Branching, "branch.published", True),
    (BranchingWhole, "branch.sealed", False),
    (BranchingWhole, "branch.published", True),
    (Forking, "branch.recorded", False),
    (Forking, "branch.published", False),
    (Forking, "spawn.begun", False),
    (Forking, "spawn.reserved", False),
    (Forking, "spawn.forked", False),
    (Forking, "spawn.committed", True),
    (Rewinding, "rewind.forked", False),
    (Rewinding, "rewind.recorded", True),
    (Promoting, "branch.published", False),
    (Promoting, "rewind.forked", False),
    (Promoting, "rewind.recorded", True),
    (Promoting, "promote.moved", True),
    (Promoting, "delete.marked", True),
    (Promoting, "delete.killed@2", True),
    (Promoting, "delete.removed@3", True),
    (Compacting, "compact.written", False),
    (Compacting, "compact.published", True),
    (Removing, "delete.renamed", False),
    (Removing, "delete.renamed@2", False),
    (Removing, "delete.renamed@3", True),
    (Deriving, "spawn.committed", False),
    (Deriving, "derive.ran", False),
    (Deriving, "branch.recorded", False),
    (Deriving, "branch.sealed", False),
    (Deriving, "branch.published", True),
    (Deriving, "delete.marked", True),
    (Suspending, "branch.recorded", False),
    (Suspending, "branch.sealed", False),
    (Suspending, "branch.published", False),
    (Suspending, "suspend.written", False),
    (Suspending, "suspend.recorded", True),
    (Suspending, "delete.marked", True),
    (Suspending, "delete.removed", True),
    (Suspending, "delete.renamed", True),
    (Resuming, "spawn.reserved", False),
    (Resuming, "spawn.started", False),
    (Resuming, "spawn.committed", True),
]
WITH_VMS: list[Case] = [
    (Branching, "branch.recorded", False),
    (Branching, "branch.forked", False),
    (Branching, "branch.saved", False),
    (Branching, "layer.pages", False),
    (Branching, "branch.pages", False),
    (Branching, "layer.sealed", False),
    (Branching, "branch.sealed", False),
    (Branching, "branch.published", True),
    (BranchingWhole, "branch.pages", False),
    (Forking, "spawn.started", False),
    (Rewinding, "rewind.forked", False),
    (Rewinding, "rewind.recorded", True),
    (Promoting, "rewind.forked", False),
    (Promoting, "promote.moved", True),
    (Compacting, "compact.written", False),
    (Deriving, "branch.forked", False),
    (Suspending, "branch.pages", False),
    (Suspending, "suspend.written", False),
    (Suspending, "suspend.recorded", True),
    (Suspending, "delete.renamed", True),
]
UNPACKING = ["unpack.staged", "unpack.image", "unpack.published", "unpack.published@2", "unpack.published@3"]
# Of these others: test_fault_points.py, test_network_faults.py, and of the hub test_network_crashes.py.
OTHERS = "spawn.", "snapshot.", "template.", "fork.", "delete.", "network.", "port.", "hub."


def _named(case: Case) -> str:
    return f"{case[0].__name__.lower()}-{case[1]}"


def run(kind: type[Scenario], point: str, done: bool, home: Home, engine: str) -> None:
    flags = ("--bind", "none")
    with served(home, *flags, engine=engine) as daemon, daemon.controller() as controller:
        if engine == "fake":
            controller.create_snapshot(TAG, "python", memory_mib=128, warm="x = 41", wait=True)
        scenario = kind(controller)
        scenario.begin()
        daemon.stop()
    with (
        served(home, *flags, engine=engine, env={"FORKD_FAULT": point}) as daemon,
        daemon.controller() as scenario.controller,
    ):
        with pytest.raises(ForkdError):
            scenario.act()
        assert daemon.process.wait(60) == -signal.SIGKILL
    with served(home, *flags, engine=engine) as daemon, daemon.controller() as controller:
        scenario.controller = controller
        live = check_agreement(home, controller)
        scenario.check(live, done)
        scenario.again()
        end_all(home, controller)
        daemon.stop()
    assert find_staging(home) == []


@pytest.mark.parametrize("case", WITHOUT_VMS, ids=_named)
def test_a_daemon_killed_while(case: Case, fake_home: Home) -> None:
    run(*case, fake_home, "fake")


@pytest.mark.vm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", WITH_VMS, ids=_named)
def test_a_daemon_of_vms_killed_while(case: Case, vm_home: Home) -> None:
    run(*case, vm_home, "qemu")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of three, with its image."""
    file = tmp_path_factory.mktemp("packed") / "third.pack"
    with made_home(tmp_path_factory.mktemp("from")) as home:
        make_image(home, "python")
        with served(home, "--bind", "none", "--on-stop", "kill") as daemon, daemon.controller() as controller:
            controller.create_snapshot(TAG, "python", memory_mib=128, warm="x = 41", wait=True)
            Unpacking(controller).begin()
            with file.open("wb") as out:
                for piece in controller.pack_snapshot("third"):
                    out.write(piece)
    return file


@pytest.mark.parametrize("point", [*UNPACKING, "between pieces"])
def test_a_daemon_killed_while_it_unpacks(point: str, pack: Path, tmp_path: Path) -> None:
    with made_home(tmp_path / "home") as home:
        with (
            served(home, "--bind", "none", env={"FORKD_FAULT": point}) as daemon,
            daemon.controller() as controller,
        ):
            scenario = Unpacking(controller)
            scenario.pack = pack
            if point == "between pieces":
                upload, data = controller.begin_upload(trust=True), pack.read_bytes()
                controller.append_upload(upload["id"], 0, data[: len(data) - 100])
                daemon.kill()
            else:
                with pytest.raises(ForkdError):
                    scenario.act()
                assert daemon.process.wait(60) == -signal.SIGKILL
        with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
            scenario.controller = controller
            live = check_agreement(home, controller)
            if not controller.list_snapshots():
                assert _images(home) == [], "an image that nothing needs"
            scenario.check(live, done=False)
            scenario.again()
            daemon.stop()
        assert find_staging(home) == []


def _images(home: Home) -> list[str]:
    """Of images and their pieces, whatever takes space."""
    return [str(path) for path in home.images.rglob("*") if path.is_file() and path.stat().st_size > 0]


def test_every_point_of_branches_has_a_scenario() -> None:
    reached = {point.partition("@")[0] for _, point, _ in [*WITHOUT_VMS, *WITH_VMS]}
    reached |= {point.partition("@")[0] for point in UNPACKING}
    assert [point for point in POINTS if not point.startswith(OTHERS) and point not in reached] == []
    assert "delete.renamed" in reached
