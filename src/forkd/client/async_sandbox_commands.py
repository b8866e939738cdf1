"""`commands` and `pty` of an AsyncSandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, overload

from forkd.client import plans
from forkd.client.async_handles import AsyncCommandHandle, AsyncPtyHandle, follow
from forkd.client.async_transport import AsyncTransport
from forkd.client.calls import commands
from forkd.client.output import Callback, CommandResult, result_of
from forkd.client.values import Process


class AsyncCommands:
    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._id = sandbox_id

    @overload
    async def run(
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
    async def run(
        self,
        cmd: str | Sequence[str],
        timeout: float | None = None,
        *,
        background: Literal[True],
        envs: Mapping[str, str] | None = None,
        user: str | int | None = None,
        cwd: str | None = None,
        stdin: str | bool | None = None,
    ) -> AsyncCommandHandle: ...

    async def run(
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
    ) -> CommandResult | AsyncCommandHandle:
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
            pid = await self._transport.perform(plans.start_command(self._id, command))
            return AsyncCommandHandle(self._transport, self._id, pid)
        if on_stdout is None and on_stderr is None:
            result = result_of(await self._transport.send(commands.exec_command(self._id, command)))
        else:
            events = self._transport.output(commands.exec_stream(self._id, command))
            result = (await follow(events, on_stdout, on_stderr)).command_result()
        return result.check() if check else result

    async def list(self) -> list[Process]:
        """Those started in the background; ended ones for a minute."""
        return [Process.of(body) for body in await self._transport.send(commands.list_processes(self._id))]

    async def kill(self, pid: int) -> bool:
        """False when it had ended."""
        return await self._transport.perform(plans.kill_process(self._id, pid))

    async def send_stdin(self, pid: int, data: str | bytes) -> None:
        await self._transport.perform(plans.write_stdin(self._id, pid, data))

    async def connect(self, pid: int) -> AsyncCommandHandle:
        """A handle of one that was started before."""
        info = await self._transport.send(commands.get_process(self._id, pid))
        return AsyncCommandHandle(self._transport, self._id, info["pid"])


class AsyncPty:
    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._id = sandbox_id

    async def create(
        self,
        rows: int = 24,
        cols: int = 80,
        *,
        cmd: str | Sequence[str] | None = None,
        user: str | int | None = None,
        cwd: str | None = None,
        envs: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> AsyncPtyHandle:
        """A terminal with a login shell, or `cmd`."""
        command = plans.terminal_of(rows, cols, cmd, cwd=cwd, envs=envs, user=user, timeout=timeout)
        pid = await self._transport.perform(plans.start_command(self._id, command))
        return AsyncPtyHandle(self._transport, self._id, pid)

    async def connect(self, pid: int) -> AsyncPtyHandle:
        info = await self._transport.send(commands.get_process(self._id, pid))
        return AsyncPtyHandle(self._transport, self._id, info["pid"])
