"""`forkd workspace`: sandboxes with a name, that can be suspended."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from forkd.cli.arguments import add_daemon_options, add_limit_options, render_limits
from forkd.cli.commands import Actions
from forkd.cli.connect import connect, remove_all
from forkd.cli.network import add_network_options, parse_options
from forkd.cli.output import note, print_rows, render_age, show
from forkd.cli.suggestions import suggesting_snapshot
from forkd.model.names import parse_tag
from forkd.wire.api import WorkspaceInfo


def add_workspace(parser: argparse.ArgumentParser) -> None:
    actions = Actions(parser)
    create = actions.add("create", run_create, "fork a snapshot into a workspace")
    create.add_argument("name", metavar="NAME", help="1 to 64 letters, digits, '-' or '_'")
    create.add_argument("--snapshot", required=True, metavar="TAG", help="the snapshot to fork")
    add_limit_options(create)
    add_network_options(create)
    create.add_argument("--per-child-netns", action="store_true", help="for compatibility; see docs/reference/rest.md")
    actions.add("ls", run_ls, "list the workspaces")
    for action in (
        actions.add("suspend", run_suspend, "suspend workspaces"),
        actions.add("resume", run_resume, "resume suspended workspaces; a stale one starts again from its snapshot"),
        actions.add("rm", run_rm, "remove workspaces and their sandboxes"),
    ):
        action.add_argument("name", nargs="+", metavar="WORKSPACE")
    for action in actions.parsers():
        add_daemon_options(action)


def run_create(args: argparse.Namespace) -> int:
    tag = parse_tag(args.snapshot)
    with connect(args) as controller, suggesting_snapshot(controller, tag):
        info = controller.create_workspace(
            args.name, tag, args.per_child_netns, network=parse_options(args), **render_limits(args)
        )
    return show(args, info, lambda info: _print([info]))


def run_ls(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        found = controller.list_workspaces()
    show(args, found, _print)
    if not found and not args.json:
        note("There are no workspaces; make one with: forkd workspace create NAME --snapshot TAG")
    return 0


def run_suspend(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        return show(args, [controller.suspend_workspace(name) for name in args.name], _print)


def run_resume(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        return show(args, [controller.resume_workspace(name) for name in args.name], _print)


def run_rm(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        removed = remove_all(args.name, controller.get_workspace, controller.delete_workspace)
    return show(args, {"removed": removed})


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
