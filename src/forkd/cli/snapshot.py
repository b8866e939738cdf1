"""`forkd snapshot`: create, list, inspect and remove frozen VMs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from forkd.cli.progress import Shown
from forkd.cli.running import run_async
from forkd.cli.tables import print_table, render_size
from forkd.errors import InvalidInput
from forkd.host.paths import find_home
from forkd.image import ImageStore
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.runtime.engines import open_engine
from forkd.runtime.freeze import create_snapshot
from forkd.runtime.session import session
from forkd.runtime.warmup import MAX_WARM_BYTES, Warmup
from forkd.store.snapshots import Snapshot, SnapshotStore, Unusable


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("snapshot", help="create, list, inspect and remove snapshots")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="boot an image, warm it up and freeze it")
    create.add_argument("--tag", required=True, help="the snapshot's name")
    create.add_argument("--image", required=True, help="name or id of the image to boot")
    create.add_argument("--memory", type=int, default=512, metavar="MIB", help="guest memory (default 512)")
    create.add_argument("--vcpus", type=int, default=1, metavar="N", help="virtual CPUs (default 1)")
    create.add_argument("--warm", metavar="CODE", help="Python to run in the interpreter, such as 'import numpy'")
    create.add_argument("--warm-script", metavar="FILE", help="the same, from a file")
    create.add_argument("--warm-command", metavar="COMMAND", help="shell command to run in the guest")
    create.add_argument("--warm-timeout", type=float, default=300.0, metavar="S", help="for each of them (default 300)")
    create.add_argument("--engine", help="default: what doctor chooses")
    create.add_argument("--replace", action="store_true", help="replace a snapshot of this tag")
    create.add_argument("--json", action="store_true", help="print one JSON object")
    create.set_defaults(func=run_create)
    listing = actions.add_parser("ls", help="list the snapshots")
    listing.add_argument("--json", action="store_true", help="print a JSON array")
    listing.set_defaults(func=run_ls)
    inspect = actions.add_parser("inspect", help="check a snapshot's files and show all about it")
    inspect.add_argument("tag")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(func=run_inspect)
    remove = actions.add_parser("rm", help="remove snapshots")
    remove.add_argument("tag", nargs="+")
    remove.add_argument("--json", action="store_true", help="print one JSON object")
    remove.set_defaults(func=run_rm)


def run_create(args: argparse.Namespace) -> int:
    tag = parse_tag(args.tag)
    machine = MachineSpec(args.memory, args.vcpus)
    warmup = Warmup(_warm_code(args.warm, args.warm_script), args.warm_command, args.warm_timeout)
    home = find_home()
    image = ImageStore(home).open(args.image)
    engine = open_engine(args.engine)
    with Shown(quiet=args.json) as shown, session(home.runtime) as directory:
        work = create_snapshot(
            engine,
            SnapshotStore(home.snapshots),
            image,
            tag,
            machine,
            warmup,
            directory,
            replace=args.replace,
            progress=shown,
        )
        snapshot = run_async(work)
    if args.json:
        print(json.dumps(render_snapshot(snapshot), indent=2))
    else:
        print(f"{tag}  {render_size(snapshot.disk_bytes())} on disk")
    return 0


def run_ls(args: argparse.Namespace) -> int:
    found = SnapshotStore(find_home().snapshots).list()
    if args.json:
        shown = [*map(render_snapshot, found.snapshots), *map(render_unusable, found.unusable)]
        print(json.dumps(sorted(shown, key=lambda entry: str(entry["tag"])), indent=2))
        return 0
    table = Table("TAG", "CREATED", "MEMORY", "VCPUS", "ON DISK", "ENGINE", "IMAGE", "WARM", box=None, pad_edge=False)
    for snapshot in found.snapshots:
        manifest = snapshot.manifest
        cells = (
            manifest.tag,
            _render_time(manifest.created_at_unix),
            f"{manifest.machine.memory_mib} MiB",
            str(manifest.machine.vcpus),
            render_size(snapshot.disk_bytes()),
            manifest.engine,
            manifest.image_id[:12],
            " ".join(manifest.warm.split())[:40],
        )
        table.add_row(*map(Text, cells))
    if found.snapshots or not found.unusable:
        print_table(table)
    for entry in found.unusable:
        print(f"warning: {entry.error.message}", file=sys.stderr)
        print(f"hint: {entry.error.hint}", file=sys.stderr)
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    with SnapshotStore(find_home().snapshots).held(parse_tag(args.tag)) as snapshot:
        shown = render_snapshot(snapshot)
    if args.json:
        print(json.dumps(shown, indent=2))
        return 0
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in shown.items():
        table.add_row(key, Text(value if isinstance(value, str) else json.dumps(value)))
    print_table(table)
    return 0


def run_rm(args: argparse.Namespace) -> int:
    tags = [parse_tag(text) for text in args.tag]
    SnapshotStore(find_home().snapshots).remove(*tags)
    if args.json:
        print(json.dumps({"removed": tags}))
    return 0


def render_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    manifest = snapshot.manifest
    return {
        "tag": manifest.tag,
        "created_at_unix": manifest.created_at_unix,
        "dir": str(snapshot.directory),
        "image_id": manifest.image_id,
        "memory_mib": manifest.machine.memory_mib,
        "vcpus": manifest.machine.vcpus,
        "warm": manifest.warm,
        "engine": manifest.engine,
        "platform": dict(manifest.platform),
        "disk_bytes": snapshot.disk_bytes(),
        "files": {name: entry.sha256 for name, entry in manifest.files.items()},
    }


def render_unusable(entry: Unusable) -> dict[str, Any]:
    error = entry.error
    return {
        "tag": entry.tag,
        "dir": str(entry.directory),
        "error": error.message,
        "code": error.code,
        "hint": error.hint,
    }


def _render_time(unix: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))


def _warm_code(code: str | None, script: str | None) -> str | None:
    if script is None:
        return code
    if code is not None:
        raise InvalidInput("--warm and --warm-script exclude each other", hint="Put the code into the script")
    try:
        with Path(script).open("rb") as file:
            return file.read(MAX_WARM_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidInput(
            f"The warm-up script {script} cannot be read: {why}", hint="--warm-script takes a Python file"
        ) from error
