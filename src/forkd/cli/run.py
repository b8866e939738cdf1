"""`forkd run`: a fork for one command, and removed after it, however that ends."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from forkd.cli.arguments import (
    add_daemon_options,
    add_duration,
    add_limit_options,
    add_pairs,
    parse_pairs,
    render_limits,
)
from forkd.cli.connect import connect
from forkd.cli.fork import end_all, forked, note_kept
from forkd.cli.guest_command import (
    MAX_TIMEOUT_S,
    add_place,
    add_streams,
    add_words,
    check_streams,
    parse_words,
    run_command,
)
from forkd.cli.interrupts import Interrupts
from forkd.cli.network import add_network_options, parse_options
from forkd.model.names import parse_tag

# When this command is killed outright, the daemon ends the sandbox this much after the command's own time.
_SLACK_S = 60.0


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fork a snapshot, run a command in the fork, and remove it. Standard input is passed on unless it is a "
        "terminal. Exits as forkd exec does."
    )
    _add_options(parser)
    add_words(parser, "TAG", "the snapshot")


def run_run(args: argparse.Namespace) -> int:
    tag = parse_tag(parse_words(args, "forkd run", "TAG", _add_options))
    if not args.json:
        args.interactive = args.interactive or args.tty or not sys.stdin.isatty()
    check_streams(args)
    args.timeout = args.timeout or MAX_TIMEOUT_S
    request = render_request(args, tag)
    with connect(args) as controller, Interrupts() as interrupts:
        with forked(args, controller, request, keep=args.keep) as infos:
            code = run_command(controller, infos[0]["id"], args)
            if not args.keep:
                end_all(controller, infos)
            interrupts.settle()
    if args.keep:
        note_kept(infos)
    return code


def render_request(args: argparse.Namespace, tag: str) -> dict[str, Any]:
    """The arguments of `spawn_sandboxes`."""
    return {
        "snapshot_tag": tag,
        "n": 1,
        **render_limits(args),
        "network": parse_options(args),
        "timeout_secs": None if args.keep else args.timeout + _SLACK_S,
        "labels": parse_pairs(args.label, "--label"),
        "metadata": parse_pairs(args.metadata, "--metadata"),
    }


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_streams(parser)
    add_duration(parser, "--timeout", "kill it after this time, such as 30s or 5m (default 1d)")
    parser.add_argument("--keep", action="store_true", help="leave the sandbox running afterwards")
    add_place(parser)
    add_pairs(parser, "-l", "--label", about="a label of the sandbox; may be repeated")
    add_pairs(parser, "--metadata", about="metadata of the sandbox; may be repeated")
    add_limit_options(parser)
    add_network_options(parser)
    add_daemon_options(parser, json="print one JSON object at the end")
