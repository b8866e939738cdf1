"""Commands and terminals in a sandbox: `sandbox.commands`, `sandbox.pty`, and the handles they give.

A handle is for one task or thread at a time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Literal, Self, Unpack, overload

from forkd.client.arguments import (
    BackgroundOptions,
    CommandSpec,
    GuestPath,
    RunOptions,
    background_limit,
    encode,
    foreground_limit,
    spec_of,
)
from forkd.client.async_controller import AsyncController
from forkd.client.output import (
    Callback,
    Collector,
    OutputMessage,
    OutputPiece,
    async_deliver,
    exit_code_of,
    piece_of,
)
from forkd.client.results import CommandResult, Process, result_of
from forkd.client.stream import StreamEvent
from forkd.errors import Conflict, ForkdError, GuestDied, InvalidInput, NotFound, NotRunning
from forkd.wire.api import ProcessInfo

MAX_STDIN_BYTES = 512 * 1024  # of one request
_SIGKILL = 9
_LOGIN_SHELL = "command -v bash >/dev/null && exec bash -l; exec sh -l"


async def async_follow(
    events: AsyncGenerator[StreamEvent, None], on_stdout: Callback | None, on_stderr: Callback | None
) -> Collector:
    """A stream to its end."""
    collector = Collector()
    async with aclosing(events):
        async for event in events:
            for message in collector.feed(event):
                await async_deliver(message, on_stdout, on_stderr)
    return collector


class AsyncProcessHandle:
    """A process that goes on by itself: wait for it, read from it, write to it, end it."""

    def __init__(self, controller: AsyncController, sandbox_id: str, pid: int) -> None:
        self.pid = pid
        self._controller = controller
        self._sandbox_id = sandbox_id
        self._collector = Collector()
        self._open: AsyncGenerator[StreamEvent, None] | None = None
        self._ended: ProcessInfo | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pid={self.pid}, sandbox={self._sandbox_id!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        """What still runs is killed."""
        await self.disconnect()
        if self.exit_code is None:
            await self.kill()

    @property
    def exit_code(self) -> int | None:
        """As last seen: by `poll`, by `wait`, or by reading to the end. None until then; it asks nobody."""
        if self._collector.exit is not None:
            return self._collector.exit_code
        return None if self._ended is None else exit_code_of(self._ended)

    async def poll(self) -> int | None:
        """Ask whether it has ended: its exit code, None while it runs. Reads none of its output."""
        if self._collector.exit is None:
            info = await self._controller.get_process(self._sandbox_id, self.pid)
            if info["running"]:
                return None
            self._ended = info
        return self.exit_code

    async def kill(self) -> bool:
        """SIGKILL, to it and what it started. False when it had ended, or its sandbox had."""
        try:
            await self._controller.signal_process(self._sandbox_id, self.pid, _SIGKILL)
        except NotRunning:
            raise
        except (NotFound, Conflict, GuestDied):
            return False
        return True

    async def disconnect(self) -> None:
        """Stop reading; the process goes on."""
        if self._open is not None:
            await self._open.aclose()
            self._open = None

    async def _write(self, data: str | bytes) -> None:
        """In as many requests as it takes, one after the other."""
        raw = encode(data) if isinstance(data, str) else bytes(data)
        for start in range(0, len(raw), MAX_STDIN_BYTES):
            await self._controller.write_stdin(self._sandbox_id, self.pid, raw[start : start + MAX_STDIN_BYTES])

    async def _next(self) -> StreamEvent | None:
        """The next event, None after the last. After `disconnect` all that is kept comes again."""
        if self._collector.exit is not None:
            return None
        if self._open is None:
            self._collector = Collector()
            self._open = self._controller.process_output(self._sandbox_id, self.pid)
        try:
            return await anext(self._open, None)
        except ForkdError:
            self._open = None  # so that waiting again reads again
            raise


class AsyncCommandHandle(AsyncProcessHandle):
    @property
    def stdout(self) -> str:
        """What has been read so far."""
        return self._collector.stdout

    @property
    def stderr(self) -> str:
        return self._collector.stderr

    async def __aiter__(self) -> AsyncIterator[OutputPiece]:
        """Output as it comes, until the command ends."""
        async for message in self._messages():
            yield piece_of(message)

    async def wait(
        self, on_stdout: Callback | None = None, on_stderr: Callback | None = None, check: bool = False
    ) -> CommandResult:
        """Until it ends. `check`: raise CommandFailed for another exit code than 0."""
        async for message in self._messages():
            await async_deliver(message, on_stdout, on_stderr)
        result = self._collector.command_result()
        return result.check() if check else result

    async def send_stdin(self, data: str | bytes) -> None:
        await self._write(data)

    async def close_stdin(self) -> None:
        await self._controller.write_stdin(self._sandbox_id, self.pid, b"", True)

    async def _messages(self) -> AsyncIterator[OutputMessage]:
        while (event := await self._next()) is not None:
            for message in self._collector.feed(event):
                yield message


class AsyncPtyHandle(AsyncProcessHandle):
    """A process at a terminal of its own."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """What the terminal shows, until the process ends."""
        while (event := await self._next()) is not None:
            self._collector.note(event)
            if event.data:
                yield event.data

    async def wait(self) -> int:
        """Until it ends; its exit code, negative when killed by that signal."""
        async for _ in self:
            pass
        return self._collector.exit_code

    async def send(self, data: str | bytes) -> None:
        """As if typed."""
        await self._write(data)

    async def resize(self, rows: int, cols: int) -> None:
        await self._controller.resize_process(self._sandbox_id, self.pid, rows, cols)


class AsyncCommands:
    def __init__(self, controller: AsyncController, sandbox_id: str) -> None:
        self._controller = controller
        self._id = sandbox_id

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        timeout: float | None = None,
        *,
        background: Literal[False] = False,
        **options: Unpack[RunOptions],
    ) -> CommandResult: ...

    @overload
    async def run(
        self,
        cmd: str | Sequence[str],
        timeout: float | None = None,
        *,
        background: Literal[True],
        **options: Unpack[BackgroundOptions],
    ) -> AsyncCommandHandle: ...

    async def run(
        self,
        cmd: str | Sequence[str],
        timeout: float | None = None,
        *,
        background: bool = False,
        envs: Mapping[str, str] | None = None,
        user: str | int | None = None,
        cwd: GuestPath | None = None,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
        stdin: str | bool | None = None,
        check: bool = False,
    ) -> CommandResult | AsyncCommandHandle:
        """A text is a line of shell, a list is executed as it is. An exit code other than 0 is a result, not an error.

        `background`: return at once. `on_stdout`, `on_stderr`: called with pieces of text as they come. `stdin`: text
        to be read, or True to write it later to a command in the background. `check`: raise CommandFailed. `timeout`:
        in seconds: 60 by default, 0 for none; in the background none by default. A command that is killed at it
        raises GuestTimeout, whose `body` has the output so far.
        """
        spec = spec_of(cmd, cwd=cwd, envs=envs, user=user)
        if background:
            return await self._start(spec, background_limit(timeout), stdin)
        if stdin is True:
            raise InvalidInput("stdin=True is for a command in the background", hint="Add background=True")
        limit_s = foreground_limit(timeout)
        if on_stdout is None and on_stderr is None:
            answer = await self._controller.exec_command(self._id, timeout_secs=limit_s, stdin=stdin or None, **spec)
            result = result_of(answer)
        else:
            events = self._controller.exec_stream(self._id, timeout_secs=limit_s, stdin=stdin or None, **spec)
            collector = await async_follow(events, on_stdout, on_stderr)
            result = collector.command_result()
        return result.check() if check else result

    async def _start(self, spec: CommandSpec, limit_s: float | None, stdin: str | bool | None) -> AsyncCommandHandle:
        """A text for its input is written and the input closed; True leaves it open."""
        has_input = stdin is not None and stdin is not False
        info = await self._controller.start_process(self._id, timeout_secs=limit_s, stdin=has_input, **spec)
        handle = AsyncCommandHandle(self._controller, self._id, info["pid"])
        if isinstance(stdin, str):
            await handle.send_stdin(stdin)
            await handle.close_stdin()
        return handle

    async def list(self) -> list[Process]:
        """Those started in the background; ended ones for a minute."""
        return [Process.of(body) for body in await self._controller.list_processes(self._id)]

    async def kill(self, pid: int) -> bool:
        """False when it had ended."""
        return await AsyncCommandHandle(self._controller, self._id, pid).kill()

    async def send_stdin(self, pid: int, data: str | bytes) -> None:
        await AsyncCommandHandle(self._controller, self._id, pid).send_stdin(data)

    async def connect(self, pid: int) -> AsyncCommandHandle:
        """A handle of one that was started before."""
        info = await self._controller.get_process(self._id, pid)
        return AsyncCommandHandle(self._controller, self._id, info["pid"])


class AsyncPty:
    def __init__(self, controller: AsyncController, sandbox_id: str) -> None:
        self._controller = controller
        self._id = sandbox_id

    async def create(
        self,
        rows: int = 24,
        cols: int = 80,
        *,
        cmd: str | Sequence[str] | None = None,
        user: str | int | None = None,
        cwd: GuestPath | None = None,
        envs: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> AsyncPtyHandle:
        """A terminal with a login shell, or `cmd`."""
        envs = {"TERM": "xterm-256color", **(envs or {})}
        spec = spec_of(_LOGIN_SHELL if cmd is None else cmd, cwd=cwd, envs=envs, user=user)
        limit_s = background_limit(timeout)
        info = await self._controller.start_process(self._id, timeout_secs=limit_s, pty=(rows, cols), **spec)
        return AsyncPtyHandle(self._controller, self._id, info["pid"])

    async def connect(self, pid: int) -> AsyncPtyHandle:
        info = await self._controller.get_process(self._id, pid)
        return AsyncPtyHandle(self._controller, self._id, info["pid"])
