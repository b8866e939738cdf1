"""`forkd workspace`: sandboxes with a name, that can be suspended."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from forkd.cli.limits import add_limit_options, render_limits
from forkd.cli.nouns import Nouns, add_action
from forkd.cli.reach import add_daemon_options, connect
from forkd.cli.tables import note, print_json, print_rows, render_age
from forkd.model.names import parse_tag
from forkd.wire.api import WorkspaceInfo


def add_parser(nouns: Nouns[argparse.ArgumentParser]) -> None:
    parser = nouns.add_parser("workspace", help="create, list, suspend, resume and remove workspaces")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    create = add_action(actions, "create", run_create, "fork a snapshot into a workspace")
    create.add_argument("name", metavar="NAME", help="1 to 64 letters, digits, '-' or '_'")
    create.add_argument("--snapshot", required=True, metavar="TAG", help="the snapshot to fork")
    add_limit_options(create)
    create.add_argument("--per-child-netns", action="store_true", help="as in forkd; see docs/rest.md")
    add_action(actions, "ls", run_ls, "list the workspaces")
    for name, func, about in (
        ("suspend", run_suspend, "suspend workspaces"),
        ("resume", run_resume, "let suspended workspaces go on; a stale one starts again from its snapshot"),
        ("rm", run_rm, "remove workspaces and their sandboxes"),
    ):
        action = add_action(actions, name, func, about)
        action.add_argument("name", nargs="+", metavar="WORKSPACE")
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true", help="print JSON")
        add_daemon_options(action)


def run_create(args: argparse.Namespace) -> int:
    tag = parse_tag(args.snapshot)
    with connect(args) as controller:
        info = controller.create_workspace(args.name, tag, args.per_child_netns, **render_limits(args))
    if args.json:
        print_json(info)
    else:
        _print([info])
    return 0


def run_ls(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        found = controller.list_workspaces()
    _show(args, found)
    if not found and not args.json:
        note("There are no workspaces; make one with: forkd workspace create NAME --snapshot TAG")
    return 0


def run_suspend(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        _show(args, [controller.suspend_workspace(name) for name in args.name])
    return 0


def run_resume(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        _show(args, [controller.resume_workspace(name) for name in args.name])
    return 0


def run_rm(args: argparse.Namespace) -> int:
    names = list(dict.fromkeys(args.name))
    with connect(args) as controller:
        for name in names:
            controller.get_workspace(name)  # a mistyped one is found before others are gone
        for name in names:
            controller.delete_workspace(name)
    if args.json:
        print_json({"removed": names})
    return 0


def _show(args: argparse.Namespace, infos: Sequence[WorkspaceInfo]) -> None:
    if args.json:
        print_json(infos)
    else:
        _print(infos)


def _print(infos: Sequence[WorkspaceInfo]) -> None:
    now = time.time()
    rows = (
        (
            info["name"],
            info["status"],
            info["source_snapshot_tag"],
            info.get("live_sandbox_id", ""),
            render_age(now - info["created_at_unix"]),
            render_age(now - info["last_active_unix"]),
        )
        for info in infos
    )
    print_rows(("NAME", "STATUS", "SNAPSHOT", "SANDBOX", "AGE", "ACTIVE"), rows)
