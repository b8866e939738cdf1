"""`forkd tree`: which sandbox came from which snapshot."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from forkd.cli.ls import render_deadline
from forkd.cli.nouns import Nouns
from forkd.cli.plain import render_plain
from forkd.cli.reach import add_daemon_options, connect
from forkd.cli.tables import note, open_console, print_json, render_age
from forkd.wire.api import Lineage, LineageSnapshot, SandboxInfo

if TYPE_CHECKING:
    from rich.tree import Tree

_ORPHANS = "snapshot gone"


def add_parser(nouns: Nouns[argparse.ArgumentParser]) -> None:
    about = "show which sandbox came from which snapshot"
    parser = nouns.add_parser("tree", help=about, description="Show which sandbox came from which snapshot.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_daemon_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        lineage = controller.lineage()
    if args.json:
        print_json(lineage)
        return 0
    if not lineage["snapshots"] and not lineage["orphans"]:
        note("There are no snapshots; make one with: forkd snapshot create --image IMAGE --tag TAG")
        return 0
    console = open_console()
    for root in build_trees(lineage, time.time()):
        console.print(root)
    return 0


def build_trees(lineage: Lineage, now: float) -> list[Tree]:
    """A tree for each snapshot without a parent that is still there; then one of the sandboxes without a snapshot."""
    from rich.text import Text
    from rich.tree import Tree

    tags = {snapshot["tag"] for snapshot in lineage["snapshots"]}
    below: dict[str | None, list[LineageSnapshot]] = {}
    for snapshot in lineage["snapshots"]:
        parent = snapshot["parent_tag"]
        below.setdefault(parent if parent in tags and parent != snapshot["tag"] else None, []).append(snapshot)

    def grow(snapshot: LineageSnapshot) -> Tree:
        tree = Tree(Text(render_snapshot(snapshot)))
        for info in snapshot["sandboxes"]:
            tree.add(Text(render_sandbox(info, now)))
        for child in below.get(snapshot["tag"], []):
            tree.children.append(grow(child))
        return tree

    trees = [grow(snapshot) for snapshot in below.get(None, [])]
    if lineage["orphans"]:
        orphans = Tree(Text(_ORPHANS))
        for info in lineage["orphans"]:
            orphans.add(Text(f"{render_sandbox(info, now)}  of {info['snapshot_tag']}"))
        trees.append(orphans)
    return trees


def render_snapshot(snapshot: LineageSnapshot) -> str:
    return snapshot["tag"] if snapshot["status"] == "ready" else f"{snapshot['tag']}  {snapshot['status']}"


def render_sandbox(info: SandboxInfo, now: float) -> str:
    parts = [
        info["id"],
        info["state"],
        render_age(now - info["created_at_unix"]),
        render_deadline(info, now),
        f"workspace {info['workspace']}" if info["workspace"] else "",
        info["cause"] or "",
    ]
    return render_plain("  ".join(part for part in parts if part))
