"""Child processes: how they end, and that they do."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forkd.errors import EngineFailed, HostLacks
from forkd.host import process
from forkd.host.memory import start_time_ticks
from forkd.host.process import ExitStatus, spawn, take_over

pytestmark = pytest.mark.usefixtures("nothing_left")

_SPAWN_AND_WAIT = """
import asyncio, sys
from pathlib import Path
from forkd.host.process import spawn
async def main():
    child = spawn(["sleep", "60"], output=Path(sys.argv[1]), outlive=sys.argv[2] == "outlive")
    while Path(f"/proc/{child.pid}/comm").read_text() != "sleep\\n":  # setpriv, or what comes before it
        await asyncio.sleep(0.01)
    print(child.pid, flush=True)
    await child.exited
asyncio.run(main())
"""

_DIE_BEFORE_THE_CHILD_IS_LET_GO = """
import asyncio, os, signal, sys
from pathlib import Path
from forkd.host import process
def die(pid, name):
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
process._watch = die
async def main():
    process.spawn(["touch", sys.argv[2]], output=Path(sys.argv[1]), outlive=sys.argv[3] == "outlive")
asyncio.run(main())
"""

_DIE_AS_SOON_AS_THE_CHILD_IS_LET_GO = """
import asyncio, os, signal, sys
from pathlib import Path
from forkd.host.process import spawn
async def main():
    print(spawn(["touch", sys.argv[2]], output=Path(sys.argv[1]), outlive=sys.argv[3] == "outlive").pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def run(*argv: str, output: Path, max_file_bytes: int | None = None) -> ExitStatus:
    async def body() -> ExitStatus:
        return await spawn(argv, output=output, max_file_bytes=max_file_bytes).exited

    return asyncio.run(body())


def test_the_exit_status_is_told_and_the_output_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    status = run("sh", "-c", "echo out; echo err >&2; exit 7", output=log)
    assert status == ExitStatus(7, None)
    assert str(status) == "exit status 7"
    assert log.read_text() == "before\nout\nerr\n"


@pytest.mark.parametrize(("number", "text"), [(signal.SIGTERM, "killed by SIGTERM"), (40, "killed by signal 40")])
def test_the_signal_is_told(tmp_path: Path, number: int, text: str) -> None:
    status = run("sh", "-c", f"kill -{int(number)} $$", output=tmp_path / "log")
    assert status == ExitStatus(None, number)
    assert str(status) == text


def test_nothing_can_be_read_from_us(tmp_path: Path) -> None:
    assert run("sh", "-c", "cat; exit 3", output=tmp_path / "log").code == 3
    assert (tmp_path / "log").read_bytes() == b""


def test_a_kill_leaves_no_zombie_and_can_be_repeated(tmp_path: Path) -> None:
    async def body() -> None:
        child = spawn(["sleep", "60"], output=tmp_path / "log")
        assert start_time_ticks(child.pid) is not None
        assert await child.kill() == ExitStatus(None, signal.SIGKILL)
        assert not Path(f"/proc/{child.pid}").exists()
        assert await child.kill() == ExitStatus(None, signal.SIGKILL)
        child.send_signal(signal.SIGTERM)  # reaches nobody, and is no error

    asyncio.run(body())


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SPAWN_AND_WAIT, str(tmp_path / "log"), "die"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    parent.kill()
    parent.communicate()
    assert _is_over(pid)


def test_a_child_that_is_to_outlive_its_parent_does(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SPAWN_AND_WAIT, str(tmp_path / "log"), "outlive"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    time.sleep(0.2)
    try:
        assert start_time_ticks(pid) is not None
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("fate", ["die", "outlive"])
def test_a_program_whose_starter_dies_too_early_never_runs(tmp_path: Path, fate: str) -> None:
    wanted = tmp_path / "ran"
    command = [sys.executable, "-c", _DIE_BEFORE_THE_CHILD_IS_LET_GO, str(tmp_path / "log"), str(wanted), fate]
    starter = subprocess.run(command, stdout=subprocess.PIPE, timeout=30, check=False)
    assert starter.returncode == -signal.SIGKILL
    assert _is_over(int(starter.stdout))
    assert not wanted.exists()


@pytest.mark.parametrize(("fate", "runs"), [("die", False), ("outlive", True)])
def test_a_starter_that_dies_before_the_death_signal_is_set_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str, runs: bool
) -> None:
    real = shutil.which("setpriv")
    slow = tmp_path / "bin/setpriv"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\nsleep 0.5\nexec {real} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    wanted = tmp_path / "ran"
    command = [sys.executable, "-c", _DIE_AS_SOON_AS_THE_CHILD_IS_LET_GO, str(tmp_path / "log"), str(wanted), fate]
    starter = subprocess.run(command, stdout=subprocess.PIPE, timeout=30, check=False)
    assert starter.returncode == -signal.SIGKILL
    assert _is_over(int(starter.stdout))
    assert wanted.exists() == runs


def test_a_child_sees_the_environment_it_is_given_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKD_TOKEN", "secret")

    async def body() -> None:
        env = {"PATH": os.environ["PATH"], "MINE": "1"}
        await spawn(["env"], output=tmp_path / "log", env=env).exited

    asyncio.run(body())
    seen = {line.partition("=")[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert {"PATH", "MINE"} <= seen <= {"PATH", "MINE", "PWD", "SHLVL", "_", "OLDPWD"}  # a shell may add its own


def test_a_process_of_another_parent_is_watched_and_killed_and_its_status_is_unknown(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SPAWN_AND_WAIT, str(tmp_path / "log"), "outlive"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()

    async def body() -> None:
        ticks = start_time_ticks(pid)
        assert ticks is not None
        assert take_over(pid, ticks - 1) is None  # another process had this pid
        taken = take_over(pid, ticks)
        assert taken is not None
        assert not taken.exited.done()
        status = await taken.kill()
        assert status == ExitStatus(None, None)
        assert str(status) == "exit status unknown"
        assert await taken.kill() == status
        assert take_over(pid, ticks) is None

    asyncio.run(body())


def test_a_process_that_is_released_lives_on_and_can_be_taken_over_again(tmp_path: Path) -> None:
    async def body() -> None:
        child = spawn(["sleep", "60"], output=tmp_path / "log")
        child.release()
        child.release()
        child.send_signal(signal.SIGKILL)  # reaches nobody: it is not ours any more
        ticks = start_time_ticks(child.pid)
        assert ticks is not None
        again = take_over(child.pid, ticks)
        assert again is not None
        assert await again.kill() == ExitStatus(None, signal.SIGKILL)  # still our child: the status is known
        assert not child.exited.done()

    asyncio.run(body())


def test_what_a_child_may_write_is_bounded_and_it_lives_on(tmp_path: Path) -> None:
    limit = 64 * 1024
    script = f"head -c {4 * limit} /dev/zero; exit 5"
    assert run("sh", "-c", script, output=tmp_path / "log", max_file_bytes=limit).code == 5
    assert limit <= (tmp_path / "log").stat().st_size <= limit + 200
    assert run("sh", "-c", script, output=tmp_path / "unlimited").code == 5
    assert (tmp_path / "unlimited").stat().st_size == 4 * limit


@pytest.mark.parametrize("program", ["no-such-program", "/no/such/program", "/etc/passwd", "/etc"])
def test_a_program_that_cannot_be_run_is_a_typed_error(tmp_path: Path, program: str) -> None:
    with pytest.raises(HostLacks, match=program) as caught:
        run(program, output=tmp_path / "log")
    assert caught.value.hint


def test_a_host_without_setpriv_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostLacks, match="setpriv") as caught:
        run(sys.executable, output=tmp_path / "log")
    assert caught.value.hint is not None and "util-linux" in caught.value.hint


def test_a_child_that_cannot_be_watched_does_not_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(process.os, "pidfd_open", refuse)
    with pytest.raises(EngineFailed, match="Too many open files"):
        run("sleep", "60", output=tmp_path / "log")  # that it is gone is seen by nothing_left


def _is_over(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while start_time_ticks(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
