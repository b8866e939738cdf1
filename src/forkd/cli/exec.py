"""`forkd exec`, `shell`: a command in a sandbox, its output as it comes, its exit code as ours."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from forkd.cli.arguments import add_daemon_options, add_duration
from forkd.cli.connect import connect
from forkd.cli.guest_command import (
    add_place,
    add_streams,
    add_words,
    check_streams,
    parse_words,
    render_place,
    run_attached,
    run_command,
)
from forkd.cli.output import note, show
from forkd.cli.sandboxes import add_sandbox, resolve
from forkd.errors import InvalidInput

if TYPE_CHECKING:
    from forkd.client import Controller

_SHELL = "if command -v bash >/dev/null; then exec bash -l; fi; exec sh -l"


def add_exec(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a command in a sandbox. Exits with its exit code, or 128 + N when signal N ended it; with 124 when its "
        "time is over, 125 when forkd failed, 126 when the command cannot be executed and 127 when it is not found."
    )
    _add_options(parser)
    add_words(parser, "SANDBOX", "a name, an id, or the beginning of one")


def run_exec(args: argparse.Namespace) -> int:
    parse_rest(args)
    check_streams(args)
    if args.detach and (args.interactive or args.tty):
        raise InvalidInput("-d cannot be combined with -i or -t", hint="Leave -d out to stay attached to it")
    with connect(args) as controller:
        sandbox_id = resolve(controller, args.sandbox)
        return _detach(controller, sandbox_id, args) if args.detach else run_command(controller, sandbox_id, args)


def parse_rest(args: argparse.Namespace) -> None:
    args.sandbox = parse_words(args, "forkd exec", "SANDBOX", _add_options)


def _detach(controller: Controller, sandbox_id: str, args: argparse.Namespace) -> int:
    info = controller.start_process(sandbox_id, args.command, timeout_secs=args.timeout, **render_place(args))
    if not args.json:
        note(f"forkd: it runs; its output: forkd logs {sandbox_id} --pid {info['pid']}")
    return show(args, info, lambda info: print(info["pid"]))


def add_shell(parser: argparse.ArgumentParser) -> None:
    parser.description = "Open a shell in a sandbox: bash, or sh."
    add_sandbox(parser)
    add_place(parser)
    add_daemon_options(parser, json=None)


def run_shell(args: argparse.Namespace) -> int:
    if not sys.stdin.isatty():
        raise InvalidInput(
            "A shell needs a terminal, and standard input is not one",
            hint="To pipe commands into a shell: forkd exec -i SANDBOX -- sh",
        )
    args.command, args.interactive, args.tty, args.timeout = ["/bin/sh", "-c", _SHELL], True, True, None
    with connect(args) as controller:
        return run_attached(controller, resolve(controller, args.sandbox), args)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_streams(parser)
    parser.add_argument("-d", "--detach", action="store_true", help="start it, print its pid, and do not wait for it")
    add_duration(parser, "--timeout", "kill it after this time, such as 30s or 5m (default 1d; none with -i, -t or -d)")
    add_place(parser)
    add_daemon_options(parser, json="print one JSON object at the end")
