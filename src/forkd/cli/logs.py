"""`forkd logs`: a sandbox's console."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from forkd.cli.nouns import Nouns
from forkd.cli.reach import add_daemon_options, connect
from forkd.cli.sandbox_ids import add_sandbox, resolve
from forkd.cli.tables import print_json
from forkd.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from forkd.client.controller import Controller

_POLL_S = 0.5
# Enough to recognise where we were, should the console's beginning have been dropped meanwhile.
_ANCHOR = 4096


def add_parser(nouns: Nouns[argparse.ArgumentParser]) -> None:
    about = "show a sandbox's console"
    parser = nouns.add_parser(
        "logs", help=about, description="Show the last 1 MiB of what the guest wrote to its console."
    )
    add_sandbox(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the sandbox ends")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_daemon_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    if args.json and args.follow:
        raise InvalidInput("--json prints one object, and --follow has no end", hint="Leave one of them out")
    with connect(args) as controller:
        sandbox_id = resolve(controller, args.sandbox)
        if args.json:
            print_json({"id": sandbox_id, "console": controller.sandbox_console(sandbox_id)})
        elif args.follow:
            _follow(controller, sandbox_id)
        else:
            _show(controller.sandbox_console(sandbox_id))
    return 0


def _follow(controller: Controller, sandbox_id: str) -> None:
    seen = ""
    while True:
        try:
            # Asked before the console is read: what a dying guest wrote last is read after it is known to be dead.
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
    """What of the text came after what was seen, when its beginning may have been dropped."""
    if text.startswith(seen):
        return text[len(seen) :]
    anchor = seen[-_ANCHOR:]
    at = text.rfind(anchor)
    return text if at < 0 else text[at + len(anchor) :]


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
