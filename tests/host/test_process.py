"""Child processes: how they end, and that they do."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support_processes import has_ended, wait_until

from forkd.errors import EngineFailed, HostLacks
from forkd.host import process
from forkd.host.process import Exited, ExitStatus, spawn, take_over
from forkd.host.system import start_time_ticks

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

# Before or after the child may become the program.
_SPAWN_AND_DIE = """
import asyncio, os, signal, sys
from pathlib import Path
from forkd.host import process
def die(pid, name):
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[4] == "before":
    process._watch = die
async def main():
    child = process.spawn(["touch", sys.argv[2]], output=Path(sys.argv[1]), outlive=sys.argv[3] == "outlive")
    die(child.pid, "")
asyncio.run(main())
"""


async def run(*argv: str, output: Path, max_file_bytes: int | None = None) -> ExitStatus:
    return await spawn(argv, output=output, max_file_bytes=max_file_bytes).exited


async def test_the_exit_status_is_told_and_the_output_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    status = await run("sh", "-c", "echo out; echo err >&2; exit 7", output=log)
    assert status == ExitStatus(7, None)
    assert str(status) == "exit status 7"
    assert log.read_text() == "before\nout\nerr\n"


@pytest.mark.parametrize(("number", "text"), [(signal.SIGTERM, "killed by SIGTERM"), (40, "killed by signal 40")])
async def test_the_signal_is_told(tmp_path: Path, number: int, text: str) -> None:
    status = await run("sh", "-c", f"kill -{int(number)} $$", output=tmp_path / "log")
    assert status == ExitStatus(None, number)
    assert str(status) == text


async def test_nothing_can_be_read_from_us(tmp_path: Path) -> None:
    assert (await run("sh", "-c", "cat; exit 3", output=tmp_path / "log")).code == 3
    assert (tmp_path / "log").read_bytes() == b""


async def test_a_kill_leaves_no_zombie_and_can_be_repeated(tmp_path: Path) -> None:
    child = spawn(["sleep", "60"], output=tmp_path / "log")
    assert start_time_ticks(child.pid) is not None
    assert await child.kill() == ExitStatus(None, signal.SIGKILL)
    assert not Path(f"/proc/{child.pid}").exists()
    assert await child.kill() == ExitStatus(None, signal.SIGKILL)
    child.send_signal(signal.SIGTERM)  # reaches nobody, and is no error


def child_of_killed_parent(tmp_path: Path, fate: str) -> int:
    command = [sys.executable, "-c", _SPAWN_AND_WAIT, str(tmp_path / "log"), fate]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
        parent.kill()
    return pid


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    pid = child_of_killed_parent(tmp_path, "die")
    wait_until(lambda: has_ended(pid))


def test_a_child_that_is_to_outlive_its_parent_does(tmp_path: Path) -> None:
    pid = child_of_killed_parent(tmp_path, "outlive")
    time.sleep(0.2)
    try:
        assert start_time_ticks(pid) is not None
    finally:
        os.kill(pid, signal.SIGKILL)


def runs_though_its_starter_dies(tmp_path: Path, fate: str, when: str) -> bool:
    wanted = tmp_path / "ran"
    command = [sys.executable, "-c", _SPAWN_AND_DIE, str(tmp_path / "log"), str(wanted), fate, when]
    starter = subprocess.run(command, stdout=subprocess.PIPE, timeout=30, check=False)
    assert starter.returncode == -signal.SIGKILL
    wait_until(lambda: has_ended(int(starter.stdout)))
    return wanted.exists()


@pytest.mark.parametrize("fate", ["die", "outlive"])
def test_a_program_whose_starter_dies_too_early_never_runs(tmp_path: Path, fate: str) -> None:
    assert not runs_though_its_starter_dies(tmp_path, fate, "before")


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
    assert runs_though_its_starter_dies(tmp_path, fate, "after") == runs


async def test_a_child_sees_the_environment_it_is_given_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKD_TOKEN", "secret")
    env = {"PATH": os.environ["PATH"], "MINE": "1"}
    await spawn(["env"], output=tmp_path / "log", env=env).exited
    seen = {line.partition("=")[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert {"PATH", "MINE"} <= seen <= {"PATH", "MINE", "PWD", "SHLVL", "_", "OLDPWD"}  # a shell may add its own


async def test_a_process_of_another_parent_is_watched_and_killed_and_its_status_is_unknown(tmp_path: Path) -> None:
    pid = child_of_killed_parent(tmp_path, "outlive")
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


async def test_a_process_that_is_released_lives_on_and_can_be_taken_over_again(tmp_path: Path) -> None:
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


async def test_what_a_child_may_write_is_bounded_and_it_lives_on(tmp_path: Path) -> None:
    limit = 64 * 1024
    script = f"head -c {4 * limit} /dev/zero; exit 5"
    assert (await run("sh", "-c", script, output=tmp_path / "log", max_file_bytes=limit)).code == 5
    assert limit <= (tmp_path / "log").stat().st_size <= limit + 200
    assert (await run("sh", "-c", script, output=tmp_path / "unlimited")).code == 5
    assert (tmp_path / "unlimited").stat().st_size == 4 * limit


@pytest.mark.parametrize("program", ["no-such-program", "/no/such/program", "/etc/passwd", "/etc"])
async def test_a_program_that_cannot_be_run_is_a_typed_error(tmp_path: Path, program: str) -> None:
    with pytest.raises(HostLacks, match=program) as caught:
        await run(program, output=tmp_path / "log")
    assert caught.value.hint


async def test_a_host_without_setpriv_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostLacks, match="setpriv") as caught:
        await run(sys.executable, output=tmp_path / "log")
    assert caught.value.hint is not None and "util-linux" in caught.value.hint


async def test_a_child_that_cannot_be_watched_does_not_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(process.os, "pidfd_open", refuse)
    with pytest.raises(EngineFailed, match="Too many open files"):
        await run("sleep", "60", output=tmp_path / "log")  # that it is gone is seen by nothing_left


# What is asked of a process that may exit before it answers


async def test_an_answer_is_waited_for_until_the_process_exits(tmp_path: Path) -> None:
    process = spawn(["sleep", "60"], output=tmp_path / "log")
    assert await process.unless_it_exits(asyncio.sleep(0.01, "an answer")) == "an answer"
    asking = asyncio.create_task(process.unless_it_exits(asyncio.Event().wait()))
    await asyncio.sleep(0)
    await process.kill()
    with pytest.raises(Exited):
        await asking
    with pytest.raises(Exited):
        await process.unless_it_exits(asyncio.Event().wait())


async def test_a_timeout_of_the_answer_itself_is_not_taken_for_an_exit(tmp_path: Path) -> None:
    process = spawn(["sleep", "60"], output=tmp_path / "log")
    with pytest.raises(TimeoutError):
        await process.unless_it_exits(asyncio.wait_for(asyncio.Event().wait(), 0.01))
    await process.kill()


@pytest.mark.parametrize("turns", range(4))
async def test_a_socket_that_is_opened_as_its_caller_is_cancelled_is_not_lost(tmp_path: Path, turns: int) -> None:
    opened: list[socket.socket] = []
    answers: list[socket.socket] = []
    said = asyncio.Event()

    async def open_one() -> socket.socket:
        sock = socket.socket()
        opened.append(sock)
        try:
            await said.wait()
        except BaseException:
            sock.close()
            raise
        return sock

    async def ask() -> None:
        answers.append(await process.unless_it_exits(open_one()))

    process = spawn(["sleep", "60"], output=tmp_path / "log")
    asking = asyncio.create_task(ask())
    await asyncio.sleep(0)
    said.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert opened == answers or opened[0].fileno() == -1
    for sock in answers:
        sock.close()
    await process.kill()
