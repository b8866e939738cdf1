"""Commands and code in a sandbox: exec, eval, and processes that outlive the request that started them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forkd.client.call import Again, Call, as_json, as_nothing, drop_unset, query_of
from forkd.errors import InvalidInput
from forkd.wire.api import EvalResponse, ExecResponse, ProcessInfo

MAX_TIMEOUT_S = 86400.0  # what the daemon takes
_READ_INPUT_S = 90.0  # what a program is given to read what is written to it


@dataclass(frozen=True)
class Command:
    """What to run: `args`, or `shell` for one text given to /bin/sh."""

    args: Sequence[str] | None = None
    shell: str | None = None
    timeout_secs: float | None = None
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    user: str | int | None = None
    stdin: str | bool | None = None
    pty: tuple[int, int] | None = None  # rows, columns


def render_command(command: Command) -> dict[str, Any]:
    if isinstance(command.args, str):
        # Otherwise every letter would be an argument.
        raise InvalidInput("args is a list of texts", hint='Use shell="…" for a line of shell')
    if (command.args is None) == (command.shell is None):
        raise InvalidInput("A command is either args or shell")
    pty = None if command.pty is None else {"rows": command.pty[0], "cols": command.pty[1]}
    return drop_unset(
        args=None if command.args is None else list(command.args),
        shell=command.shell,
        timeout_secs=command.timeout_secs,
        cwd=command.cwd,
        env=dict(command.env) if command.env else None,
        user=command.user,
        stdin=command.stdin or None,
        pty=pty,
    )


def exec_command(sandbox_id: str, command: Command) -> Call[ExecResponse]:
    return Call(
        "POST",
        _at(sandbox_id, "exec"),
        as_json,
        body=render_command(command),
        takes_s=command.timeout_secs or 0.0,
    )


def exec_stream(sandbox_id: str, command: Command) -> Call[None]:
    return Call("POST", _at(sandbox_id, "exec", "stream"), as_nothing, body=render_command(command))


def eval_code(sandbox_id: str, code: str, timeout_secs: float) -> Call[EvalResponse]:
    return Call("POST", _at(sandbox_id, "eval"), as_json, body=_code(code, timeout_secs), takes_s=timeout_secs)


def eval_stream(sandbox_id: str, code: str, timeout_secs: float) -> Call[None]:
    return Call("POST", _at(sandbox_id, "eval", "stream"), as_nothing, body=_code(code, timeout_secs))


def _code(code: str, timeout_secs: float) -> dict[str, Any]:
    return {"code": code, "timeout_secs": timeout_secs}


def start_process(sandbox_id: str, command: Command) -> Call[ProcessInfo]:
    return Call("POST", _at(sandbox_id, "processes"), as_json, body=render_command(command))


def list_processes(sandbox_id: str) -> Call[list[ProcessInfo]]:
    return Call("GET", _at(sandbox_id, "processes"), as_json, again=Again.SAFE)


def get_process(sandbox_id: str, pid: int) -> Call[ProcessInfo]:
    return Call("GET", _at(sandbox_id, "processes", str(pid)), as_json, again=Again.SAFE)


def process_output(sandbox_id: str, pid: int) -> Call[None]:
    return Call("GET", _at(sandbox_id, "processes", str(pid), "output"), as_nothing, again=Again.SAFE)


def write_stdin(sandbox_id: str, pid: int, data: bytes, eof: bool) -> Call[None]:
    query = query_of(eof="true" if eof else None)
    parts = _at(sandbox_id, "processes", str(pid), "stdin")
    return Call("POST", parts, as_nothing, query=query, content=data, takes_s=_READ_INPUT_S)


def signal_process(sandbox_id: str, pid: int, signal: int) -> Call[None]:
    return Call("POST", _at(sandbox_id, "processes", str(pid), "signal"), as_nothing, body={"signal": int(signal)})


def resize_process(sandbox_id: str, pid: int, rows: int, cols: int) -> Call[None]:
    body = {"rows": rows, "cols": cols}
    return Call("POST", _at(sandbox_id, "processes", str(pid), "resize"), as_nothing, body=body, again=Again.SAFE)


def _at(sandbox_id: str, *rest: str) -> tuple[str, ...]:
    return ("v1", "sandboxes", sandbox_id, *rest)
