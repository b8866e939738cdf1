"""`forkd tree`: who came from whom, what each holds that no other has, and what is alive."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forkd.cli.arguments import add_daemon_options
from forkd.cli.connect import connect
from forkd.cli.output import note, print_columns, render_age, render_plain, render_size, show
from forkd.cli.sandboxes import render_deadline
from forkd.wire.api import Lineage, LineageSandbox, LineageSnapshot

_HEADINGS = ("LINEAGE", "STATE", "AGE", "HOLDS", "NOTE")
# Before the name of a node: one that others follow, the last one, and what is before those below them.
_LINES = ("├─ ", "└─ ", "│  ", "   ")
_ASCII = ("|- ", "`- ", "|  ", "   ")
_GONE = "snapshot gone"


def add_tree(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show who came from whom: snapshots below the snapshot that they are layers of; sandboxes below the sandbox "
        "they were forked from, else below their snapshot; checkpoints below their sandbox. HOLDS is what only that "
        "one has: on disk for a snapshot, in memory for a sandbox."
    )
    add_daemon_options(parser, json="print one JSON object")


def run_tree(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        lineage = controller.lineage()
    return show(args, lineage, _print_trees)


def _print_trees(lineage: Lineage) -> None:
    if not lineage["snapshots"] and not lineage["orphans"]:
        note("There are no snapshots; make one with: forkd snapshot create --image IMAGE --tag TAG")
        return
    lines = _LINES if _can_show("".join(_LINES)) else _ASCII
    rows = render_rows(build_trees(lineage), lines, time.time())
    print_columns(list(rows), _HEADINGS, always=_HEADINGS[:3])
    note(render_summary(lineage))


def _can_show(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class Key(NamedTuple):
    """A tag may look like an id."""

    kind: str
    name: str


@dataclass
class Node:
    """A snapshot, a sandbox, or with neither a heading."""

    snapshot: LineageSnapshot | None = None
    sandbox: LineageSandbox | None = None
    source: LineageSandbox | None = None  # that the snapshot is a branch of, if it still is there
    below: list[Node] = field(default_factory=list)


def build_trees(lineage: Lineage) -> list[Node]:
    """Each node below the first of those it came from that is there; last, sandboxes of which nothing is."""
    nodes: dict[Key, Node] = {}
    known = {info["id"]: info for info in _sandboxes(lineage)}
    for snapshot in lineage["snapshots"]:
        source = snapshot["branched_from"] if snapshot["checkpoint"] is None else None
        nodes[_tag(snapshot["tag"])] = Node(snapshot=snapshot, source=known.get(source) if source else None)
    for info in _sandboxes(lineage):
        nodes[_id(info["id"])] = Node(sandbox=info)
    above = _find_parents(lineage, nodes)
    roots: list[Node] = []
    gone = Node()
    # Sandboxes first, then snapshots, each in the order they came.
    for key, node in sorted(nodes.items(), key=lambda item: item[1].snapshot is not None):
        if parent := above.get(key):
            nodes[parent].below.append(node)
        else:
            (gone.below if node.sandbox else roots).append(node)
    return [*roots, gone] if gone.below else roots


def _find_parents(lineage: Lineage, nodes: dict[Key, Node]) -> dict[Key, Key]:
    """No node is below itself, whatever the daemon says: a sandbox that was rewound has its own checkpoint's tag."""
    tags = {snapshot["tag"]: snapshot for snapshot in lineage["snapshots"]}
    above: dict[Key, Key] = {}

    def put(key: Key, candidates: Iterable[Key]) -> None:
        for candidate in candidates:
            step: Key | None = candidate
            while step is not None and step != key:
                step = above.get(step)
            if candidate in nodes and step is None:
                above[key] = candidate
                return

    def chain(tag: str | None) -> Iterator[Key]:
        seen: set[str] = set()
        while tag is not None and tag not in seen:
            yield _tag(tag)
            seen.add(tag)
            tag = tags[tag]["parent_tag"] if tag in tags else None

    for tag, snapshot in tags.items():
        source = snapshot["branched_from"] if snapshot["checkpoint"] is not None else None
        put(_tag(tag), [*([_id(source)] if source else []), *chain(snapshot["parent_tag"])])
    for info in _sandboxes(lineage):
        parent = info["parent_id"]
        put(_id(info["id"]), [*([_id(parent)] if parent else []), *chain(info["snapshot_tag"])])
    return above


def _tag(tag: str) -> Key:
    return Key("snapshot", tag)


def _id(sandbox_id: str) -> Key:
    return Key("sandbox", sandbox_id)


def _sandboxes(lineage: Lineage) -> list[LineageSandbox]:
    return [info for snapshot in lineage["snapshots"] for info in snapshot["sandboxes"]] + lineage["orphans"]


def render_rows(
    nodes: Sequence[Node], lines: Sequence[str], now: float, before: str | None = None
) -> Iterator[dict[str, str]]:
    between, last, going_on, ended = lines
    for node in nodes:
        ends = node is nodes[-1]
        branch = "" if before is None else before + (last if ends else between)
        row = _render_node(node, now)
        yield row | {"LINEAGE": branch + row["LINEAGE"]}
        below = "" if before is None else before + (ended if ends else going_on)
        yield from render_rows(node.below, lines, now, below)


def _render_node(node: Node, now: float) -> dict[str, str]:
    if node.sandbox is not None:
        return _render_sandbox(node.sandbox, now)
    if node.snapshot is not None:
        return _render_snapshot(node.snapshot, node.source, now)
    return dict.fromkeys(_HEADINGS, "") | {"LINEAGE": _GONE}


def _render_snapshot(snapshot: LineageSnapshot, source: LineageSandbox | None, now: float) -> dict[str, str]:
    name = snapshot["checkpoint"]
    return {
        "LINEAGE": render_plain(f"@{name}" if name is not None else snapshot["tag"]),
        "STATE": snapshot["status"],
        "AGE": render_age(now - snapshot["created_at_unix"]),
        "HOLDS": render_size(snapshot["unique_bytes"]) if snapshot["status"] != "writing" else "",
        "NOTE": f"of {source['name'] or source['id']}" if source else "",
    }


def _render_sandbox(info: LineageSandbox, now: float) -> dict[str, str]:
    notes = [
        render_deadline(info, now),
        f"workspace {info['workspace']}" if info["workspace"] else "",
        info["cause"] or "",
    ]
    return {
        "LINEAGE": render_plain(" ".join(filter(None, [info["id"], info["name"]]))),
        "STATE": info["state"],
        "AGE": render_age(now - info["created_at_unix"]),
        "HOLDS": render_size(info["unique_bytes"]) if "unique_bytes" in info else "",
        "NOTE": render_plain(", ".join(filter(None, notes))),
    }


def render_summary(lineage: Lineage) -> str:
    sandboxes = _sandboxes(lineage)
    running = sum(info["state"] == "running" for info in sandboxes)
    checkpoints = sum(snapshot["checkpoint"] is not None for snapshot in lineage["snapshots"])
    disk = sum(snapshot["unique_bytes"] for snapshot in lineage["snapshots"])
    memory = sum(info.get("unique_bytes", 0) for info in sandboxes)
    parts = [
        _count(len(lineage["snapshots"]) - checkpoints, "snapshot"),
        _count(checkpoints, "checkpoint") if checkpoints else "",
        f"{_count(len(sandboxes), 'sandbox', 'sandboxes')}, {running} running" if sandboxes else "no sandboxes",
        f"{render_size(disk)} on disk",
        f"{render_size(memory)} in memory" if memory else "",
    ]
    return "; ".join(filter(None, parts))


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
