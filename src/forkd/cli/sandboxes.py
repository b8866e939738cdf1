"""`forkd pause`, `forkd resume`, `forkd rm`: what is done to whole sandboxes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from forkd.cli.killing import kill_all
from forkd.cli.ls import print_sandboxes
from forkd.cli.nouns import Nouns
from forkd.cli.pairs import parse_pairs
from forkd.cli.reach import add_daemon_options, connect
from forkd.cli.sandbox_ids import add_sandbox, resolve_all
from forkd.cli.tables import note, print_json
from forkd.errors import InvalidInput, NotFound
from forkd.wire.api import SandboxInfo

if TYPE_CHECKING:
    from forkd.client.controller import Controller


def add_pause(nouns: Nouns[argparse.ArgumentParser]) -> None:
    parser = nouns.add_parser("pause", help="stop the clock of sandboxes", description="Stop the clock of sandboxes.")
    _add_common(parser, "+", run_pause)


def add_resume(nouns: Nouns[argparse.ArgumentParser]) -> None:
    about = "let paused sandboxes go on"
    parser = nouns.add_parser("resume", help=about, description="Let paused sandboxes go on.")
    _add_common(parser, "+", run_resume)


def add_rm(nouns: Nouns[argparse.ArgumentParser]) -> None:
    parser = nouns.add_parser("rm", help="end sandboxes", description="End sandboxes, and forget them.")
    parser.add_argument("-a", "--all", action="store_true", help="all there are")
    parser.add_argument("--tag", metavar="TAG", help="all of this snapshot")
    parser.add_argument("-l", "--label", action="append", default=[], metavar="K=V", help="all labelled so")
    _add_common(parser, "*", run_rm)


def run_pause(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        return _change(args, controller, controller.pause_sandbox)


def run_resume(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        return _change(args, controller, controller.resume_sandbox)


def run_rm(args: argparse.Namespace) -> int:
    labels = parse_pairs(args.label, "--label")
    chosen = bool(args.all or args.tag or labels)
    if chosen == bool(args.sandbox):
        raise InvalidInput(
            "forkd rm takes ids, or one of --all, --tag and --label" + ("" if chosen else "; there is none"),
            hint="List the sandboxes with: forkd ls",
        )
    if args.all and (args.tag or labels):
        raise InvalidInput("--all takes all: --tag and --label would say less", hint="Leave --all out")
    with connect(args) as controller:
        if chosen:
            found = controller.list_sandboxes(snapshot_tag=args.tag, labels=labels)
            ids = [info["id"] for info in found]
        else:
            ids = resolve_all(controller, args.sandbox)
        removed = _remove(controller, ids, gone_is_fine=chosen, quiet=args.json)
    if args.json:
        print_json({"removed": removed})
    elif not ids:
        note("There are no sandboxes to end")
    return 0


def _remove(controller: Controller, ids: list[str], *, gone_is_fine: bool, quiet: bool) -> list[str]:
    """All that can be; then the first error, if there was one."""
    outcome = kill_all(controller, ids)
    if not quiet:
        for sandbox_id in outcome.killed:
            print(sandbox_id)
    for error in outcome.failed.values():
        if not (gone_is_fine and isinstance(error, NotFound)):
            raise error
    return outcome.killed


def _change(args: argparse.Namespace, controller: Controller, change: Callable[[str], SandboxInfo]) -> int:
    infos = [change(sandbox_id) for sandbox_id in resolve_all(controller, args.sandbox)]
    if args.json:
        print_json(infos)
    else:
        print_sandboxes(infos)
    return 0


def _add_common(parser: argparse.ArgumentParser, nargs: str, func: Callable[[argparse.Namespace], int]) -> None:
    add_sandbox(parser, nargs=nargs)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_daemon_options(parser)
    parser.set_defaults(func=func)
