"""Processes that never outlive us by accident, and processes of another run that we take over."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from forkd.errors import EngineFailed, HostLacks
from forkd.host.cgroup import Group
from forkd.host.system import start_time_ticks
from forkd.host.tools import find_tool

T = TypeVar("T")

KILL_DEADLINE_S = 10.0
# What to do when the machine runs out of something.
SHORTAGES = {
    errno.EAGAIN: "Raise ulimit -u, kernel.pid_max or the group's pids.max",
    errno.EMFILE: "Raise ulimit -n",
    errno.ENFILE: "Raise fs.file-max",
    errno.ENOMEM: "Free some memory",
    errno.ENOSPC: "Free some space in the runtime directory",
}

# A new process waits for a line from us before it becomes the program, and ends when we die before that: so it can be
# found by its environment, or never ran. One that dies with us must see us alive once its death signal is set: had we
# died before, the signal would never come.
_GATE = 'read -r go && exec "$@" </dev/null'
_GATE_OF_MORTALS = f'[ "$PPID" = "$0" ] && {_GATE}'


@dataclass(frozen=True)
class ExitStatus:
    """Both None: it ended, and only its parent knows how."""

    code: int | None
    signal: int | None

    def __str__(self) -> str:
        if self.signal is None:
            return "exit status unknown" if self.code is None else f"exit status {self.code}"
        try:
            return f"killed by {signal.Signals(self.signal).name}"
        except ValueError:  # most real-time signals have no name
            return f"killed by signal {self.signal}"


class Exited(Exception):
    """The process ended first."""


class WatchedProcess:
    """A process held by its pidfd: its exit is an event, and a signal can never reach a recycled pid."""

    def __init__(self, pid: int, pidfd: int) -> None:
        """Takes the pidfd over."""
        self.pid = pid
        self._pidfd: int | None = pidfd
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._on_exit)

    def send_signal(self, number: int) -> None:
        if self._pidfd is not None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # a zombie already; the exit event will come

    async def kill(self) -> ExitStatus:
        self.send_signal(signal.SIGKILL)
        async with asyncio.timeout(KILL_DEADLINE_S):
            return await asyncio.shield(self.exited)

    async def unless_it_exits(self, answer: Awaitable[T]) -> T:
        """The answer, or Exited. Awaited in the caller's own task, so that no answer is lost when it is cancelled."""
        waiting = True

        def give_up(_exited: object) -> None:
            if waiting:
                patience.reschedule(self._loop.time())

        try:
            async with asyncio.timeout(None) as patience:
                self.exited.add_done_callback(give_up)
                try:
                    return await answer
                finally:
                    waiting = False
                    self.exited.remove_done_callback(give_up)
        except TimeoutError:
            if patience.expired():
                raise Exited from None
            raise

    def release(self) -> None:
        """Stop watching and leave it alone; `exited` stays as it is."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _on_exit(self) -> None:
        assert self._pidfd is not None
        status = _collect(self._pidfd)
        self.release()
        self.exited.set_result(status)


def _collect(pidfd: int) -> ExitStatus:
    """The status of a process that has ended, if we are its parent."""
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        return ExitStatus(None, None)
    assert result is not None
    if result.si_code == os.CLD_EXITED:
        return ExitStatus(result.si_status, None)
    return ExitStatus(None, result.si_status)


def children_of(pid: int) -> list[int]:
    """Empty when it has ended."""
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def take_over(pid: int, start_ticks: int) -> WatchedProcess | None:
    """Watch a process that another one may have started. None: it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise EngineFailed(f"Could not watch process {pid}: {error.strerror}", hint="Raise ulimit -n") from error
    # Look once the pidfd is open: from then on it cannot mean another process.
    if start_time_ticks(pid) != start_ticks:
        os.close(pidfd)
        return None
    return WatchedProcess(pid, pidfd)


def spawn(
    argv: Sequence[str],
    *,
    output: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    inherited_fds: Sequence[int] = (),
    max_file_bytes: int | None = None,
    outlive: bool = False,
    group: Group | None = None,
) -> WatchedProcess:
    """Start `argv` in a session of its own, its output appended to a file.

    It is killed when the calling thread ends, unless it may `outlive` it: call this from a thread that lasts.
    `max_file_bytes` bounds every file the child writes: SIGXFSZ stays ignored (Python's default, inherited), so
    a write past the limit fails with EFBIG instead of killing it. No instruction of it runs outside its `group`.
    """
    if shutil.which(argv[0]) is None:
        raise HostLacks(f"{argv[0]} is not a program on this host", hint="Install it; forkd doctor says how")
    command = [*_keeper_prefix(outlive), *argv]
    with output.open("ab") as log:
        try:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=env,
                cwd=cwd,
                pass_fds=tuple(inherited_fds),
                start_new_session=True,
                restore_signals=False,
            )
        except OSError as error:
            hint = SHORTAGES.get(error.errno or 0)
            raise EngineFailed(f"Could not start {argv[0]}: {error.strerror}", hint=hint) from error
    assert popen.stdin is not None
    with popen.stdin as gate:
        process = _taken_in(popen, argv[0], group)
        try:
            if max_file_bytes is not None:
                resource.prlimit(popen.pid, resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
            os.write(gate.fileno(), b"\n")
        except (ProcessLookupError, BrokenPipeError):
            pass  # it has ended; the exit event will come
    return process


def _taken_in(popen: subprocess.Popen[bytes], name: str, group: Group | None) -> WatchedProcess:
    try:
        if group is not None:
            group.add(popen.pid)
        process = _watch(popen.pid, name)
    except EngineFailed:
        popen.kill()
        popen.wait()
        raise
    popen.returncode = 0  # keeps Popen from waiting for it: the pidfd tells when it ends
    return process


def _watch(pid: int, name: str) -> WatchedProcess:
    try:
        return WatchedProcess(pid, os.pidfd_open(pid))
    except OSError as error:
        raise EngineFailed(f"Could not watch {name}: {error.strerror}", hint="Raise ulimit -n") from error


def _keeper_prefix(outlive: bool) -> list[str]:
    pdeathsig = [] if outlive else ["--pdeathsig", "KILL"]
    gate = _GATE if outlive else _GATE_OF_MORTALS
    return [str(find_tool("setpriv")), *pdeathsig, "--no-new-privs", "--", "/bin/sh", "-c", gate, str(os.getpid())]
