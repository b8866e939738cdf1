"""`forkd logs`: a sandbox's console, or the output of one of its processes."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

from forkd.cli.arguments import add_daemon_options
from forkd.cli.connect import connect
from forkd.cli.guest_command import show_output
from forkd.cli.output import note, print_json
from forkd.cli.sandboxes import add_sandbox, resolve
from forkd.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from forkd.client import Controller

_POLL_S = 0.5
# Enough to find our place again after the beginning of the console was dropped.
_ANCHOR = 4096


def add_logs(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show the last 1 MiB of what the guest wrote to its console."
    add_sandbox(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="show more until the sandbox ends")
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="the output of this process (forkd exec -d), until it ends"
    )
    add_daemon_options(parser, json="print one JSON object")


def run_logs(args: argparse.Namespace) -> int:
    if args.json and args.follow:
        raise InvalidInput("--json and --follow cannot be combined", hint="Leave one of them out")
    if args.json and args.pid is not None:
        raise InvalidInput("--json and --pid cannot be combined", hint="Leave --json out")
    with connect(args) as controller:
        sandbox_id = resolve(controller, args.sandbox)
        if args.pid is not None:
            _show_process(controller, sandbox_id, args.pid)
        elif args.json:
            print_json({"id": sandbox_id, "console": controller.sandbox_console(sandbox_id)})
        elif args.follow:
            _follow(controller, sandbox_id)
        else:
            _show_now(controller, sandbox_id)
    return 0


def _show_process(controller: Controller, sandbox_id: str, pid: int) -> None:
    with closing(controller.process_output(sandbox_id, pid)) as events:
        for event in events:
            show_output(event)


def _show_now(controller: Controller, sandbox_id: str) -> None:
    text = controller.sandbox_console(sandbox_id)
    _show(text)
    if not text:
        note(
            f"forkd: the console of {sandbox_id} is empty: a fork has no console output of its own until its kernel or"
            " a program writes to /dev/console. The output of a command: forkd exec, or forkd logs --pid"
        )


def _follow(controller: Controller, sandbox_id: str) -> None:
    seen = ""
    while True:
        try:
            # The state first: once the guest is known to be dead, the console has all of its last words.
            state = controller.get_sandbox(sandbox_id)["state"]
            text = controller.sandbox_console(sandbox_id)
        except NotFound:
            if not seen:
                raise
            return
        _show(find_news(seen, text))
        seen = text
        if state == "dead":
            return
        time.sleep(_POLL_S)


def find_news(seen: str, text: str) -> str:
    """The part of the text after what was seen. Its beginning may have been dropped since."""
    if text.startswith(seen):
        return text[len(seen) :]
    anchor = seen[-_ANCHOR:]
    at = text.rfind(anchor)
    return text if at < 0 else text[at + len(anchor) :]


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
