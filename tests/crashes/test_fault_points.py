"""The daemon is killed at every step of spawn, snapshot and delete; the next one finds or makes everything right."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from agreement import check_agreement, end_all
from support_daemon import served

from forkd.errors import ForkdError
from forkd.host.paths import Home
from forkd.runtime.faults import POINTS

pytestmark = pytest.mark.usefixtures("nothing_left")

# How many of the two sandboxes before, and the three under way, there are afterwards.
_LEFT = {"spawn.committed": 5, "delete.marked": 1, "delete.killed": 1, "delete.removed": 1}


def _fault(point: str) -> str:
    """The preparation makes a snapshot and spawns two; what comes after that is killed."""
    if point.startswith("delete."):
        return point
    return f"{point}@3" if point == "spawn.started" else f"{point}@2"


@pytest.mark.parametrize("point", POINTS)
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
        # Whatever happened, what was asked for can be had now.
        controller.spawn_sandboxes("warm", n=3)
        end_all(fake_home, controller)
        daemon.stop()


def test_every_point_is_in_the_code() -> None:
    source = Path(__file__).parents[2] / "src/forkd/runtime"
    text = "".join(path.read_text() for path in source.glob("*.py") if path.name != "faults.py")
    assert [point for point in POINTS if f'reach("{point}")' not in text] == []
