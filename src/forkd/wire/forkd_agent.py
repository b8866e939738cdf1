"""forkd's own guest protocol, which its Python SDK speaks to a sandbox: one line of JSON each way.

Clients decide by the presence of keys: an answer to `eval` fails by having `error`, one to `exec` by having it without
`stdout`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forkd.errors import InvalidInput
from forkd.wire.json_pieces import render_pieces

MAX_LINE_BYTES = 1024 * 1024
DEFAULT_EXEC_S = 30.0
MAX_EXEC_S = 86_400.0
NOT_INSTALLED = "not-installed"


@dataclass(frozen=True)
class Ping:
    pass


@dataclass(frozen=True)
class Exec:
    args: list[str]
    timeout_s: float


@dataclass(frozen=True)
class Eval:
    code: str


def parse_request(line: bytes) -> Ping | Exec | Eval:
    request = _parse_object(line)
    action = request.get("action")
    if action == "ping":
        return Ping()
    if action == "exec":
        return Exec(_parse_args(request.get("args")), _parse_timeout(request.get("timeout")))
    if action == "eval":
        code = request.get("code")
        if not isinstance(code, str):
            raise InvalidInput("The field code of an eval is a text")
        return Eval(code)
    raise InvalidInput(f"Unknown action {ascii(action)[:70]}", hint="Actions are ping, exec and eval")


def render_pong(numpy_version: str, pid: int) -> bytes:
    return _render(
        {
            "pong": True,
            "numpy_version": numpy_version,
            "pid": pid,
            "agent_lang": "python",
            "warmup_ready": True,
        }
    )


def render_exec(stdout: bytes, stderr: bytes, exit_code: int, *, truncated: bool = False) -> Iterator[bytes]:
    """In pieces, as it can be large. `exit_code` is negative for a signal. Bytes that are not UTF-8 become U+FFFD."""
    reply: dict[str, Any] = {"stdout": stdout, "stderr": stderr, "exit_code": exit_code}
    if truncated:
        reply["truncated"] = True
    return render_pieces(reply, end=b"\n")


def render_eval(result: str) -> bytes:
    return _render({"result": result, "exit_code": 0})


def render_failure(kind: str, message: str, trace: str = "") -> bytes:
    """Any action that failed. Some clients show `traceback`, so the key is always there."""
    return _render({"error": f"{kind}: {message}", "traceback": trace, "exit_code": 1})


def _render(reply: dict[str, Any]) -> bytes:
    return json.dumps(reply).encode() + b"\n"


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict):
        raise InvalidInput("A request is one line with a JSON object")
    return request


def _parse_args(args: object) -> list[str]:
    if not isinstance(args, list) or not args or not all(isinstance(arg, str) for arg in args):
        raise InvalidInput("The field args of an exec is a list of texts, not empty")
    return args


def _parse_timeout(timeout: object) -> float:
    if timeout is None:
        return DEFAULT_EXEC_S
    # NaN fails the comparison, and JSON's numbers have no upper end.
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= MAX_EXEC_S:
        raise InvalidInput(f"The field timeout of an exec is a number of seconds up to {MAX_EXEC_S:.0f}")
    return float(timeout)
