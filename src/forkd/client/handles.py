"""A process in a sandbox that goes on by itself: wait for it, read from it, write to it, end it.

A handle is for one thread at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from types import TracebackType
from typing import Self

from forkd.client import plans
from forkd.client.calls import commands
from forkd.client.output import Callback, Collector, CommandResult, OutputMessage, OutputPiece, piece_of
from forkd.client.stream import StreamEvent
from forkd.client.transport import Transport
from forkd.errors import ForkdError


def deliver(message: OutputMessage, on_stdout: Callback | None, on_stderr: Callback | None) -> None:
    if (call := on_stderr if message.error else on_stdout) is not None:
        call(message)


def follow(
    events: Generator[StreamEvent, None, None], on_stdout: Callback | None, on_stderr: Callback | None
) -> Collector:
    """A stream to its end."""
    collector = Collector()
    with closing(events):
        for event in events:
            for message in collector.feed(event):
                deliver(message, on_stdout, on_stderr)
    return collector


class ProcessHandle:
    def __init__(self, transport: Transport, sandbox_id: str, pid: int) -> None:
        self.pid = pid
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._collector = Collector()
        self._open: Generator[StreamEvent, None, None] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pid={self.pid}, sandbox={self._sandbox_id!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What still runs is killed."""
        self.disconnect()
        if self._collector.exit is None:
            self.kill()

    @property
    def exit_code(self) -> int | None:
        """None while its end has not been seen, by `wait` or by reading to the end."""
        return None if self._collector.exit is None else self._collector.exit_code

    def kill(self) -> bool:
        """SIGKILL, to it and what it started. False when it had ended."""
        return self._transport.perform(plans.kill_process(self._sandbox_id, self.pid))

    def disconnect(self) -> None:
        """Stop reading; the process goes on."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _next(self) -> StreamEvent | None:
        """The next event, None after the last. After `disconnect` all that is kept comes again."""
        if self._collector.exit is not None:
            return None
        if self._open is None:
            self._collector = Collector()
            self._open = self._transport.output(commands.process_output(self._sandbox_id, self.pid))
        try:
            return next(self._open, None)
        except ForkdError:
            self._open = None  # so that waiting again reads again
            raise


class CommandHandle(ProcessHandle):
    @property
    def stdout(self) -> str:
        """What has been read so far."""
        return self._collector.stdout

    @property
    def stderr(self) -> str:
        return self._collector.stderr

    def __iter__(self) -> Iterator[OutputPiece]:
        """Output as it comes, until the command ends."""
        return (piece_of(message) for message in self._messages())

    def wait(
        self, on_stdout: Callback | None = None, on_stderr: Callback | None = None, check: bool = False
    ) -> CommandResult:
        """Until it ends. `check`: raise CommandFailed for another exit code than 0."""
        for message in self._messages():
            deliver(message, on_stdout, on_stderr)
        result = self._collector.command_result()
        return result.check() if check else result

    def send_stdin(self, data: str | bytes) -> None:
        self._transport.perform(plans.write_stdin(self._sandbox_id, self.pid, data))

    def close_stdin(self) -> None:
        self._transport.send(commands.write_stdin(self._sandbox_id, self.pid, b"", True))

    def _messages(self) -> Iterator[OutputMessage]:
        while (event := self._next()) is not None:
            yield from self._collector.feed(event)


class PtyHandle(ProcessHandle):
    """A process at a terminal of its own."""

    def __iter__(self) -> Iterator[bytes]:
        """What the terminal shows, until the process ends."""
        while (event := self._next()) is not None:
            self._collector.note(event)
            if event.data:
                yield event.data

    def wait(self) -> int:
        """Until it ends; its exit code, negative when killed by that signal."""
        for _ in self:
            pass
        return self._collector.exit_code

    def send(self, data: str | bytes) -> None:
        """As if typed."""
        self._transport.perform(plans.write_stdin(self._sandbox_id, self.pid, data))

    def resize(self, rows: int, cols: int) -> None:
        self._transport.send(commands.resize_process(self._sandbox_id, self.pid, rows, cols))
