"""`forkd events`: what happened, and what is happening."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from forkd.cli.arguments import add_daemon_options
from forkd.cli.connect import connect
from forkd.cli.output import render_plain, show
from forkd.cli.sandboxes import resolve
from forkd.wire.api import Event

if TYPE_CHECKING:
    from forkd.client import Controller

_LIMIT = 1000
_MAX_LIMIT = 10_000  # more than this the daemon does not keep
_PAGE = 1000


def add_events(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what happened, oldest first."
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more; without --since only new ones")
    parser.add_argument("--since", type=int, metavar="ID", help="only events after this one")
    parser.add_argument("--type", metavar="TYPE", help="only this type, such as sandbox.dead")
    parser.add_argument("--sandbox", metavar="SANDBOX", help="only those of this sandbox")
    parser.add_argument(
        "-n", "--limit", type=parse_limit, default=_LIMIT, metavar="N", help=f"the newest N only (default {_LIMIT})"
    )
    add_daemon_options(parser, json="print a JSON array; with --follow one object per line")


def run_events(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        sandbox_id = resolve(controller, args.sandbox) if args.sandbox else None
        if args.follow:
            _print_each(controller.events(since=args.since, type=args.type, sandbox_id=sandbox_id), args.json)
            return 0
        found = _list_newest(controller, args, sandbox_id)
    return show(args, found, _print_each)


def _list_newest(controller: Controller, args: argparse.Namespace, sandbox_id: str | None) -> list[Event]:
    """The daemon gives pages from the oldest on; it keeps no more events than a few pages."""
    found: deque[Event] = deque(maxlen=args.limit)
    since = args.since or 0
    while page := controller.list_events(since=since, type=args.type, sandbox_id=sandbox_id, limit=_PAGE):
        found.extend(page)
        since = page[-1]["id"]
        if len(page) < _PAGE:
            break
    return list(found)


def parse_limit(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= _MAX_LIMIT:
        raise argparse.ArgumentTypeError(f"must be between 1 and {_MAX_LIMIT}, got {text!a}")
    return int(text)


def _print_each(events: Iterable[Event], as_json: bool = False) -> None:
    for event in events:
        print(json.dumps(event) if as_json else render_event(event))
        sys.stdout.flush()


def render_event(event: Event) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["ts_unix"]))
    about = event["sandbox_id"] or event["snapshot_tag"] or "-"
    given = dict(event["data"])
    if event["sandbox_id"] and event["snapshot_tag"]:
        given["snapshot"] = event["snapshot_tag"]
    data = " ".join(f"{name}={_render_value(value)}" for name, value in given.items())
    return render_plain(f"{event['id']:>6}  {at}  {event['type']:<18}  {about:<13}  {data}".rstrip())


def _render_value(value: object) -> str:
    return value if isinstance(value, str) and value and " " not in value else json.dumps(value)
