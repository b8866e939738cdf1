"""One run and the directory it owns; what a killed run left is swept, and nothing else is touched."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_processes import renounce_privileges

from forkd.errors import HostLacks
from forkd.host.marked import render_environment
from forkd.host.system import start_time_ticks
from forkd.runtime.runtime import session, sweep

_HOLD = """
import sys, time
from pathlib import Path
from forkd.runtime.runtime import session
with session(Path(sys.argv[1])) as directory:
    print(directory, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of no interest to us."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def dead_run(tmp_path: Path) -> Path:
    """What a run leaves that was killed, and whose pid nobody has."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    directory = tmp_path / f"{gone.pid}-12345"
    (directory / "vm").mkdir(parents=True)
    return directory


def start_marked(directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env=render_environment(directory), preexec_fn=renounce_privileges)


def is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(0.3)
    except subprocess.TimeoutExpired:
        return True
    return False


def test_a_session_has_a_directory_of_its_own_and_leaves_none(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    with session(runtime) as directory:
        assert directory.parent == runtime
        assert directory.name == f"{os.getpid()}-{start_time_ticks(os.getpid())}"
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "vm").mkdir()
        (directory / "vm/console.log").touch()
    assert list(runtime.iterdir()) == []


def test_it_is_gone_after_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), session(tmp_path / "run") as directory:
        (directory / "vm").mkdir()
        raise ZeroDivisionError
    assert list((tmp_path / "run").iterdir()) == []


def test_a_runtime_directory_someone_else_prepared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to("real")
    with pytest.raises(HostLacks), session(tmp_path / "run"):
        pytest.fail("used all the same")


def test_a_dead_run_is_swept_and_its_vms_are_killed(dead_run: Path) -> None:
    vms = [start_marked(dead_run / "vm"), start_marked(dead_run / "vm"), start_marked(dead_run / "other")]
    stranger = start_marked(dead_run.parent / "elsewhere")
    try:
        assert sweep(dead_run.parent) == [dead_run.name]
        assert [vm.wait(5) for vm in vms] == [-signal.SIGKILL] * 3
        assert list(dead_run.parent.iterdir()) == []
        assert is_running(stranger)
    finally:
        for process in (*vms, stranger):
            process.kill()
            process.wait()


def test_a_run_whose_pid_went_to_another_process_is_over(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    started = start_time_ticks(sleeper.pid)
    assert started is not None
    (tmp_path / f"{sleeper.pid}-{started - 1}").mkdir()
    assert sweep(tmp_path) == [f"{sleeper.pid}-{started - 1}"]
    assert is_running(sleeper)


@pytest.mark.parametrize("name", ["notes", "1", "-", "1-", "a-b", "²-3", "0-5", f"{'9' * 30}-1"])
def test_other_directories_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert sweep(tmp_path) == []
    assert (tmp_path / name).is_dir()


def test_a_live_run_keeps_its_directory_and_a_killed_one_loses_it_even_unreaped(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", _HOLD, str(runtime)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with session(runtime) as ours:
            assert theirs.is_dir() and ours != theirs
        assert theirs.is_dir()
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie until we ask again
        with session(runtime):
            assert not theirs.exists()
    finally:
        other.kill()
        other.communicate()
