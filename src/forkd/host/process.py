"""Child processes that never outlive us by accident."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import EngineFailed, HostLacks

KILL_DEADLINE_S = 10.0


@dataclass(frozen=True)
class ExitStatus:
    code: int | None
    signal: int | None

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit status {self.code}"
        try:
            return f"killed by {signal.Signals(self.signal).name}"
        except ValueError:  # most real-time signals have no name
            return f"killed by signal {self.signal}"


class ChildProcess:
    """A child with a pidfd: its exit is an event, and a signal can never reach a recycled pid."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[ExitStatus] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._popen.wait()
        status = ExitStatus(code, None) if code >= 0 else ExitStatus(None, -code)
        if not self.exited.done():
            self.exited.set_result(status)

    def send_signal(self, number: int) -> None:
        if not self.exited.done():
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # it is a zombie already; the exit event is on its way

    async def kill(self) -> ExitStatus:
        self.send_signal(signal.SIGKILL)
        async with asyncio.timeout(KILL_DEADLINE_S):
            return await asyncio.shield(self.exited)


def spawn(
    argv: Sequence[str],
    *,
    output: Path,
    inherited_fds: Sequence[int] = (),
    max_file_bytes: int | None = None,
    die_with_parent: bool = True,
) -> ChildProcess:
    """Start `argv` in a session of its own, its output appended to a file.

    `max_file_bytes` bounds every file the child writes: SIGXFSZ stays ignored (Python's default, inherited), so
    a write past the limit fails with EFBIG instead of killing it.
    """
    if shutil.which(argv[0]) is None:
        raise HostLacks(f"There is no program {argv[0]}", hint="Install it; forkd doctor says how")
    command = [*_keeper_prefix(die_with_parent), *argv]
    with output.open("ab") as log:
        try:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=tuple(inherited_fds),
                start_new_session=True,
                restore_signals=False,
            )
        except OSError as error:
            raise EngineFailed(f"Could not start {argv[0]}: {error.strerror}") from error
    if max_file_bytes is not None:
        try:
            resource.prlimit(popen.pid, resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
        except ProcessLookupError:
            pass  # gone already; the exit event tells
    try:
        return ChildProcess(popen)
    except OSError as error:
        popen.kill()
        popen.wait()
        raise EngineFailed(f"Could not watch {argv[0]}: {error.strerror}", hint="Raise ulimit -n") from error


def _keeper_prefix(die_with_parent: bool) -> list[str]:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise HostLacks("setpriv is not installed", hint="Install the package util-linux")
    pdeathsig = ["--pdeathsig", "KILL"] if die_with_parent else []
    return [setpriv, *pdeathsig, "--no-new-privs", "--"]
