"""`forkd eval`: Python in a sandbox's warmed interpreter."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import Any

from forkd.cli.arguments import add_daemon_options, add_duration
from forkd.cli.connect import connect
from forkd.cli.guest_command import show_output
from forkd.cli.output import print_json, render_plain
from forkd.cli.sandboxes import add_sandbox, resolve
from forkd.errors import InvalidInput

_MAX_CODE_BYTES = 1 << 20
_TIMEOUT_S = 60.0


def add_eval(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Evaluate Python in a sandbox's warmed interpreter and print the value. Exits with 1 when it raises."
    )
    add_sandbox(parser)
    parser.add_argument("code", metavar="CODE", help="the code, or - for standard input")
    add_duration(parser, "--timeout", "how long it may take, such as 30s or 5m (default 60)", _TIMEOUT_S)
    add_daemon_options(parser, json="print one JSON object")


def run_eval(args: argparse.Namespace) -> int:
    code = _read_code() if args.code == "-" else args.code
    with connect(args) as controller:
        sandbox_id = resolve(controller, args.sandbox)
        if args.json:
            answer = controller.eval_code(sandbox_id, code, args.timeout)
            print_json(answer)
            return answer["exit_code"]
        with closing(controller.eval_stream(sandbox_id, code, args.timeout)) as events:
            for event in events:
                if not show_output(event) and event.kind == "result":
                    return _show_result(event.body)
    raise AssertionError("a stream ends with a result, or raises")


def _show_result(result: dict[str, Any]) -> int:
    if result.get("error") is None:
        if result.get("result") not in (None, "None"):  # as a Python prompt does
            print(_render_lines(result["result"]))
        return 0
    print(_render_lines((result.get("traceback") or result["error"]).rstrip("\n")), file=sys.stderr)
    return 1


def _render_lines(text: str) -> str:
    return "\n".join(map(render_plain, text.split("\n")))


def _read_code() -> str:
    """At most one byte more than the daemon takes: enough for it to refuse."""
    try:
        return sys.stdin.buffer.read(_MAX_CODE_BYTES + 1).decode()
    except UnicodeDecodeError:
        raise InvalidInput("Standard input is not UTF-8 text", hint="forkd eval takes Python code") from None
