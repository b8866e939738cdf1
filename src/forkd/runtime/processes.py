"""Commands in one sandbox that outlive the request that started them, and what is kept of their output.

One task per command reads its output as fast as the guest sends it, with or without followers: the last mebibyte
is kept, followers each have a position of their own, and one that falls behind is told how much it missed.
"""

from __future__ import annotations

import asyncio
import bisect
import copy
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from forkd.errors import AgentError, Conflict, ForkdError, GuestTimeout, InvalidInput, NoCapacity, NotFound, NotRunning
from forkd.guest.agent import Agent
from forkd.guest.process import Process, render_size

KEPT_BYTES = 1024 * 1024  # of each command's output
MAX_RUNNING = 40  # the agent takes 64 exchanges in all; files, exec and eval want some too
MAX_ENDED = 64
MAX_ENDED_BYTES = 8 * 1024 * 1024  # output of all ended ones together
FORGET_S = 60.0  # after its end
WRITE_S = 60.0  # for a program to read what is written to it
MAX_SIGNAL = 64
_PIECE_BYTES = 16 * 1024
_MAX_PIECES = 4096  # programs that write single bytes to two streams in turn

Kind = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class CommandSpec:
    """A text is for the shell, a list is executed as it is; `pty` is (rows, columns)."""

    command: str | list[str]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    user: str | int | None = None
    pty: tuple[int, int] | None = None
    stdin: bool = False
    timeout_s: float | None = None


@dataclass(frozen=True)
class Output:
    kind: Kind
    data: bytes


@dataclass(frozen=True)
class Gap:
    """So many bytes of output were dropped before this follower read them."""

    bytes: int


@dataclass(frozen=True)
class Exit:
    """`exit_code` or `signal` is set."""

    exit_code: int | None
    signal: int | None
    timed_out: bool


class GuestProcess:
    def __init__(self, process: Process, spec: CommandSpec, on_end: Callable[[GuestProcess], None]) -> None:
        self.pid = process.pid
        self.spec = spec
        self.started_at_unix = time.time()
        self.exit: Exit | None = None
        self._process = process
        self._error: ForkdError | None = None
        self._kept = KeptOutput(KEPT_BYTES)
        self._followers: set[asyncio.Event] = set()
        self._writing = asyncio.Lock()
        self._stdin_closed = not spec.stdin and spec.pty is None
        self._on_end = on_end
        self._task = asyncio.create_task(self._read(), name=f"command {self.pid}")

    @property
    def running(self) -> bool:
        return self.exit is None and self._error is None

    @property
    def kept_bytes(self) -> int:
        return self._kept.size_bytes

    async def follow(self) -> AsyncIterator[Output | Gap | Exit]:
        """The kept output, then new output, then the exit. Raises the error that ended the command early."""
        position = 0
        arrived = asyncio.Event()
        self._followers.add(arrived)
        try:
            while True:
                arrived.clear()
                while (found := self._kept.read(position)) is not None:
                    item, position = found
                    yield item
                if self.exit is not None:
                    yield self.exit
                    return
                if self._error is not None:
                    # A copy, as each raise adds to an error's traceback.
                    raise copy.copy(self._error) from self._error
                await arrived.wait()
        finally:
            self._followers.discard(arrived)

    async def write(self, data: bytes) -> None:
        """As fast as the program reads, one writer after the other."""
        try:
            async with asyncio.timeout(WRITE_S), self._writing:
                self._check_stdin()
                await self._process.write_stdin(data)
        except TimeoutError:
            raise GuestTimeout(f"Command {self.pid} did not read its input within {WRITE_S:g} s") from None

    def close_stdin(self) -> None:
        if not self._stdin_closed:
            self._stdin_closed = True
            self._process.close_stdin()

    def signal(self, number: int) -> None:
        """To the whole process group."""
        if not 1 <= number <= MAX_SIGNAL:
            raise InvalidInput(f"{number} is not a signal", hint=f"Signals are 1 to {MAX_SIGNAL}, as in kill(1)")
        self._check_running()
        self._process.signal(number)

    def resize(self, rows: int, cols: int) -> None:
        render_size(rows, cols)
        if self.spec.pty is None:
            raise InvalidInput(f"Command {self.pid} has no terminal", hint="Start it with pty")
        self._check_running()
        self._process.resize(rows, cols)

    def close(self) -> None:
        """Give it up: the agent kills it, if there still is one, and followers get an error."""
        if self.running:
            self._error = AgentError(f"Command {self.pid} was given up")
            self._process.abandon()  # which ends the task: its output is over

    def _check_stdin(self) -> None:
        self._check_running()
        if self._stdin_closed:
            raise Conflict(f"The input of command {self.pid} is closed", hint="Start it with stdin to write to it")

    def _check_running(self) -> None:
        if not self.running:
            raise Conflict(f"Command {self.pid} has ended")

    async def _read(self) -> None:
        try:
            async with self._process as process:
                async for kind, data in process:
                    self._kept.add("stdout" if kind == "stdout" else "stderr", data)
                    self._wake()
                result = await process.wait()
                self.exit = Exit(result.exit_code, result.signal, result.timed_out)
        except ForkdError as error:
            self._error = self._error or error
        finally:
            self.close()
            self._wake()
            self._on_end(self)

    def _wake(self) -> None:
        for arrived in self._followers:
            arrived.set()


class Processes:
    """`agent` gives the sandbox's agent of the moment; it is asked at each start."""

    def __init__(self, agent: Callable[[], Agent]) -> None:
        self._agent = agent
        self._commands: dict[int, GuestProcess] = {}
        self._starting = 0
        self._forgetting: dict[GuestProcess, asyncio.TimerHandle] = {}  # the ended ones, oldest first
        self._closed = False

    async def start(self, spec: CommandSpec) -> GuestProcess:
        """Returns when it runs; CommandNotStarted when it cannot."""
        self._check_open()
        if self._count_running() + self._starting >= MAX_RUNNING:
            raise NoCapacity(
                f"{MAX_RUNNING} commands run in this sandbox already", hint="Wait for one to end, or end one"
            )
        self._starting += 1
        try:
            process = await self._agent().start(
                spec.command,
                cwd=spec.cwd,
                env=spec.env,
                user=spec.user,
                pty=spec.pty,
                stdin=spec.stdin,
                timeout_s=spec.timeout_s,
            )
        finally:
            self._starting -= 1
        return self._adopt(process, spec)

    def list(self) -> list[GuestProcess]:
        """Running ones and those that ended lately, oldest first."""
        return list(self._commands.values())

    def get(self, pid: int) -> GuestProcess:
        found = self._commands.get(pid)
        if found is None:
            raise NotFound(
                f"No command {pid} was started here",
                hint=f"Those that ended are forgotten after {FORGET_S:.0f} s, earlier when there are many",
            )
        return found

    def close(self) -> None:
        self._closed = True
        for command in self._commands.values():
            command.close()
        for timer in self._forgetting.values():
            timer.cancel()
        self._commands.clear()
        self._forgetting.clear()

    def _adopt(self, process: Process, spec: CommandSpec) -> GuestProcess:
        try:
            self._check_open()
            before = self._commands.get(process.pid)
            if before is not None and before.running:
                raise AgentError(f"The guest says it started command {process.pid}, which runs already")
        except ForkdError:
            process.abandon()
            raise
        if before is not None:
            self._forget(before)
        command = self._commands[process.pid] = GuestProcess(process, spec, self._on_end)
        return command

    def _check_open(self) -> None:
        if self._closed:
            raise NotRunning("The sandbox is being removed")

    def _count_running(self) -> int:
        return len(self._commands) - len(self._forgetting)

    def _on_end(self, command: GuestProcess) -> None:
        if self._closed:
            return
        self._forgetting[command] = asyncio.get_running_loop().call_later(FORGET_S, self._forget, command)
        while len(self._forgetting) > 1 and (
            len(self._forgetting) > MAX_ENDED or sum(ended.kept_bytes for ended in self._forgetting) > MAX_ENDED_BYTES
        ):
            self._forget(next(iter(self._forgetting)))

    def _forget(self, command: GuestProcess) -> None:
        self._forgetting.pop(command).cancel()
        if self._commands.get(command.pid) is command:
            del self._commands[command.pid]


@dataclass(slots=True)
class _Piece:
    kind: Kind
    start: int  # how much output there was before it
    data: bytearray

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class KeptOutput:
    """The end of a stream of output, of bounded size. Positions count its bytes from the very first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._pieces: list[_Piece] = []
        self._end = 0

    @property
    def size_bytes(self) -> int:
        return self._end - self._start

    @property
    def _start(self) -> int:
        return self._pieces[0].start if self._pieces else self._end

    def add(self, kind: Kind, data: bytes) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.kind == kind and len(last.data) + len(data) <= _PIECE_BYTES:
            last.data += data
        elif data:
            self._pieces.append(_Piece(kind, self._end, bytearray(data)))
        self._end += len(data)
        self._trim()

    def read(self, position: int) -> tuple[Output | Gap, int] | None:
        """What stands at `position`, and the position behind it; None at the end."""
        if position >= self._end:
            return None
        if position < self._start:
            return Gap(self._start - position), self._start
        index = bisect.bisect_right(self._pieces, position, key=lambda piece: piece.start) - 1
        piece = self._pieces[index]
        return Output(piece.kind, bytes(piece.data[position - piece.start :])), piece.end

    def _trim(self) -> None:
        surplus = max(0, len(self._pieces) - _MAX_PIECES)
        floor = self._end - self._limit
        while surplus < len(self._pieces) and self._pieces[surplus].end <= floor:
            surplus += 1
        del self._pieces[:surplus]
        if self._pieces and self._pieces[0].start < floor:
            head = self._pieces[0]
            del head.data[: floor - head.start]
            head.start = floor
