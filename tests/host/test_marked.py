"""Processes found by what their environment says, and killed: all of a VM, and nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support_processes import renounce_privileges

from forkd.errors import EngineFailed
from forkd.host import marked
from forkd.host.marked import MARK, Marked, find_marked, is_at, is_stopped, kill_marked, render_environment
from forkd.host.system import start_time_ticks

pytestmark = pytest.mark.usefixtures("nothing_left")

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command as a process of a VM; all are gone at the end."""
    started = []

    def begin(directory: Path, *argv: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            argv or ("sleep", "60"),
            env=render_environment(directory),
            stdout=subprocess.PIPE,
            preexec_fn=renounce_privileges,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_vm_process_gets_little_of_our_environment_and_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name != "PYTEST_CURRENT_TEST":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("FORKD_TOKEN", "secret")
    assert render_environment(tmp_path / "vm") == {"PATH": "/bin", "LANG": "C.UTF-8", MARK: str(tmp_path / "vm")}


def test_processes_are_found_by_directory_at_once_after_their_start(tmp_path: Path, start: Start) -> None:
    a, b = start(tmp_path / "a"), start(tmp_path / "b")
    start(tmp_path.with_name(tmp_path.name + "-other") / "c")
    found = find_marked(tmp_path)
    assert found == {tmp_path / "a": _as_marked(a.pid), tmp_path / "b": _as_marked(b.pid)}
    assert find_marked(tmp_path / "a") == {tmp_path / "a": _as_marked(a.pid)}
    assert find_marked(tmp_path / "c") == {}


def test_the_leader_is_the_one_whose_parent_is_not_of_the_vm(tmp_path: Path, start: Start) -> None:
    # Leads two, one of them in a session of its own; a process between that dropped the mark changes nothing.
    marked_again = f"FORKD_VM={tmp_path}/vm sh -c 'echo started; exec sleep 60'"
    script = f'sleep 60 & setsid sleep 60 & env -i sh -c "{marked_again}; true" & wait'
    leader = start(tmp_path / "vm", "sh", "-c", script)
    assert leader.stdout is not None
    leader.stdout.readline()
    assert find_marked(tmp_path) == {tmp_path / "vm": _as_marked(leader.pid)}
    kill_marked(tmp_path / "vm")
    assert leader.wait(5) == -signal.SIGKILL
    assert find_marked(tmp_path) == {}


def test_a_process_that_becomes_another_program_at_each_look_is_found_all_the_same(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(tmp_path / "vm")
    read, misses = Path.read_bytes, [b"", b""]

    def read_bytes(path: Path) -> bytes:
        """As the kernel answers when the program was replaced between the opening of the file and the reading."""
        return misses.pop() if misses and str(path) == f"/proc/{process.pid}/environ" else read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert [marked.pid for marked in find_marked(tmp_path).values()] == [process.pid]


def test_a_runtime_directory_may_be_named_in_two_ways(tmp_path: Path, start: Start) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    process = start(tmp_path / "link" / "vm")
    assert find_marked(tmp_path / "real") == {tmp_path / "real" / "vm": _as_marked(process.pid)}
    assert find_marked(tmp_path / "link") == {tmp_path / "link" / "vm": _as_marked(process.pid)}


def test_a_zombie_is_no_process_any_more(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path / "vm")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert find_marked(tmp_path) == {}
    kill_marked(tmp_path)


def test_what_a_vm_starts_while_it_is_being_killed_is_killed_too(tmp_path: Path, start: Start) -> None:
    # A hundred, the last of them while we look.
    script = (
        "import os, time\nfor number in range(100):\n if not os.fork(): time.sleep(60)\n time.sleep(0.002)\n"
        " if number == 30: print('on its way', flush=True)\ntime.sleep(60)"
    )
    process = start(tmp_path / "vm", sys.executable, "-S", "-c", script)
    assert process.stdout is not None
    process.stdout.readline()
    kill_marked(tmp_path / "vm")
    assert find_marked(tmp_path) == {}


def test_a_pid_that_went_to_another_process_is_not_killed(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(tmp_path / "vm")
    real = _as_marked(process.pid)
    seen = iter([{tmp_path / "vm": [Marked(real.pid, real.start_ticks - 1)]}])
    monkeypatch.setattr(marked, "_scan", lambda _under: next(seen, {}))
    kill_marked(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)


def test_a_process_that_does_not_end_is_an_error_not_a_hang(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "vm")
    monkeypatch.setattr(marked, "KILL_DEADLINE_S", 0.3)
    monkeypatch.setattr(marked.signal, "pidfd_send_signal", lambda _pidfd, _number: None)
    with pytest.raises(EngineFailed, match="do not end"):
        kill_marked(tmp_path)


def test_we_do_not_find_ourselves(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom forkd.host.marked import find_marked, kill_marked\n"
        "kill_marked(Path(sys.argv[1])); print(find_marked(Path(sys.argv[1])))"
    )
    command = ["setpriv", "--no-new-privs", sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=render_environment(tmp_path / "vm"), capture_output=True, timeout=30, check=True)
    assert done.stdout == b"{}\n"


def test_a_stopped_process_is_told_from_one_that_sleeps(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path / "vm")
    assert not is_stopped(process.pid)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert is_stopped(process.pid)
    process.kill()
    process.wait()
    assert not is_stopped(process.pid)


@pytest.mark.parametrize("mark", ["/run/vms", "/run/vms/a", "/run/vms/a/b", "/run/vms/..a"])
def test_a_mark_is_at_a_place_or_below(mark: str) -> None:
    assert is_at(mark, "/run/vms")


@pytest.mark.parametrize(
    "mark", ["", "/run", "/run/vms-too", "/run/vms/../x", "/run/vms/..", "/run/vms/.", "/run/vms//a", "/run/vms/a/../b"]
)
def test_a_mark_that_takes_a_detour_is_nowhere(mark: str) -> None:
    assert not is_at(mark, "/run/vms")


def _as_marked(pid: int) -> Marked:
    ticks = start_time_ticks(pid)
    assert ticks is not None
    return Marked(pid, ticks)
