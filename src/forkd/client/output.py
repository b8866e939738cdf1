"""What a command wrote and how it ended, gathered from the events of its stream."""

from __future__ import annotations

import codecs
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self

from forkd.client.results import CommandResult, Execution, Logs, execution_of
from forkd.client.stream import StreamEvent
from forkd.errors import Conflict, GuestTimeout

MAX_KEPT_CHARS = 8 * 1024 * 1024  # of stdout and of stderr; the daemon keeps as much of an exec

Callback = Callable[["OutputMessage"], Any]  # from AsyncSandbox it may return an awaitable


class OutputMessage(str):
    """A piece of output: a text, with the attributes E2B's callbacks look at."""

    error: bool
    timestamp: int  # ns

    def __new__(cls, text: str, error: bool = False) -> Self:
        made = super().__new__(cls, text)
        made.error = error
        made.timestamp = time.time_ns()
        return made

    @property
    def line(self) -> str:
        return str(self)


class OutputPiece(NamedTuple):
    """What iterating over a command gives; one of them is set. E2B's third, for terminals, never is: see PtyHandle."""

    stdout: str | None = None
    stderr: str | None = None
    pty: bytes | None = None


def piece_of(message: OutputMessage) -> OutputPiece:
    return OutputPiece(stderr=message) if message.error else OutputPiece(stdout=message)


def exit_code_of(end: Mapping[str, Any]) -> int:
    """Negative: killed by that signal."""
    code, signal = end.get("exit_code"), end.get("signal")
    return code if isinstance(code, int) else -int(signal or 0)


async def async_deliver(message: OutputMessage, on_stdout: Callback | None, on_stderr: Callback | None) -> None:
    """Callbacks may be coroutine functions."""
    call = on_stderr if message.error else on_stdout
    if call is not None and inspect.isawaitable(answer := call(message)):
        await answer


def deliver(message: OutputMessage, on_stdout: Callback | None, on_stderr: Callback | None) -> None:
    if (call := on_stderr if message.error else on_stdout) is not None:
        call(message)


class _Text:
    """One output as text, kept up to a limit; characters may arrive in pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kept: list[str] = []
        self._size = 0
        self.truncated = False

    def take(self, data: bytes, last: bool = False) -> str:
        text = self._decoder.decode(data, last)
        room = MAX_KEPT_CHARS - self._size
        self._kept.append(text[:room])
        self._size += len(self._kept[-1])
        self.truncated = self.truncated or len(text) > room
        return text

    def __str__(self) -> str:
        return "".join(self._kept)


class Collector:
    """Feeds on events; gives each piece of text back once, and in the end what became of it all."""

    def __init__(self) -> None:
        self._texts = {"stdout": _Text(), "stderr": _Text()}
        self.exit: dict[str, Any] | None = None
        self.result: dict[str, Any] | None = None
        self._gap = False

    @property
    def stdout(self) -> str:
        return str(self._texts["stdout"])

    @property
    def stderr(self) -> str:
        return str(self._texts["stderr"])

    @property
    def exit_code(self) -> int:
        """Negative: killed by that signal."""
        if self.exit is None:
            raise Conflict("The command was not followed to its end", hint="Call wait() to read on from what is kept")
        return exit_code_of(self.exit)

    def feed(self, event: StreamEvent) -> list[OutputMessage]:
        if event.kind in self._texts:
            return self._messages(event.kind, self._texts[event.kind].take(event.data))
        self.note(event)
        if event.kind == "start":
            return []
        # A character that was cut by a gap or by the end will not be completed.
        return [message for kind, text in self._texts.items() for message in self._messages(kind, text.take(b"", True))]

    def note(self, event: StreamEvent) -> None:
        """Only what is not output."""
        if event.kind == "gap":
            self._gap = True
        elif event.kind == "exit":
            self.exit = event.body
        elif event.kind == "result":
            self.result = event.body

    def command_result(self) -> CommandResult:
        """After the exit. A command that was killed at its deadline is an error, as it is without a stream."""
        exit_code = self.exit_code
        truncated = self._gap or any(text.truncated for text in self._texts.values())
        if self.exit is not None and self.exit.get("timed_out"):
            error = GuestTimeout(
                "The command was killed at its timeout", hint="Give it a longer timeout=, or run it in the background"
            )
            error.body = {"stdout": self.stdout, "stderr": self.stderr, "truncated": truncated}
            raise error
        return CommandResult(self.stdout, self.stderr, exit_code, truncated)

    def execution(self) -> Execution:
        """After the result."""
        if self.result is None:
            raise Conflict("The code was not followed to its end")
        found = execution_of(self.result)
        logs = Logs([self.stdout] if self.stdout else [], [self.stderr] if self.stderr else [])
        return replace(found, logs=logs) if logs != Logs() else found

    @staticmethod
    def _messages(kind: str, text: str) -> list[OutputMessage]:
        return [OutputMessage(text, kind == "stderr")] if text else []
