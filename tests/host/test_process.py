"""Child processes: how they end, and that they do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forkd.errors import EngineFailed, HostLacks
from forkd.host import process
from forkd.host.memory import start_time_ticks
from forkd.host.process import ExitStatus, spawn

pytestmark = pytest.mark.usefixtures("nothing_left")

_SPAWN_AND_WAIT = """
import asyncio, sys
from pathlib import Path
from forkd.host.process import spawn
async def main():
    child = spawn(["sleep", "60"], output=Path(sys.argv[1]), die_with_parent=sys.argv[2] == "yes")
    await asyncio.sleep(0.3)  # until setpriv has become sleep
    print(child.pid, flush=True)
    await child.exited
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
    command = [sys.executable, "-c", _SPAWN_AND_WAIT, str(tmp_path / "log"), "yes"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    parent.kill()
    parent.communicate()
    assert _is_over(pid)


def test_a_child_that_is_to_outlive_its_parent_does(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SPAWN_AND_WAIT, str(tmp_path / "log"), "no"]
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


def test_what_a_child_may_write_is_bounded_and_it_lives_on(tmp_path: Path) -> None:
    limit = 64 * 1024
    # Waits a moment, as the limit is set from outside, once the child is there.
    script = f"sleep 0.2; head -c {4 * limit} /dev/zero; exit 5"
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
