"""While a branch is written, one of the three processes that have to do with it is killed: each at work for sure."""

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agreement import check_agreement, end_all, find_staging, find_vms, read_value, write_value
from support_daemon import Served, served
from support_processes import wait_until

from forkd.client.controller import Controller
from forkd.errors import ForkdError
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.runtime.branches import PREFIX

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.vm, pytest.mark.timeout(600)]

WRITER = b"forkd.store.apart"


@pytest.fixture
def daemon(vm_home: Home) -> Iterator[Served]:
    with served(vm_home, "--bind", "none", "--on-stop", "kill", engine="qemu") as started:
        yield started
    assert find_staging(vm_home) == []


@pytest.fixture
def controller(daemon: Served) -> Iterator[Controller]:
    with daemon.controller() as controller:
        yield controller


@contextmanager
def stopped_writer(daemon: Served, controller: Controller) -> Iterator[tuple[str, int]]:
    """A sandbox, and the process that writes a branch `next` of it, which stands still while the block runs."""
    [source] = controller.spawn_sandboxes("warm")
    write_value(controller, source["id"], "kept")
    controller.branch_sandbox(source["id"], "next", mode="live", wait=False)
    writer = wait_until(lambda: _find_child(daemon.process.pid, WRITER), "a process writes")
    os.kill(writer, signal.SIGSTOP)
    assert controller.get_snapshot("next")["status"] == "writing"
    try:
        yield source["id"], writer
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer, signal.SIGCONT)


def _find_child(pid: int, word: bytes) -> int | None:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            status = (process / "status").read_text()
            if f"\nPPid:\t{pid}\n" in status and word in (process / "cmdline").read_bytes():
                return int(process.name)
    return None


def find_paused_fork(home: Home) -> int:
    [pid] = [leader.pid for path, leader in find_marked(home.vms).items() if path.name.startswith(PREFIX)]
    return pid


def check_failed(home: Home, controller: Controller, source: str) -> None:
    """It says so, takes no space, and harmed nobody; the same works the next time."""
    wait_until(lambda: controller.get_snapshot("next")["status"] == "failed", "it has failed")
    assert controller.get_snapshot("next")["warning"]
    with pytest.raises(ForkdError):
        controller.spawn_sandboxes("next")
    assert not (home.snapshots / "next").exists() and find_staging(home) == []
    wait_until(lambda: not _paused_forks(home), "the fork that never runs has ended")
    assert read_value(controller, source) == "kept"
    controller.branch_sandbox(source, "next", mode="live")
    check_child(controller)


def check_child(controller: Controller) -> None:
    [child] = controller.spawn_sandboxes("next")
    assert read_value(controller, child["id"]) == "kept"
    controller.verify_snapshot("next")


def _paused_forks(home: Home) -> list[Path]:
    return [path for path in home.vms.iterdir() if path.name.startswith(PREFIX)]


def test_the_fork_that_is_written_from_is_killed(vm_home: Home, daemon: Served, controller: Controller) -> None:
    with stopped_writer(daemon, controller) as (source, _):
        os.kill(find_paused_fork(vm_home), signal.SIGKILL)
    check_failed(vm_home, controller, source)


def test_the_writer_is_killed(vm_home: Home, daemon: Served, controller: Controller) -> None:
    with stopped_writer(daemon, controller) as (source, writer):
        os.kill(writer, signal.SIGKILL)
    check_failed(vm_home, controller, source)


def test_the_source_is_killed_and_its_branch_completes(vm_home: Home, daemon: Served, controller: Controller) -> None:
    with stopped_writer(daemon, controller) as (source, _):
        os.kill(find_marked(vm_home.vms)[vm_home.vms / find_vms(vm_home)[source]].pid, signal.SIGKILL)
        wait_until(lambda: controller.get_sandbox(source)["state"] == "dead", "it is seen to be dead")
    wait_until(lambda: controller.get_snapshot("next")["status"] == "ready", "it is written")
    check_child(controller)


def test_the_daemon_is_killed_and_the_writer_ends_with_it(
    vm_home: Home, daemon: Served, controller: Controller
) -> None:
    with stopped_writer(daemon, controller) as (source, writer):
        daemon.kill()
    wait_until(lambda: not Path(f"/proc/{writer}").exists(), "the writer has ended")
    with served(vm_home, "--bind", "none", engine="qemu") as again, again.controller() as anew:
        assert check_agreement(vm_home, anew) == [source]
        check_failed(vm_home, anew, source)
        end_all(vm_home, anew)
