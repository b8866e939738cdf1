"""A command in a sandbox: its words, its streams, how it ended. What `exec`, `shell` and `run` have in common."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from forkd.cli.arguments import add_pairs, parse_environment
from forkd.cli.output import note, print_json
from forkd.cli.parser import Parser, parse_into
from forkd.errors import CommandNotStarted, GuestTimeout, InvalidInput

if TYPE_CHECKING:
    from forkd.client import Controller, StreamEvent

# The longest the daemon allows.
MAX_TIMEOUT_S = 86400.0
_SIGNALLED = 128


def add_streams(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--interactive", action="store_true", help="pass standard input on")
    parser.add_argument("-t", "--tty", action="store_true", help="give it a terminal")


def add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-w", "--workdir", metavar="DIR", help="the directory to run it in")
    add_pairs(parser, "-e", "--env", about="a variable for it; a KEY alone takes the value it has here")
    parser.add_argument("-u", "--user", metavar="USER", help="the user to run it as (default root)")


def add_words(parser: argparse.ArgumentParser, first: str, about: str) -> None:
    """One argument for all: argparse would take a `--` behind the first word for its own."""
    parser.usage = f"{parser.prog} [OPTION ...] {first} [OPTION ...] [--] COMMAND ..."
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar=first, help=f"{about}; then the command")


def parse_words(
    args: argparse.Namespace,
    prog: str,
    first: str,
    add_options: Callable[[argparse.ArgumentParser], None],
    *,
    optional: bool = False,
) -> str:
    """The first word; the command goes to `args.command`, which is empty when it is `optional` and left out.

    Options may also stand between the two. The command begins after `--` or where they end.
    """
    form = f"Write: {prog} {first} -- COMMAND"
    if not args.words:
        raise InvalidInput(f"{prog} needs {first}{'' if optional else ' and a command'}", hint=form)
    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    add_options(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    word, *rest = args.words
    command: list[str] = []
    if rest and rest[0].startswith("-"):
        end = rest.index("--") if "--" in rest else len(rest)
        rest, command = rest[:end], rest[end + 1 :]
    parse_into(args, parser, rest)
    args.command = [*args.command, *command]
    if not args.command and not optional:
        raise InvalidInput(f"{prog} needs a command", hint=form)
    return str(word)


def check_streams(args: argparse.Namespace) -> None:
    if args.json and (args.interactive or args.tty):
        raise InvalidInput(
            "--json prints the whole output at the end, and cannot be combined with -i or -t", hint="Leave --json out"
        )
    if args.tty and args.interactive and not sys.stdin.isatty():
        raise InvalidInput("-t needs a terminal, and standard input is not one", hint="Leave -t out")


def run_command(controller: Controller, sandbox_id: str, args: argparse.Namespace) -> int:
    """Its exit code, or 128 + N when signal N ended it."""
    try:
        if args.json:
            return _run_whole(controller, sandbox_id, args)
        if not args.interactive and not args.tty:
            return _run_streamed(controller, sandbox_id, args)
        return run_attached(controller, sandbox_id, args)
    except CommandNotStarted as error:
        error.hint = error.hint or f"Check {args.command[0]}, -w and -u; for shell syntax: sh -c '...'"
        raise


def _run_whole(controller: Controller, sandbox_id: str, args: argparse.Namespace) -> int:
    done = controller.exec_command(sandbox_id, args.command, args.timeout or MAX_TIMEOUT_S, **render_place(args))
    print_json(done)
    return _SIGNALLED - done["exit_code"] if done["exit_code"] < 0 else done["exit_code"]


def _run_streamed(controller: Controller, sandbox_id: str, args: argparse.Namespace) -> int:
    """The daemon ends the command when this connection goes, however it goes."""
    timeout_s = args.timeout or MAX_TIMEOUT_S
    with closing(controller.exec_stream(sandbox_id, args.command, timeout_s, **render_place(args))) as events:
        return copy_output(events, timeout_s)


def run_attached(controller: Controller, sandbox_id: str, args: argparse.Namespace) -> int:
    from forkd.cli.terminal import attached, read_size

    place = render_place(args)
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
        if not show_output(event) and event.kind == "exit":
            return read_exit(event.body, timeout_s)
    raise AssertionError("a stream ends with an exit, or raises")


def show_output(event: StreamEvent) -> bool:
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


def render_place(args: argparse.Namespace) -> dict[str, Any]:
    """As arguments of the SDK's calls."""
    return {"cwd": args.workdir, "env": parse_environment(args.env), "user": args.user}
