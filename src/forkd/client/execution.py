"""What came of a piece of Python code, in E2B's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forkd.errors import ForkdError, InvalidInput

_NONE = repr(None)


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
        raise InvalidInput(f"The value is not one that JSON has: {shown[:200]}", hint="eval() gives its repr")
    return body.get("value")
