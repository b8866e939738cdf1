"""`forkd tree`: which sandbox came from which snapshot."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from forkd.cli.arguments import add_daemon_options
from forkd.cli.connect import connect
from forkd.cli.output import note, open_console, render_age, render_plain, show
from forkd.cli.sandboxes import render_deadline
from forkd.wire.api import Lineage, LineageSnapshot, SandboxInfo

if TYPE_CHECKING:
    from rich.tree import Tree


def add_tree(parser: argparse.ArgumentParser) -> None:
    add_daemon_options(parser, json="print one JSON object")


def run_tree(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        lineage = controller.lineage()
    return show(args, lineage, _print_trees)


def _print_trees(lineage: Lineage) -> None:
    if not lineage["snapshots"] and not lineage["orphans"]:
        note("There are no snapshots; make one with: forkd snapshot create --image IMAGE --tag TAG")
        return
    console = open_console()
    for root in build_trees(lineage, time.time()):
        console.print(root)


def build_trees(lineage: Lineage, now: float) -> list[Tree]:
    """A tree for each snapshot whose parent is gone or that has none; then one of the sandboxes without a snapshot."""
    from rich.text import Text
    from rich.tree import Tree

    tags = {snapshot["tag"] for snapshot in lineage["snapshots"]}
    below: dict[str | None, list[LineageSnapshot]] = {}
    for snapshot in lineage["snapshots"]:
        parent = snapshot["parent_tag"]
        below.setdefault(parent if parent in tags and parent != snapshot["tag"] else None, []).append(snapshot)

    def grow(snapshot: LineageSnapshot) -> Tree:
        status = "" if snapshot["status"] == "ready" else f"  {snapshot['status']}"
        tree = Tree(Text(snapshot["tag"] + status))
        for info in snapshot["sandboxes"]:
            tree.add(Text(_render_leaf(info, now)))
        for child in below.get(snapshot["tag"], []):
            tree.children.append(grow(child))
        return tree

    trees = [grow(snapshot) for snapshot in below.get(None, [])]
    if lineage["orphans"]:
        orphans = Tree(Text("snapshot gone"))
        for info in lineage["orphans"]:
            orphans.add(Text(f"{_render_leaf(info, now)}  of {info['snapshot_tag']}"))
        trees.append(orphans)
    return trees


def _render_leaf(info: SandboxInfo, now: float) -> str:
    parts = [
        info["id"],
        info["name"] or "",
        info["state"],
        render_age(now - info["created_at_unix"]),
        render_deadline(info, now),
        f"workspace {info['workspace']}" if info["workspace"] else "",
        info["cause"] or "",
    ]
    return render_plain("  ".join(part for part in parts if part))
