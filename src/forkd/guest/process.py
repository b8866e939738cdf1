"""A command in the guest, while it runs."""

from __future__ import annotations

import asyncio
import json
import signal as signals
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from forkd.errors import AgentError, ForkdError, GuestTimeout, InvalidInput, ProtocolError
from forkd.guest.channel import Channel
from forkd.guest.exchange import Exchange, get_int, parse_object
from forkd.guest.results import Collected, CommandResult, output_kind, parse_exit
from forkd.guest.unread import Unread
from forkd.model.names import check_env
from forkd.wire.agent import CONTROL, END, EXEC, STARTED, STDERR, STDOUT

START_S = 30.0
MAX_ARGUMENTS = 4096
MAX_ARGUMENTS_BYTES = 1024 * 1024


def render_exec(
    command: str | Sequence[str],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | int | None = None,
    pty: tuple[int, int] | None = None,
    stdin: bool = False,
    timeout_ms: int | None = None,
) -> dict[str, Any]:
    """The request for a command: a text is for the shell, a list is executed as it is. `pty` is (rows, columns)."""
    request: dict[str, Any] = {"stdin": stdin}
    texts = [command] if isinstance(command, str) else list(command)
    if not texts or not all(isinstance(text, str) for text in texts) or not texts[0]:
        raise InvalidInput("A command must be a text or a list of texts")
    if len(texts) > MAX_ARGUMENTS:
        raise InvalidInput(
            f"The command has {len(texts)} arguments, and may have {MAX_ARGUMENTS}", hint="Pass them in a file"
        )
    if any("\0" in text for text in texts):
        raise InvalidInput("A command must have no NUL")
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    if size > MAX_ARGUMENTS_BYTES:
        raise InvalidInput(
            f"The command has {size} bytes, and may have {MAX_ARGUMENTS_BYTES}",
            hint="Write large content to a file of the guest, or send it as stdin",
        )
    if isinstance(command, str):
        request["shell"] = command
    else:
        request["argv"] = texts
    if pty is not None:
        request["pty"] = render_size(*pty)
    optional = {"cwd": cwd, "user": user, "timeout_ms": timeout_ms, "env": check_env(env) if env else None}
    request.update({key: value for key, value in optional.items() if value is not None})
    return request


def render_size(rows: int, columns: int) -> dict[str, int]:
    if not (0 < rows < 10_000 and 0 < columns < 10_000):
        raise InvalidInput("A terminal has 1 to 9999 rows and columns")
    return {"rows": rows, "cols": columns}


class Process(Exchange):
    """Iterate over it for its output, as ("stdout" or "stderr", bytes); without a reader it waits.

    As a context manager it kills the command on the way out, unless it has ended.
    """

    def __init__(self, channel: Channel, request: dict[str, Any], deadline_s: float | None) -> None:
        self.pid = 0
        self._started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._output: Unread[int] = Unread()
        self._arrived: asyncio.Event = asyncio.Event()
        super().__init__(channel, "finish a command", EXEC, json.dumps(request).encode(), deadline_s)
        self._answer.add_done_callback(self._on_answered)

    async def started(self) -> int:
        """The pid, once the program runs; CommandNotStarted when it cannot."""
        try:
            async with asyncio.timeout(START_S):
                self.pid = await asyncio.shield(self._started)
        except TimeoutError:
            self.abandon()
            raise GuestTimeout(f"The guest did not start a command within {START_S:g} s") from None
        except asyncio.CancelledError:
            self.abandon()
            raise
        return self.pid

    async def write_stdin(self, data: bytes) -> None:
        """As fast as the program reads. What a program that has ended did not read is dropped."""
        await self.send_data(data)

    def close_stdin(self) -> None:
        self.send_control(END)

    @asynccontextmanager
    async def fed(self, data: bytes | None) -> AsyncIterator[None]:
        """Inside the block `data` is written as the program reads it, and its input then closed. None: neither."""
        if data is None:
            yield
            return
        feeding = asyncio.create_task(self._feed(data))
        try:
            yield
        finally:
            # What it failed of, if it did, ended the exchange too; and it would write on to a program that is gone.
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _feed(self, data: bytes) -> None:
        await self.write_stdin(data)
        self.close_stdin()

    def signal(self, number: int = signals.SIGTERM, *, group: bool = True) -> None:
        self._control({"signal": int(number), "group": group})

    def kill(self) -> None:
        self.signal(signals.SIGKILL)

    def resize(self, rows: int, columns: int) -> None:
        self._control(render_size(rows, columns))

    async def __aiter__(self) -> AsyncIterator[tuple[str, bytes]]:
        while True:
            while self._output:
                flags, data = self._output.take()
                self.acknowledge(len(data))
                yield ("stdout" if flags == STDOUT else "stderr"), data
            if self._answer.done():
                return
            self._arrived.clear()
            await self._arrived.wait()

    async def wait(self, *, max_output_bytes: int = 0) -> CommandResult:
        """Take the rest of the output, and say how the command ended."""
        output = Collected(max_output_bytes, self._channel.budget)
        async for kind, data in self:
            output.add(STDOUT if kind == "stdout" else STDERR, data)
        _, payload = await self.answer()
        exit_code, signal, timed_out = parse_exit(parse_object(payload))
        return CommandResult(
            pid=self.pid,
            exit_code=exit_code,
            signal=signal,
            timed_out=timed_out,
            stdout=output.stdout,
            stderr=output.stderr,
            output_truncated=output.truncated,
            lease=output.lease,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._answer.done():
            self.abandon()

    # For the channel

    def on_data(self, flags: int, payload: bytes) -> None:
        self._output.add(output_kind(flags), payload)
        self._arrived.set()

    def on_other(self, kind: int, payload: bytes) -> None:
        if kind != STARTED or self._started.done():
            super().on_other(kind, payload)
        self._started.set_result(get_int(parse_object(payload), "pid", 1, 1 << 31))

    def _control(self, request: dict[str, Any]) -> None:
        self.send_control(CONTROL, json.dumps(request).encode())

    def _on_answered(self, answer: asyncio.Future[tuple[int, bytes]]) -> None:
        self._arrived.set()
        if self._started.done():
            return
        given_up = AgentError("The command was given up")
        error: BaseException | None = given_up if answer.cancelled() else answer.exception()
        if not isinstance(error, ForkdError):
            error = ProtocolError("The guest ended a command that it never started")
        self._started.set_exception(error)
        self._started.exception()
