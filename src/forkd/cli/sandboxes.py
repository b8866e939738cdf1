"""Whole sandboxes: finding the one that was typed; `forkd ls`, `pause`, `resume`, `rename`, `rm`."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from forkd.cli.arguments import add_daemon_options, add_pairs, parse_pairs, render_pairs
from forkd.cli.connect import connect
from forkd.cli.output import (
    note,
    print_columns,
    print_json,
    print_lines,
    render_age,
    show,
)
from forkd.cli.suggestions import suggest
from forkd.errors import ForkdError, InvalidInput, NotFound
from forkd.wire.api import SandboxInfo

if TYPE_CHECKING:
    from forkd.client import Controller

_STATES = ("starting", "running", "paused", "stopping", "dead")
_HEADINGS = ("ID", "NAME", "SNAPSHOT", "PARENT", "STATE", "AGE", "ADDRESS", "DEADLINE", "WORKSPACE", "LABELS", "CAUSE")
_ALWAYS_SHOWN = ("ID", "SNAPSHOT", "STATE", "AGE", "ADDRESS")
_KILLED_AT_ONCE = 8
_WHOLE_ID = re.compile(r"sb-[0-9a-f]{10}", re.ASCII)
_ID_PREFIX = "sb-"
_IDS_SHOWN = 5


def add_sandbox(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument("sandbox", metavar="SANDBOX", nargs=nargs, help="a name, an id, or the beginning of one")


def resolve(controller: Controller, text: str) -> str:
    return resolve_all(controller, [text])[0]


def resolve_all(controller: Controller, texts: Sequence[str]) -> list[str]:
    """The ids, each once. The daemon is asked only for those that are not given in full."""
    known: list[SandboxInfo] = [] if all(map(_WHOLE_ID.fullmatch, texts)) else controller.list_sandboxes()
    named = {info["name"]: info["id"] for info in known if info["name"]}
    ids = [info["id"] for info in known]
    found = (text if _WHOLE_ID.fullmatch(text) else named.get(text) or match_id(text, ids, named) for text in texts)
    return list(dict.fromkeys(found))


def match_id(text: str, known: Sequence[str], names: Iterable[str] = ()) -> str:
    """The one id that begins with this text, with or without `sb-`. The names are for advice."""
    wanted = _ID_PREFIX + text.removeprefix(_ID_PREFIX)
    found = [each for each in known if each.startswith(wanted)] if wanted != _ID_PREFIX else []
    if not found:
        meant = suggest(text, [*names, *known])
        asked = f"Did you mean {meant}? " if meant else ""
        raise NotFound(f"There is no sandbox {ascii(text[:70])[1:-1]}", hint=f"{asked}List them with: forkd ls")
    if len(found) > 1:
        more = f" and {len(found) - _IDS_SHOWN} more" if len(found) > _IDS_SHOWN else ""
        raise InvalidInput(
            f"{len(found)} sandboxes begin with {text}",
            hint=f"Give more of the id: {', '.join(found[:_IDS_SHOWN])}{more}",
        )
    return found[0]


def add_ls(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the sandboxes, oldest first."
    parser.add_argument("--tag", metavar="TAG", help="only those of this snapshot")
    parser.add_argument("--state", choices=_STATES, help="only those in this state")
    add_pairs(parser, "-l", "--label", about="only those with this label; may be repeated")
    add_pairs(parser, "--metadata", about="only those with this metadata; may be repeated")
    parser.add_argument("-q", "--quiet", action="store_true", help="print ids only")
    add_daemon_options(parser, json="print a JSON array")


def run_ls(args: argparse.Namespace) -> int:
    labels, metadata = parse_pairs(args.label, "--label"), parse_pairs(args.metadata, "--metadata")
    with connect(args) as controller:
        found = controller.list_sandboxes(state=args.state, snapshot_tag=args.tag, labels=labels, metadata=metadata)
    show_sandboxes(args, found)
    if not found and not args.json and not args.quiet:
        single = {"tag": args.tag, "state": args.state}
        wanted = [f"{name} {value}" for name, value in single.items() if value]
        for name, pairs in (("label", labels), ("metadata", metadata)):
            wanted += [f"{name} {render_pairs({key: value})}" for key, value in pairs.items()]
        matching = " and ".join(wanted)
        note(f"No sandbox matches {matching}" if wanted else "There are no sandboxes; fork some with: forkd fork TAG")
    return 0


def show_sandboxes(args: argparse.Namespace, found: Sequence[SandboxInfo]) -> None:
    """As the command asks: JSON, ids or a table."""
    if args.json:
        print_json(found)
    elif args.quiet:
        print_lines(info["id"] for info in found)
    else:
        print_sandboxes(found)


def print_sandboxes(found: Sequence[SandboxInfo]) -> None:
    now = time.time()
    print_columns([_render_row(info, now) for info in found], _HEADINGS, always=_ALWAYS_SHOWN)


def _render_row(info: SandboxInfo, now: float) -> dict[str, str]:
    return {
        "ID": info["id"],
        "NAME": info["name"] or "",
        "SNAPSHOT": info["snapshot_tag"],
        "PARENT": info["parent_id"] or "",
        "STATE": info["state"],
        "AGE": render_age(now - info["created_at_unix"]),
        "ADDRESS": info["guest_addr"],
        "DEADLINE": render_deadline(info, now),
        "WORKSPACE": info["workspace"] or "",
        "LABELS": render_pairs(info["labels"]),
        "CAUSE": info["cause"] or "",
    }


def render_deadline(info: SandboxInfo, now: float) -> str:
    if info["deadline_unix"] is None or info["state"] not in ("starting", "running"):
        return ""
    left = info["deadline_unix"] - now
    return f"{info['on_timeout']} in {render_age(left)}" if left > 0 else f"{info['on_timeout']} now"


def add_pause(parser: argparse.ArgumentParser) -> None:
    parser.description = "Pause sandboxes: nothing in them runs, and their memory is kept."
    _add_change(parser)


def run_pause(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        return _change(args, controller, controller.pause_sandbox)


def add_resume(parser: argparse.ArgumentParser) -> None:
    _add_change(parser)


def run_resume(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        return _change(args, controller, controller.resume_sandbox)


def _add_change(parser: argparse.ArgumentParser, nargs: str = "+") -> None:
    add_sandbox(parser, nargs)
    add_daemon_options(parser)


def _change(args: argparse.Namespace, controller: Controller, change: Callable[[str], SandboxInfo]) -> int:
    return show(args, [change(sandbox_id) for sandbox_id in resolve_all(controller, args.sandbox)], print_sandboxes)


def add_rename(parser: argparse.ArgumentParser) -> None:
    parser.description = "Give a sandbox a name, which can be used wherever its id can."
    add_sandbox(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", help="unique in this home; leave it out to take it away")
    add_daemon_options(parser)


def run_rename(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        renamed = controller.rename_sandbox(resolve(controller, args.sandbox), args.name)
    return show(args, renamed, lambda info: print_sandboxes([info]))


def add_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-a", "--all", action="store_true", help="all sandboxes")
    parser.add_argument("--tag", metavar="TAG", help="all of this snapshot")
    add_pairs(parser, "-l", "--label", about="all with this label; may be repeated")
    _add_change(parser, "*")


def run_rm(args: argparse.Namespace) -> int:
    labels = parse_pairs(args.label, "--label")
    chosen = bool(args.all or args.tag or labels)
    if chosen == bool(args.sandbox):
        got = "both" if chosen else "neither"
        raise InvalidInput(
            f"forkd rm takes ids, or one of --all, --tag and --label, got {got}",
            hint="List the sandboxes with: forkd ls",
        )
    if args.all and (args.tag or labels):
        raise InvalidInput("--all cannot be combined with --tag or --label", hint="Leave --all out")
    with connect(args) as controller:
        if chosen:
            ids = [info["id"] for info in controller.list_sandboxes(snapshot_tag=args.tag, labels=labels)]
        else:
            ids = resolve_all(controller, args.sandbox)
        removed = _remove(controller, ids, gone_is_fine=chosen, quiet=args.json)
    if args.json:
        print_json({"removed": removed})
    elif not ids:
        note("There are no sandboxes to end")
    return 0


def _remove(controller: Controller, ids: list[str], *, gone_is_fine: bool, quiet: bool) -> list[str]:
    """Ends all that it can; then raises the first error, if there was one."""
    failed = kill_all(controller, ids)
    removed = [sandbox_id for sandbox_id in ids if sandbox_id not in failed]
    if not quiet:
        print_lines(removed)
    for error in failed.values():
        if not (gone_is_fine and isinstance(error, NotFound)):
            raise error
    return removed


def kill_all(controller: Controller, ids: Sequence[str]) -> dict[str, ForkdError]:
    """Several at once. Returns the errors of those that could not be ended."""
    from concurrent.futures import ThreadPoolExecutor

    def kill(sandbox_id: str) -> ForkdError | None:
        try:
            controller.kill_sandbox(sandbox_id)
        except ForkdError as error:
            return error
        return None

    with ThreadPoolExecutor(_KILLED_AT_ONCE) as pool:
        outcomes = zip(ids, pool.map(kill, ids), strict=True)
        return {sandbox_id: error for sandbox_id, error in outcomes if error is not None}
