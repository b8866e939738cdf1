"""`forkd cp`: files and directories into and out of a sandbox."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from forkd.cli.download import download, stream_out
from forkd.cli.nouns import Nouns
from forkd.cli.reach import add_daemon_options, connect
from forkd.cli.sandbox_ids import resolve
from forkd.cli.tables import note, print_json
from forkd.cli.transfers import Tally
from forkd.cli.upload import stream_in, upload
from forkd.errors import InvalidInput

_REMOTE = re.compile(r"([A-Za-z0-9_-]+):(/.*)", re.DOTALL)
_FORM = "forkd cp FILE SANDBOX:/path, or forkd cp SANDBOX:/path FILE"


@dataclass(frozen=True)
class Remote:
    sandbox: str
    path: str


def add_parser(nouns: Nouns[argparse.ArgumentParser]) -> None:
    parser = nouns.add_parser(
        "cp",
        help="copy files into and out of a sandbox",
        description="Copy a file or a directory into a sandbox or out of it. One side is SANDBOX:/path; - is standard "
        "input or output. Symlinks and special files inside a directory are left out, and named.",
    )
    parser.add_argument("source", metavar="FROM", help="a path, SANDBOX:/path, or -")
    parser.add_argument("target", metavar="TO", help="a path, SANDBOX:/path, or -")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_daemon_options(parser)
    parser.set_defaults(func=run)


def parse_place(text: str) -> Remote | str:
    """What has an id, a colon and an absolute path is in a sandbox; `./` before a name keeps it here."""
    found = _REMOTE.fullmatch(text)
    return Remote(found[1], found[2]) if found else text


def run(args: argparse.Namespace) -> int:
    source, target = parse_place(args.source), parse_place(args.target)
    if isinstance(source, Remote) == isinstance(target, Remote):
        raise InvalidInput(
            "forkd cp copies between this machine and one sandbox" + _WHICH[isinstance(source, Remote)],
            hint=f"Write {_FORM}",
        )
    if args.json and target == "-":
        raise InvalidInput("--json and the file would both go to standard output", hint="Leave --json out")
    tally = Tally()
    with connect(args) as controller:
        if isinstance(source, Remote):
            sandbox_id = resolve(controller, source.sandbox)
            if target == "-":
                stream_out(controller, sandbox_id, source.path, sys.stdout.buffer, tally)
            else:
                download(controller, sandbox_id, source.path, Path(str(target)), tally)
        elif isinstance(target, Remote):
            sandbox_id = resolve(controller, target.sandbox)
            if source == "-":
                stream_in(controller, sandbox_id, sys.stdin.buffer, target.path, tally)
            else:
                upload(controller, sandbox_id, Path(str(source)), target.path, tally, into=target.path.endswith("/"))
    for skipped in tally.skipped:
        note(f"warning: left out {skipped.path}: {skipped.why}")
    if args.json:
        print_json(tally.render())
    return 0


_WHICH = {True: "; both are in a sandbox", False: "; neither is SANDBOX:/path"}
