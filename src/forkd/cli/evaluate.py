"""`forkd eval`: Python in a sandbox's warmed interpreter."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import Any

from forkd.cli.nouns import Nouns
from forkd.cli.output import show_output
from forkd.cli.plain import render_plain
from forkd.cli.reach import add_daemon_options, connect
from forkd.cli.sandbox_ids import add_sandbox, resolve
from forkd.cli.tables import print_json
from forkd.errors import InvalidInput

_TIMEOUT_S = 60.0
_MAX_CODE_BYTES = 1 << 20


def add_parser(nouns: Nouns[argparse.ArgumentParser]) -> None:
    about = "evaluate Python in a sandbox's warmed interpreter"
    description = "Evaluate Python in a sandbox's warmed interpreter and print the value. Exits with 1 when it raises."
    parser = nouns.add_parser("eval", help=about, description=description)
    add_sandbox(parser)
    parser.add_argument("code", metavar="CODE", help="the code, or - for standard input")
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, metavar="S", help="seconds (default 60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_daemon_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
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
                    return _show(event.body)
    raise AssertionError("a stream ends with a result, or raises")


def _show(result: dict[str, Any]) -> int:
    if result.get("error") is None:
        if result.get("result") not in (None, "None"):  # as a Python prompt does
            print(render_lines(result["result"]))
        return 0
    print(render_lines((result.get("traceback") or result["error"]).rstrip("\n")), file=sys.stderr)
    return 1


def render_lines(text: str) -> str:
    return "\n".join(map(render_plain, text.split("\n")))


def _read_code() -> str:
    """One byte more than is taken is enough to be refused."""
    try:
        return sys.stdin.buffer.read(_MAX_CODE_BYTES + 1).decode()
    except UnicodeDecodeError:
        raise InvalidInput("Standard input is not UTF-8 text", hint="forkd eval takes Python code") from None
