"""`forkd exec` and `forkd shell`: a command in a sandbox, its output as it comes, its exit code as ours."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from forkd.cli.nouns import Nouns
from forkd.cli.output import show_output
from forkd.cli.pairs import parse_environment
from forkd.cli.reach import add_daemon_options, connect
from forkd.cli.sandbox_ids import add_sandbox, resolve
from forkd.cli.tables import print_json
from forkd.errors import CommandNotStarted, GuestTimeout, InvalidInput

if TYPE_CHECKING:
    from forkd.client.controller import Controller
    from forkd.client.stream import StreamEvent

# The most the daemon takes. A command of one's own may run for as long as one waits for it.
_MAX_TIMEOUT_S = 86400.0
_SHELL = "if command -v bash >/dev/null; then exec bash -l; fi; exec sh -l"
_SIGNALLED = 128
_FORM = "Write: forkd exec SANDBOX -- COMMAND"


def add_parser(nouns: Nouns[argparse.ArgumentParser]) -> None:
    parser = nouns.add_parser(
        "exec",
        help="run a command in a sandbox",
        description="Run a command in a sandbox. Exits with its code, or 128 and the number of the signal it died of.",
        usage="forkd exec [OPTION ...] SANDBOX [OPTION ...] [--] COMMAND ...",
    )
    _add_options(parser)
    # One argument for all: argparse would take a `--` behind the sandbox for its own.
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="SANDBOX", help="id, or the beginning of one; then the command"
    )
    parser.set_defaults(func=run)


def add_shell(nouns: Nouns[argparse.ArgumentParser]) -> None:
    about = "open a shell in a sandbox"
    parser = nouns.add_parser("shell", help=about, description="Open a shell in a sandbox: bash, or sh.")
    add_sandbox(parser)
    _add_place(parser)
    add_daemon_options(parser)
    parser.set_defaults(func=run_shell, json=False)


def run(args: argparse.Namespace) -> int:
    parse_rest(args)
    if args.json and (args.interactive or args.tty):
        raise InvalidInput(
            "--json gives the whole output at the end; it goes with neither -i nor -t", hint="Leave --json out"
        )
    with connect(args) as controller:
        sandbox_id = resolve(controller, args.sandbox)
        try:
            if args.json:
                return _run_whole(controller, sandbox_id, args)
            if not args.interactive and not args.tty:
                return _run_streamed(controller, sandbox_id, args)
            return _run_attached(controller, sandbox_id, args)
        except CommandNotStarted as error:
            error.hint = error.hint or f"Check {args.command[0]}, -w and -u; for shell syntax: sh -c '...'"
            raise


def run_shell(args: argparse.Namespace) -> int:
    if not sys.stdin.isatty():
        raise InvalidInput(
            "A shell needs a terminal, and standard input is none", hint="To feed one: forkd exec -i SANDBOX -- sh"
        )
    args.command, args.interactive, args.tty, args.timeout = ["/bin/sh", "-c", _SHELL], True, True, None
    with connect(args) as controller:
        return _run_attached(controller, resolve(controller, args.sandbox), args)


def parse_rest(args: argparse.Namespace) -> None:
    """Options may also stand between the sandbox and its command, which begins after `--` or where they end."""
    parser = argparse.ArgumentParser(prog="forkd exec", add_help=False, allow_abbrev=False)
    _add_options(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    if not args.words:
        raise InvalidInput("forkd exec needs a sandbox and a command", hint=_FORM)
    sandbox, *rest = args.words
    command: list[str] = []
    if rest and rest[0].startswith("-"):
        end = rest.index("--") if "--" in rest else len(rest)
        rest, command = rest[:end], rest[end + 1 :]
    parser.parse_args(rest, namespace=args)
    args.sandbox, args.command = sandbox, [*args.command, *command]
    if not args.command:
        raise InvalidInput("forkd exec needs a command", hint=_FORM)


def _run_whole(controller: Controller, sandbox_id: str, args: argparse.Namespace) -> int:
    timeout_s = args.timeout or _MAX_TIMEOUT_S
    done = controller.exec_command(sandbox_id, args.command, timeout_s, **_place(args))
    print_json(done)
    return _SIGNALLED - done["exit_code"] if done["exit_code"] < 0 else done["exit_code"]


def _run_streamed(controller: Controller, sandbox_id: str, args: argparse.Namespace) -> int:
    """The daemon ends the command when this connection goes, however it goes."""
    timeout_s = args.timeout or _MAX_TIMEOUT_S
    with closing(controller.exec_stream(sandbox_id, args.command, timeout_s, **_place(args))) as events:
        return copy_output(events, timeout_s)


def _run_attached(controller: Controller, sandbox_id: str, args: argparse.Namespace) -> int:
    from forkd.cli.terminal import attached

    if args.tty and args.interactive and not sys.stdin.isatty():
        raise InvalidInput("-t is for a terminal, and standard input is none", hint="Leave -t out")
    place = _place(args)
    size = None
    if args.tty:
        columns, rows = shutil.get_terminal_size()
        size = (rows, columns)
        place["env"] = {"TERM": os.environ.get("TERM", "xterm"), **place["env"]}

    def start() -> int:
        info = controller.start_process(
            sandbox_id, args.command, stdin=args.interactive, pty=size, timeout_secs=args.timeout, **place
        )
        return info["pid"]

    with attached(controller, sandbox_id, start, stdin=args.interactive, tty=args.tty) as pid:
        with closing(controller.process_output(sandbox_id, pid)) as events:
            return copy_output(events, args.timeout)


def copy_output(events: Iterable[StreamEvent], timeout_s: float | None) -> int:
    """To our own standard output and error, as it comes; returns what to exit with."""
    for event in events:
        if not show_output(event) and event.kind == "exit":
            return read_exit(event.body, timeout_s)
    raise AssertionError("a stream ends with an exit, or raises")


def read_exit(body: dict[str, Any], timeout_s: float | None) -> int:
    if body.get("timed_out"):
        limit = f" {timeout_s:g} s" if timeout_s else " its time"
        raise GuestTimeout(f"The command did not end within{limit} and was killed", hint="Give it more with --timeout")
    if body.get("signal"):
        return _SIGNALLED + int(body["signal"])
    code = int(body.get("exit_code") or 0)
    return _SIGNALLED - code if code < 0 else code


def _place(args: argparse.Namespace) -> dict[str, Any]:
    return {"cwd": args.workdir, "env": parse_environment(args.env), "user": args.user}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--interactive", action="store_true", help="pass standard input on")
    parser.add_argument("-t", "--tty", action="store_true", help="give it a terminal")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="kill it after so long (default: a day, with -i and -t never)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    _add_place(parser)
    add_daemon_options(parser)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-w", "--workdir", metavar="DIR", help="where to run it")
    parser.add_argument(
        "-e", "--env", action="append", default=[], metavar="K=V", help="a variable for it; K alone takes yours along"
    )
    parser.add_argument("-u", "--user", metavar="USER", help="who to run it as (default root)")
