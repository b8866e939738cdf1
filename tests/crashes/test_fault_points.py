"""The daemon is killed at every step of spawn, snapshot and delete; the next one finds or makes everything right.

Templates and their forks are real VMs; all else is the fake engine's.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from agreement import check_agreement, end_all
from support_daemon import served
from support_images import link_snapshot, made_home

from forkd.errors import ForkdError, Unsupported
from forkd.host.faults import POINTS
from forkd.host.marked import find_marked
from forkd.host.paths import Home

pytestmark = pytest.mark.usefixtures("nothing_left")

OF_VMS = [point for point in POINTS if point.startswith(("template.", "fork."))]
# Those of branches and what they make: test_branch_faults.py.
OF_ALL = [
    point for point in POINTS if point.startswith(("spawn.", "snapshot.", "delete.")) and point != "delete.renamed"
]
# Where children exist already: forks of a template end, or go on, as those that were started do.
OF_BOTH = ["spawn.started", "spawn.forked", "spawn.committed"]
# How many of the two sandboxes before, and the three under way, there are afterwards.
_LEFT = {"spawn.committed": 5, "delete.marked": 1, "delete.killed": 1, "delete.removed": 1}


def _fault(point: str) -> str:
    """The preparation makes a snapshot and spawns two; what comes after that is killed."""
    if point.startswith("delete."):
        return point
    return f"{point}@3" if point == "spawn.started" else f"{point}@2"


@pytest.mark.parametrize("point", OF_ALL)
def test_a_daemon_killed_at(point: str, fake_home: Home) -> None:
    with (
        served(fake_home, "--bind", "none", env={"FORKD_FAULT": _fault(point)}) as daemon,
        daemon.controller() as controller,
    ):
        controller.create_snapshot("warm", "python", memory_mib=128, warm="x = 41", wait=True)
        before = [row["id"] for row in controller.spawn_sandboxes("warm", n=2)]
        with pytest.raises(ForkdError):
            if point.startswith("snapshot."):
                controller.create_snapshot("second", "python", memory_mib=128, wait=True)
            elif point.startswith("spawn."):
                controller.spawn_sandboxes("warm", n=3)
            else:
                controller.kill_sandbox(before[0])
        assert daemon.process.wait(10) == -signal.SIGKILL
    with served(fake_home, "--bind", "none") as daemon, daemon.controller() as controller:
        live = check_agreement(fake_home, controller)
        assert before[1] in live
        assert len(live) == _LEFT.get(point, 2)
        if point.startswith("snapshot."):
            status = controller.get_snapshot("second")["status"]
            assert status == ("ready" if point == "snapshot.published" else "failed")
            controller.create_snapshot("second", "python", memory_mib=128, replace=True, wait=True)
        # After each fault, the same request works now.
        controller.spawn_sandboxes("warm", n=3)
        end_all(fake_home, controller)
        daemon.stop()


@dataclass(frozen=True)
class VmHome:
    """A home with the snapshot `warm` of a real VM, and a sandbox that lives through all of its daemons' deaths."""

    home: Home
    survivor: str


@pytest.fixture(scope="module")
def vms(warm_vm: Path, built_home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VmHome]:
    with made_home(tmp_path_factory.mktemp("faults"), built_home.images) as home:
        link_snapshot(warm_vm, home)
        with served(home, "--bind", "none", engine="qemu") as daemon, daemon.controller() as controller:
            try:
                controller.warm_snapshot("warm")
            except Unsupported as error:
                pytest.skip(error.message)
            [survivor] = controller.spawn_sandboxes("warm")
        yield VmHome(home, survivor["id"])
        with served(home, "--bind", "none", "--on-stop", "kill", engine="qemu"):
            pass


def _vm_fault(point: str) -> str:
    """In the middle of three forks. Doctor and engine have each tried one before."""
    if point == "spawn.started":
        return f"{point}@2"
    return f"{point}@4" if point.startswith("fork.") else point


@pytest.mark.vm
@pytest.mark.parametrize("point", [*OF_VMS, *OF_BOTH])
def test_a_daemon_with_templates_killed_at(point: str, vms: VmHome) -> None:
    flags = ("--bind", "none")
    with (
        served(vms.home, *flags, engine="qemu", env={"FORKD_FAULT": _vm_fault(point)}) as daemon,
        daemon.controller() as controller,
    ):
        with pytest.raises(ForkdError):
            controller.warm_snapshot("warm")
            controller.spawn_sandboxes("warm", n=3)
        assert daemon.process.wait(30) == -signal.SIGKILL
    with served(vms.home, *flags, engine="qemu") as daemon, daemon.controller() as controller:
        assert controller.list_templates() == []
        live = check_agreement(vms.home, controller)  # no process and no directory but theirs
        assert live[0] == vms.survivor and len(live) == (4 if point == "spawn.committed" else 1)
        # After each fault, the same request works now.
        template = controller.warm_snapshot("warm")
        made = controller.spawn_sandboxes("warm", n=3)
        assert {row["way"] for row in made} == {"fork"}
        for row in made:
            assert controller.eval_code(row["id"], "x + 1")["result"] == "42"
        for sandbox_id in {*live, *(row["id"] for row in made)} - {vms.survivor}:
            controller.kill_sandbox(sandbox_id)
        survivor = controller.get_sandbox(vms.survivor)
        assert {leader.pid for leader in find_marked(vms.home.vms).values()} == {template["pid"], survivor["pid"]}
        daemon.stop()
    assert [path.name for path in vms.home.vms.iterdir()] == [vms.survivor]


def test_every_point_is_in_the_code() -> None:
    source = Path(__file__).parents[2] / "src/forkd"
    text = "".join(path.read_text() for path in source.rglob("*.py") if path.name != "faults.py")
    assert [point for point in POINTS if f'fault_point("{point}")' not in text] == []
