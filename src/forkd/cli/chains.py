"""Snapshots that are layers of others: `forkd snapshot derive`, `compact`, `verify` and `prune`; `snapshot-diff`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forkd.cli.arguments import add_daemon_options, add_duration, parse_size
from forkd.cli.commands import Actions
from forkd.cli.connect import connect
from forkd.cli.guest_command import add_words, parse_words
from forkd.cli.making import make_snapshot
from forkd.cli.network import add_network_options, parse_options
from forkd.cli.output import note, print_facts, print_json, print_rows, render_size, show
from forkd.cli.suggestions import suggesting_snapshot
from forkd.errors import InvalidInput
from forkd.model.names import SnapshotTag, parse_tag
from forkd.model.network import Network
from forkd.wire.api import PruneResult, SnapshotInfo, VerifyResult

if TYPE_CHECKING:
    from forkd.client import Controller

_DERIVE_S = 600.0
_DIFF_LINES = ("tag", "dir", "parent_tag", "pause_ms", "diff_physical_bytes")


def add_chain_actions(actions: Actions) -> None:
    derive = actions.add("derive", run_derive, "fork a snapshot, run something, save what that changed as a new one")
    _add_derive_options(derive)
    add_words(derive, "TAG", "the snapshot")
    compact = actions.add("compact", run_compact, "write a snapshot and all below it as one without a parent")
    compact.add_argument("tag", metavar="TAG")
    compact.add_argument("--to", required=True, metavar="NEW_TAG", help="the new snapshot's name")
    verify = actions.add("verify", run_verify, "read a snapshot and all below it, and check every byte")
    verify.add_argument("tag", metavar="TAG")
    prune = actions.add("prune", run_prune, "remove old snapshots, but none that is in use or that others need")
    prune.add_argument("--keep-last", type=int, metavar="N", help="keep the N newest")
    prune.add_argument("--keep-tagged", action="store_true", help="keep those whose tag somebody chose")
    add_duration(prune, "--max-age", "remove those that are older, such as 12h or 7d")
    prune.add_argument(
        "--max-bytes", type=parse_size, metavar="SIZE", help="remove the oldest until all take no more, such as 10G"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _add_derive_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tag", metavar="NEW_TAG", help="the new snapshot's name; required")
    parser.add_argument("--code", metavar="CODE", help="Python to run in the interpreter, before the command")
    add_network_options(parser)
    add_duration(parser, "--timeout", "limit for what runs, such as 90s or 10m (default 600)", _DERIVE_S)


def _add_all_derive_options(parser: argparse.ArgumentParser) -> None:
    _add_derive_options(parser)
    add_daemon_options(parser)


def run_derive(args: argparse.Namespace) -> int:
    parent = parse_tag(parse_words(args, "forkd snapshot derive", "TAG", _add_all_derive_options, optional=True))
    if args.tag is None:
        raise InvalidInput(
            "forkd snapshot derive needs --tag",
            hint=f"Write: forkd snapshot derive {parent} --tag NEW_TAG -- COMMAND",
        )
    tag = parse_tag(args.tag)
    if not args.command and args.code is None:
        raise InvalidInput(
            "forkd snapshot derive needs a command or --code",
            hint=f"Write: forkd snapshot derive {parent} --tag {tag} -- COMMAND",
        )
    with connect(args) as controller:
        made = derive(args, controller, parent, tag, args.command or None, args.code, args.timeout, parse_options(args))
    return show(args, made, _print_made)


def derive(
    args: argparse.Namespace,
    controller: Controller,
    parent: SnapshotTag,
    tag: SnapshotTag,
    command: Sequence[str] | None,
    code: str | None,
    timeout_s: float,
    network: Network | None = None,
) -> SnapshotInfo:
    def ask() -> None:
        controller.derive_snapshot(parent, tag, command, code=code, network=network, timeout_secs=timeout_s)

    with suggesting_snapshot(controller, parent):
        make_snapshot(args, controller, tag, ask)
    return controller.get_snapshot(tag)


def _print_made(info: SnapshotInfo) -> None:
    layer = f"  {render_size(written)} on disk" if (written := info.get("diff_physical_bytes")) is not None else ""
    below = f", a layer of {info['parent_tag']}" if "parent_tag" in info else ""
    print(f"{info['tag']}{layer}{below}")


def run_compact(args: argparse.Namespace) -> int:
    tag, to = parse_tag(args.tag), parse_tag(args.to)
    with connect(args) as controller:
        with suggesting_snapshot(controller, tag):
            make_snapshot(args, controller, to, lambda: controller.compact_snapshot(tag, to))
        made: dict[str, Any] = {**controller.get_snapshot(to), **controller.snapshot_info(to)}
    return show(args, made, lambda _: print(f"{to}  {render_size(made['memory_physical_bytes'])} on disk"))


def run_verify(args: argparse.Namespace) -> int:
    tag = parse_tag(args.tag)
    with connect(args) as controller, suggesting_snapshot(controller, tag):
        found = controller.verify_snapshot(tag)
    return show(args, found, _print_verified)


def _print_verified(found: VerifyResult) -> None:
    print(f"{found['tag']}  good: {found['files']} files, {render_size(found['bytes'])}, {' > '.join(found['chain'])}")


def run_prune(args: argparse.Namespace) -> int:
    if args.keep_last is None and not args.keep_tagged and args.max_age is None and args.max_bytes is None:
        raise InvalidInput(
            "forkd snapshot prune needs --keep-last, --keep-tagged, --max-age or --max-bytes",
            hint="To look first: forkd snapshot prune --max-age 7d --keep-tagged --dry-run",
        )
    with connect(args) as controller:
        result = controller.prune_snapshots(
            keep_last=args.keep_last,
            keep_tagged=args.keep_tagged,
            max_age_secs=args.max_age,
            max_bytes=args.max_bytes,
            dry_run=args.dry_run,
        )
    return show(args, result, _print_pruned)


def _print_pruned(result: PruneResult) -> None:
    removed = result["removed"]
    if removed:
        print_rows(("TAG", "SIZE", "WHY"), [(each["tag"], render_size(each["bytes"]), each["why"]) for each in removed])
    freed = render_size(sum(each["bytes"] for each in removed))
    done = "would remove" if result["dry_run"] else "removed"
    kept = "would keep" if result["dry_run"] else "kept"
    note(f"{done} {len(removed)} snapshots, {freed}; {kept} {result['kept']}")


def add_snapshot_diff(parser: argparse.ArgumentParser) -> None:
    parser.description = "forkd's word for forkd snapshot derive: fork a snapshot, run a command, save the difference."
    parser.add_argument("--from", dest="parent", required=True, metavar="TAG", help="the snapshot to fork")
    parser.add_argument("--tag", required=True, metavar="NEW_TAG", help="the new snapshot's name")
    parser.add_argument("--exec", required=True, metavar="COMMAND", help="what to run there, words with quotes")
    add_duration(parser, "--exec-timeout-secs", "limit for it (default 600)", _DERIVE_S)
    add_daemon_options(parser, json="print one JSON object")


def run_snapshot_diff(args: argparse.Namespace) -> int:
    """Prints the same lines as forkd."""
    parent, tag = parse_tag(args.parent), parse_tag(args.tag)
    try:
        command = shlex.split(args.exec)
    except ValueError as error:
        raise InvalidInput(f"--exec cannot be split into words: {error}", hint="Close the quotes") from None
    if not command:
        raise InvalidInput("--exec needs a command", hint="For example: --exec 'pip install attrs'")
    with connect(args) as controller:
        made = derive(args, controller, parent, tag, command, None, args.exec_timeout_secs)
    if args.json:
        print_json(made)
    else:
        known: dict[str, Any] = {**made}
        print_facts({f"{name}:": known[name] for name in _DIFF_LINES if name in known})
    return 0
