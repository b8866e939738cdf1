"""`forkd exec`, `shell`, `eval`: a command or Python in a sandbox, its output as it comes, its exit code as ours."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from forkd.cli.arguments import add_daemon_options, add_pairs, parse_environment
from forkd.cli.connect import connect
from forkd.cli.output import note, print_json, render_plain
from forkd.cli.sandboxes import add_sandbox, resolve
from forkd.errors import CommandNotStarted, GuestTimeout, InvalidInput

if TYPE_CHECKING:
    from forkd.client import Controller, StreamEvent

# The longest the daemon allows.
_MAX_TIMEOUT_S = 86400.0
_SHELL = "if command -v bash >/dev/null; then exec bash -l; fi; exec sh -l"
_SIGNALLED = 128
_FORM = "Write: forkd exec SANDBOX -- COMMAND"
_MAX_CODE_BYTES = 1 << 20


def add_exec(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run a command in a sandbox. Exits with its exit code, or 128 + N when signal N ended it."
    parser.usage = "forkd exec [OPTION ...] SANDBOX [OPTION ...] [--] COMMAND ..."
    _add_options(parser)
    # One argument for all: argparse would take a `--` behind the sandbox for its own.
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="SANDBOX", help="an id, or the beginning of one; then the command"
    )


def run_exec(args: argparse.Namespace) -> int:
    parse_rest(args)
    if args.json and (args.interactive or args.tty):
        raise InvalidInput(
            "--json prints the whole output at the end, and cannot be combined with -i or -t", hint="Leave --json out"
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


def add_shell(parser: argparse.ArgumentParser) -> None:
    parser.description = "Open a shell in a sandbox: bash, or sh."
    add_sandbox(parser)
    _add_place(parser)
    add_daemon_options(parser, json=None)


def run_shell(args: argparse.Namespace) -> int:
    if not sys.stdin.isatty():
        raise InvalidInput(
            "A shell needs a terminal, and standard input is not one",
            hint="To pipe commands into a shell: forkd exec -i SANDBOX -- sh",
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
    from forkd.cli.terminal import attached, read_size

    if args.tty and args.interactive and not sys.stdin.isatty():
        raise InvalidInput("-t needs a terminal, and standard input is not one", hint="Leave -t out")
    place = _place(args)
    size = None
    if args.tty:
        size = read_size()
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
        if not _show_output(event) and event.kind == "exit":
            return read_exit(event.body, timeout_s)
    raise AssertionError("a stream ends with an exit, or raises")


def _show_output(event: StreamEvent) -> bool:
    """Prints output, or a note on output that was lost. False: it is another kind of event."""
    if event.kind in ("stdout", "stderr"):
        output = sys.stdout.buffer if event.kind == "stdout" else sys.stderr.buffer
        output.write(event.data)
        output.flush()
        return True
    if event.kind == "gap":
        note(f"forkd: {event.body.get('bytes')} bytes of output came too fast and are lost")
        return True
    return False


def read_exit(body: dict[str, Any], timeout_s: float | None) -> int:
    if body.get("timed_out"):
        limit = f" {timeout_s:g} s" if timeout_s else " its time"
        raise GuestTimeout(f"The command did not end within{limit} and was killed", hint="Allow more with --timeout")
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
        "--timeout", type=float, metavar="S", help="kill it after so many seconds (default: a day; none with -i or -t)"
    )
    _add_place(parser)
    add_daemon_options(parser, json="print one JSON object at the end")


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-w", "--workdir", metavar="DIR", help="the directory to run it in")
    add_pairs(parser, "-e", "--env", about="a variable for it; a KEY alone takes the value it has here")
    parser.add_argument("-u", "--user", metavar="USER", help="the user to run it as (default root)")


def add_eval(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Evaluate Python in a sandbox's warmed interpreter and print the value. Exits with 1 when it raises."
    )
    add_sandbox(parser)
    parser.add_argument("code", metavar="CODE", help="the code, or - for standard input")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds it may take (default 60)")
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
                if not _show_output(event) and event.kind == "result":
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
