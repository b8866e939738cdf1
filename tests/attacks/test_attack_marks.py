"""Another user of the machine marks processes of theirs as VMs of ours: neither a daemon nor its sandboxes notice."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support_daemon import served
from support_mounts import as_root
from support_processes import has_ended, renounce_privileges, wait_until

from forkd.client.controller import Controller
from forkd.host.marked import MARK, find_marked, kill_marked
from forkd.host.paths import Home

pytestmark = pytest.mark.usefixtures("nothing_left")

NOBODY = 65534
# Below the directory of VMs; {id} is that of a real sandbox.
MARKS = ["", "/", "/..", "/../x", "/.", "/{id}/../../x", "/{id}", "/{id}/..", "/{id}/deeper", "/nothing", "//{id}"]


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that others may enter."""
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as path:
        if os.statvfs(path).f_flag & os.ST_NOSUID:
            pytest.skip("no program gains privileges here")
        os.chmod(path, 0o755)
        yield Path(path)


@contextmanager
def marked(mark: str, *, user: int | None = NOBODY, sealed: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a mark of its owner's choice; `sealed`: as our VMs are, it can gain no privileges."""
    process = subprocess.Popen(
        ["sleep", "600"],
        env={MARK: mark},
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        preexec_fn=renounce_privileges if sealed else None,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def begin(controller: Controller) -> str:
    controller.create_snapshot("warm", "small", warm="x = 41", wait=True)
    [info] = controller.spawn_sandboxes("warm")
    controller.eval_code(info["id"], "x = x + 1")
    return info["id"]


@as_root
def test_marks_of_other_users_change_nothing_when_a_daemon_starts(home: Home) -> None:
    with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
        sandbox_id = begin(controller)
        pid = controller.get_sandbox(sandbox_id)["pid"]
    (home.runtime / "kept").write_text("by the next daemon")
    with ExitStack() as attack:
        theirs = [
            attack.enter_context(marked(f"{home.vms}{mark.format(id=sandbox_id)}", sealed=sealed))
            for mark in MARKS
            for sealed in (True, False)
        ]
        with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
            [info] = controller.list_sandboxes()
            assert (info["id"], info["state"], info["pid"]) == (sandbox_id, "running", pid)
            assert controller.eval_code(sandbox_id, "x")["result"] == "42"
            assert (home.runtime / "kept").exists()
            # Nor when the sandbox whose directory they bear ends: they are not waited for.
            controller.kill_sandbox(sandbox_id)
            assert has_ended(pid) and controller.list_sandboxes() == []
        assert [process.poll() for process in theirs] == [None] * len(theirs)


@as_root
def test_a_process_of_another_user_is_never_adopted_in_place_of_a_vm_that_ended(home: Home) -> None:
    with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
        sandbox_id = begin(controller)
        pid = controller.get_sandbox(sandbox_id)["pid"]
    with marked(f"{home.vms}/{sandbox_id}") as theirs:
        os.kill(pid, 9)
        wait_until(lambda: has_ended(pid))
        with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
            info = controller.get_sandbox(sandbox_id)
            assert (info["state"], info["pid"]) == ("dead", None)
            assert "gone when the daemon started" in str(info["cause"])
            controller.kill_sandbox(sandbox_id)
        assert theirs.poll() is None


def test_marks_of_our_own_user_that_name_no_vm_do_not_keep_a_daemon_from_starting(home: Home) -> None:
    with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
        sandbox_id = begin(controller)
    odd = [mark for mark in MARKS if mark not in ("/{id}", "/nothing")]
    with ExitStack() as attack:
        for mark in [*odd, "/" + "n" * 5000]:
            attack.enter_context(marked(f"{home.vms}{mark.format(id=sandbox_id)}", user=None))
        with served(home, "--bind", "none") as daemon, daemon.controller() as controller:
            assert controller.eval_code(sandbox_id, "x")["result"] == "42"
            controller.kill_sandbox(sandbox_id)


@as_root
def test_a_set_user_id_program_that_another_user_started_is_not_ours(public: Path) -> None:
    """It has root's ids, all of them, and the environment of who started it."""
    program = public / "setpriv"
    shutil.copy(shutil.which("setpriv") or "", program)
    program.chmod(0o4755)
    directory = public / "vms" / "sb-1"
    process = subprocess.Popen(
        [program, "--reuid", "0", "--", "sleep", "600"], env={MARK: str(directory)}, user=NOBODY, group=NOBODY
    )
    try:
        wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        assert "Uid:\t0\t0\t0\t0\n" in Path(f"/proc/{process.pid}/status").read_text()
        assert find_marked(public / "vms") == {}
        kill_marked(directory)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
