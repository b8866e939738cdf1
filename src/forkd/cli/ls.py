"""`forkd ls`: the sandboxes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from forkd.cli.nouns import Nouns
from forkd.cli.pairs import parse_pairs, render_pairs
from forkd.cli.reach import add_daemon_options, connect
from forkd.cli.tables import note, print_json, print_rows, render_age
from forkd.wire.api import SandboxInfo

STATES = ("starting", "running", "paused", "stopping", "dead")


def add_parser(nouns: Nouns[argparse.ArgumentParser]) -> None:
    parser = nouns.add_parser("ls", help="list the sandboxes", description="List the sandboxes, oldest first.")
    parser.add_argument("--tag", metavar="TAG", help="only those of this snapshot")
    parser.add_argument("--state", choices=STATES, help="only those in this state")
    parser.add_argument("-l", "--label", action="append", default=[], metavar="K=V", help="only those labelled so")
    parser.add_argument("--metadata", action="append", default=[], metavar="K=V", help="only those with this metadata")
    parser.add_argument("-q", "--quiet", action="store_true", help="print ids only")
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    add_daemon_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    labels, metadata = parse_pairs(args.label, "--label"), parse_pairs(args.metadata, "--metadata")
    with connect(args) as controller:
        found = controller.list_sandboxes(state=args.state, snapshot_tag=args.tag, labels=labels, metadata=metadata)
    if args.json:
        print_json(found)
    elif args.quiet:
        for info in found:
            print(info["id"])
    else:
        print_sandboxes(found)
        if not found:
            filtered = args.tag or args.state or labels or metadata
            note("No sandbox is like that" if filtered else "There are no sandboxes; fork some with: forkd fork TAG")
    return 0


def print_sandboxes(found: Sequence[SandboxInfo]) -> None:
    """Columns that nothing is in are left out."""
    now = time.time()
    rows = [render_row(info, now) for info in found]
    always = {"ID", "SNAPSHOT", "STATE", "AGE", "ADDRESS"}
    shown = [name for name in render_headings() if name in always or any(row[name] for row in rows)]
    print_rows(shown, ([row[name] for name in shown] for row in rows), folded=("LABELS", "CAUSE"))


def render_headings() -> tuple[str, ...]:
    return ("ID", "SNAPSHOT", "STATE", "AGE", "ADDRESS", "DEADLINE", "WORKSPACE", "LABELS", "CAUSE")


def render_row(info: SandboxInfo, now: float) -> dict[str, str]:
    return {
        "ID": info["id"],
        "SNAPSHOT": info["snapshot_tag"],
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
