"""What came of a call to the agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forkd.errors import ProtocolError
from forkd.guest.budget import Budget, Lease
from forkd.guest.exchange import get_flag, get_float, get_int, get_text, parse_object
from forkd.wire.agent import MAX_MESSAGE, STDERR, STDOUT, TIMED_OUT


@dataclass(frozen=True)
class AgentInfo:
    agent: str
    protocol: int
    python: str
    pid: int
    interpreter_pid: int
    uptime_s: float
    streams: int


@dataclass(frozen=True)
class EvalError:
    """An exception of user code, or the end of the interpreter it ran in (`InterpreterDied`)."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class EvalResult:
    """`value` is what JSON makes of the last expression's value, when it is small enough (`has_value`)."""

    repr: str | None
    truncated: bool
    has_value: bool
    value: Any
    error: EvalError | None
    stdout: bytes
    stderr: bytes
    output_truncated: bool
    timed_out: bool
    interpreter_restarted: bool
    signal: int | None
    exit_code: int | None
    lease: Lease | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True)
class CommandResult:
    """Exactly one of `exit_code` and `signal` is set. `lease` counts its output as kept while this exists."""

    pid: int
    exit_code: int | None
    signal: int | None
    timed_out: bool
    stdout: bytes
    stderr: bytes
    output_truncated: bool
    lease: Lease | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def returncode(self) -> int:
        """In one number, as in subprocess: negative for a signal."""
        return self.exit_code if self.exit_code is not None else -(self.signal or 0)


class Collected:
    """Output, kept up to a limit per kind and as far as the budget allows; the rest is counted as gone."""

    def __init__(self, limit_bytes: int, budget: Budget) -> None:
        self.lease = Lease(budget)
        self._limit = limit_bytes
        self._kept = {STDOUT: bytearray(), STDERR: bytearray()}
        self._cut: set[int] = set()  # of these no more is kept: a text with a hole in it would look whole

    @property
    def truncated(self) -> bool:
        return bool(self._cut)

    def add(self, flags: int, data: bytes) -> None:
        kept = self._kept[output_kind(flags)]
        room = 0 if flags in self._cut else self.lease.take(min(len(data), self._limit - len(kept)))
        if room < len(data):
            self._cut.add(flags)
            data = data[:room]
        kept += data

    @property
    def stdout(self) -> bytes:
        return bytes(self._kept[STDOUT])

    @property
    def stderr(self) -> bytes:
        return bytes(self._kept[STDERR])


def output_kind(flags: int) -> int:
    """STDOUT or STDERR."""
    if flags not in (STDOUT, STDERR):
        raise ProtocolError("The guest sent output that is neither stdout nor stderr")
    return flags


def parse_info(answer: dict[str, Any]) -> AgentInfo:
    return AgentInfo(
        agent=get_text(answer, "agent", 100),
        protocol=get_int(answer, "protocol"),
        python=get_text(answer, "python", 100),
        pid=get_int(answer, "pid"),
        interpreter_pid=get_int(answer, "interpreter_pid"),
        uptime_s=get_float(answer, "uptime_s"),
        streams=get_int(answer, "streams"),
    )


def parse_eval(flags: int, payload: bytes, output: Collected) -> EvalResult:
    answer = parse_object(payload)
    error = None if get_flag(answer, "ok") else _parse_error(answer.get("error"))
    died = answer.get("died")
    signal, exit_code = _parse_death(died)
    return EvalResult(
        repr=get_text(answer, "repr", MAX_MESSAGE) if error is None else None,
        truncated=get_flag(answer, "truncated"),
        has_value=error is None and "value" in answer,
        value=answer.get("value"),
        error=error,
        stdout=output.stdout,
        stderr=output.stderr,
        output_truncated=output.truncated,
        timed_out=bool(flags & TIMED_OUT),
        interpreter_restarted=died is not None,
        signal=signal,
        exit_code=exit_code,
        lease=output.lease,
    )


def parse_exit(answer: dict[str, Any]) -> tuple[int | None, int | None, bool]:
    """Exit code, signal, timed out."""
    signal, exit_code = _parse_death(answer)
    if (signal is None) == (exit_code is None):
        raise ProtocolError("The guest did not say how a command ended")
    return exit_code, signal, get_flag(answer, "timed_out")


def _parse_error(error: object) -> EvalError:
    if not isinstance(error, dict):
        raise ProtocolError("The guest reported a failure without an error")
    return EvalError(
        type=get_text(error, "type", 1000),
        message=get_text(error, "message", MAX_MESSAGE),
        traceback=get_text(error, "traceback", MAX_MESSAGE),
    )


def _parse_death(died: object) -> tuple[int | None, int | None]:
    if died is None:
        return None, None
    if not isinstance(died, dict):
        raise ProtocolError("The guest did not say how a process ended")
    signal = None if died.get("signal") is None else get_int(died, "signal", 1, 256)
    exit_code = None if died.get("exit_code") is None else get_int(died, "exit_code", 0, 256)
    return signal, exit_code
