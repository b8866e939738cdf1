"""`sandbox.commands` and `sandbox.pty`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, overload

from forkd.client import plans
from forkd.client.calls import commands
from forkd.client.handles import CommandHandle, PtyHandle, follow
from forkd.client.output import Callback, CommandResult, result_of
from forkd.client.transport import Transport
from forkd.client.values import Process


class Commands:
    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._id = sandbox_id

    @overload
    def run(
        self,
        cmd: str | Sequence[str],
        timeout: float | None = None,
        *,
        background: Literal[False] = False,
        envs: Mapping[str, str] | None = None,
        user: str | int | None = None,
        cwd: str | None = None,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
        stdin: str | bool | None = None,
        check: bool = False,
    ) -> CommandResult: ...

    @overload
    def run(
        self,
        cmd: str | Sequence[str],
        timeout: float | None = None,
        *,
        background: Literal[True],
        envs: Mapping[str, str] | None = None,
        user: str | int | None = None,
        cwd: str | None = None,
        stdin: str | bool | None = None,
    ) -> CommandHandle: ...

    def run(
        self,
        cmd: str | Sequence[str],
        timeout: float | None = None,
        *,
        background: bool = False,
        envs: Mapping[str, str] | None = None,
        user: str | int | None = None,
        cwd: str | None = None,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
        stdin: str | bool | None = None,
        check: bool = False,
    ) -> CommandResult | CommandHandle:
        """A text is a line of shell, a list is executed as it is. An exit code other than 0 is a result, not an error.

        `background`: return at once. `on_stdout`, `on_stderr`: called with pieces of text as they come. `stdin`: text
        to be read, or True to write it later to a command in the background. `check`: raise CommandFailed. `timeout`:
        in seconds, 60 unless told, 0 for none; in the background none unless told. A command that is killed at it
        raises GuestTimeout, whose `body` has the output so far.
        """
        command = plans.command_of(
            cmd, timeout=timeout, background=background, cwd=cwd, envs=envs, user=user, stdin=stdin
        )
        if background:
            pid = self._transport.perform(plans.start_command(self._id, command))
            return CommandHandle(self._transport, self._id, pid)
        if on_stdout is None and on_stderr is None:
            result = result_of(self._transport.send(commands.exec_command(self._id, command)))
        else:
            events = self._transport.output(commands.exec_stream(self._id, command))
            result = follow(events, on_stdout, on_stderr).command_result()
        return result.check() if check else result

    def list(self) -> list[Process]:
        """Those started in the background; ended ones for a minute."""
        return [Process.of(body) for body in self._transport.send(commands.list_processes(self._id))]

    def kill(self, pid: int) -> bool:
        """False when it had ended."""
        return self._transport.perform(plans.kill_process(self._id, pid))

    def send_stdin(self, pid: int, data: str | bytes) -> None:
        self._transport.perform(plans.write_stdin(self._id, pid, data))

    def connect(self, pid: int) -> CommandHandle:
        """A handle of one that was started before."""
        info = self._transport.send(commands.get_process(self._id, pid))
        return CommandHandle(self._transport, self._id, info["pid"])


class Pty:
    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._id = sandbox_id

    def create(
        self,
        rows: int = 24,
        cols: int = 80,
        *,
        cmd: str | Sequence[str] | None = None,
        user: str | int | None = None,
        cwd: str | None = None,
        envs: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> PtyHandle:
        """A terminal with a login shell, or `cmd`."""
        command = plans.terminal_of(rows, cols, cmd, cwd=cwd, envs=envs, user=user, timeout=timeout)
        pid = self._transport.perform(plans.start_command(self._id, command))
        return PtyHandle(self._transport, self._id, pid)

    def connect(self, pid: int) -> PtyHandle:
        info = self._transport.send(commands.get_process(self._id, pid))
        return PtyHandle(self._transport, self._id, info["pid"])
