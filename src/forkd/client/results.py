"""What calls come to: commands, pieces of Python code, files and processes, in E2B's shapes."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from forkd.errors import ForkdError, InvalidInput
from forkd.wire.api import ExecResponse, FileWritten

_NONE = repr(None)


@dataclass(frozen=True)
class CommandResult:
    stdout: str
    stderr: str
    exit_code: int  # negative: killed by that signal
    truncated: bool = False  # more was written than is kept

    def check(self) -> Self:
        if self.exit_code != 0:
            raise CommandFailed(self)
        return self


class CommandFailed(ForkdError):
    """A command that ended with another exit code than 0, where `check=True` asked for an error."""

    code = "command_failed"

    def __init__(self, result: CommandResult) -> None:
        ended = f"by signal {-result.exit_code}" if result.exit_code < 0 else f"with exit code {result.exit_code}"
        last = result.stderr.strip().splitlines()[-1:]
        super().__init__(f"The command ended {ended}" + (f": {last[0][:200]}" if last else ""), details=result.stderr)
        self.result = result


def result_of(answer: ExecResponse) -> CommandResult:
    return CommandResult(answer["stdout"], answer["stderr"], answer["exit_code"], bool(answer.get("truncated")))


@dataclass(frozen=True)
class ExecutionError:
    name: str  # the exception's type
    value: str
    traceback: str


@dataclass(frozen=True)
class Result:
    """The value of a last expression: its repr, and what JSON makes of it."""

    text: str
    json: Any = None
    is_main_result: bool = True

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Logs:
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Execution:
    results: list[Result]
    logs: Logs
    error: ExecutionError | None = None
    truncated: bool = False

    @property
    def text(self) -> str | None:
        return self.results[0].text if self.results else None


class EvalFailed(ForkdError, RuntimeError):
    """The code given to `eval` raised. `error` has the exception's name, value and traceback."""

    code = "eval_failed"

    def __init__(self, error: ExecutionError) -> None:
        super().__init__(f"{error.name}: {error.value}" if error.value else error.name, details=error.traceback or None)
        self.error = error


def execution_of(body: Mapping[str, Any]) -> Execution:
    """From the body of an eval. None is no result, as in a notebook: statements have it too."""
    shown = body.get("result")
    results = [] if shown in (None, _NONE) else [Result(str(shown), body.get("value"))]
    logs = Logs(*([text] if (text := body.get(name)) else [] for name in ("stdout", "stderr")))
    return Execution(results, logs, _error_of(body), bool(body.get("truncated")))


def _error_of(body: Mapping[str, Any]) -> ExecutionError | None:
    text = body.get("error")
    if text is None:
        return None
    name, _, value = str(text).partition(": ")
    return ExecutionError(name, value, body.get("traceback") or "")


def repr_of(body: Mapping[str, Any]) -> str:
    """What `eval` gives: the repr of a last expression, "None" when there is none."""
    if (error := _error_of(body)) is not None:
        raise EvalFailed(error)
    result = body.get("result")
    return _NONE if result is None else str(result)


def value_of(body: Mapping[str, Any]) -> Any:
    """What `eval_value` gives."""
    shown = repr_of(body)
    if shown != _NONE and not body.get("has_value"):
        raise InvalidInput(f"The value cannot be written as JSON: {shown[:200]}", hint="eval() gives its repr")
    return body.get("value")


@dataclass(frozen=True)
class _Body:
    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        return cls(**{name: body[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class EntryInfo(_Body):
    """A file or directory in a sandbox."""

    name: str
    path: str
    type: str  # file, dir, symlink, fifo, socket, char, block, unknown
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: str | None  # of a symlink


@dataclass(frozen=True)
class WriteInfo:
    """A file that was written."""

    name: str
    path: str
    size: int

    @classmethod
    def of(cls, body: FileWritten) -> Self:
        return cls(body["path"].rpartition("/")[2], body["path"], body["size"])


@dataclass(frozen=True)
class Skipped:
    """Something in a directory that was not copied with it: a device, a FIFO, a socket, a link that leads out."""

    path: str
    why: str


@dataclass(frozen=True)
class CopyInfo:
    """What was copied. Of links and directories nothing is counted."""

    files: int
    bytes: int
    skipped: list[Skipped] = field(default_factory=list)

    @classmethod
    def of(cls, files: int, size: int, skipped: Sequence[tuple[str, str]], source: str) -> Self:
        """`skipped` are names below the source."""
        return cls(files, size, [Skipped(posixpath.join(source, name), why) for name, why in skipped])


@dataclass(frozen=True)
class Process(_Body):
    """A command that was started in the background."""

    pid: int
    args: list[str] | None
    shell: str | None
    pty: bool
    running: bool
    exit_code: int | None
    signal: int | None
    timed_out: bool
    started_at_unix: float
