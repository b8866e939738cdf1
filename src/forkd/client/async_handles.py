"""A process in an AsyncSandbox that goes on by itself: see the sync handles."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Self

from forkd.client import plans
from forkd.client.async_transport import AsyncTransport
from forkd.client.calls import commands
from forkd.client.output import Callback, Collector, CommandResult, OutputMessage, OutputPiece, piece_of
from forkd.client.stream import StreamEvent
from forkd.errors import ForkdError


async def deliver(message: OutputMessage, on_stdout: Callback | None, on_stderr: Callback | None) -> None:
    """Callbacks may be coroutine functions."""
    call = on_stderr if message.error else on_stdout
    if call is not None and inspect.isawaitable(answer := call(message)):
        await answer


async def follow(
    events: AsyncGenerator[StreamEvent, None], on_stdout: Callback | None, on_stderr: Callback | None
) -> Collector:
    """A stream to its end."""
    collector = Collector()
    async with aclosing(events):
        async for event in events:
            for message in collector.feed(event):
                await deliver(message, on_stdout, on_stderr)
    return collector


class AsyncProcessHandle:
    def __init__(self, transport: AsyncTransport, sandbox_id: str, pid: int) -> None:
        self.pid = pid
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._collector = Collector()
        self._open: AsyncGenerator[StreamEvent, None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pid={self.pid}, sandbox={self._sandbox_id!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What still runs is killed."""
        await self.disconnect()
        if self._collector.exit is None:
            await self.kill()

    @property
    def exit_code(self) -> int | None:
        """None while its end has not been seen, by `wait` or by reading to the end."""
        return None if self._collector.exit is None else self._collector.exit_code

    async def kill(self) -> bool:
        """SIGKILL, to it and what it started. False when it had ended."""
        return await self._transport.perform(plans.kill_process(self._sandbox_id, self.pid))

    async def disconnect(self) -> None:
        """Stop reading; the process goes on."""
        if self._open is not None:
            await self._open.aclose()
            self._open = None

    async def _next(self) -> StreamEvent | None:
        """The next event, None after the last. After `disconnect` all that is kept comes again."""
        if self._collector.exit is not None:
            return None
        if self._open is None:
            self._collector = Collector()
            self._open = self._transport.output(commands.process_output(self._sandbox_id, self.pid))
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

    def __aiter__(self) -> AsyncIterator[OutputPiece]:
        """Output as it comes, until the command ends."""
        return (piece_of(message) async for message in self._messages())

    async def wait(
        self, on_stdout: Callback | None = None, on_stderr: Callback | None = None, check: bool = False
    ) -> CommandResult:
        """Until it ends. `check`: raise CommandFailed for another exit code than 0."""
        async for message in self._messages():
            await deliver(message, on_stdout, on_stderr)
        result = self._collector.command_result()
        return result.check() if check else result

    async def send_stdin(self, data: str | bytes) -> None:
        await self._transport.perform(plans.write_stdin(self._sandbox_id, self.pid, data))

    async def close_stdin(self) -> None:
        await self._transport.send(commands.write_stdin(self._sandbox_id, self.pid, b"", True))

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
        await self._transport.perform(plans.write_stdin(self._sandbox_id, self.pid, data))

    async def resize(self, rows: int, cols: int) -> None:
        await self._transport.send(commands.resize_process(self._sandbox_id, self.pid, rows, cols))
