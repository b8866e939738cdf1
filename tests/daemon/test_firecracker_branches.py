"""Branches, forks, rewinds and chains of Firecracker's VMs, through a daemon: by live forks, and from files later."""

import pytest
from support_daemon import served
from support_processes import wait_until

from forkd.host.marked import find_marked
from forkd.host.paths import Home

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("nothing_left")]


def test_a_sandbox_is_branched_forked_and_rewound_without_a_copy_of_its_memory(fake_home: Home) -> None:
    flags = ("--bind", "none", "--on-stop", "kill")
    with served(fake_home, *flags, engine="firecracker") as daemon, daemon.controller() as controller:
        controller.create_snapshot("warm", "python", memory_mib=256, warm="past = 41", wait=True)
        (source,) = controller.spawn_sandboxes("warm")

        def value(sandbox: str, code: str) -> str:
            return str(controller.eval_code(sandbox, code)["result"])

        controller.eval_code(source["id"], "kept = past + 1")
        forks = controller.fork_sandbox(source["id"], count=2)
        assert [fork["way"] for fork in forks] == ["fork", "fork"]
        assert [value(fork["id"], "kept") for fork in forks] == ["42", "42"]
        # A checkpoint, and back to it.
        controller.create_checkpoint(source["id"], "before")
        controller.eval_code(source["id"], "kept = 0")
        controller.rewind_sandbox(source["id"], "before")
        assert value(source["id"], "kept") == "42"
        # A branch is forked at once, and again from its files, as a layer over the first snapshot.
        controller.eval_code(source["id"], "kept = 43")
        branch = controller.branch_sandbox(source["id"], "later", mode="live", wait=False)
        assert branch["tag"] == "later"
        (child,) = controller.spawn_sandboxes("later")
        assert child["way"] == "fork" and value(child["id"], "kept") == "43"
        wait_until(lambda: controller.get_snapshot("later")["status"] == "ready")
        daemon.kill()
    with served(fake_home, *flags, engine="firecracker") as daemon, daemon.controller() as controller:
        # What an earlier daemon forked is taken over, and forked live.
        assert value(source["id"], "kept") == "43"
        (again,) = controller.fork_sandbox(source["id"])
        assert again["way"] == "fork" and value(again["id"], "kept") == "43"
        (loaded,) = controller.spawn_sandboxes("later")
        assert loaded["way"] == "start" and value(loaded["id"], "kept") == "43"
        cell = controller.get_sandbox(loaded["id"], cell=True)["cell"]
        assert cell["own_user"] and cell["lacks"] == []
    assert find_marked(fake_home.vms) == {}
