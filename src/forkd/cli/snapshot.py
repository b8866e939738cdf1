"""`forkd snapshot`: create, list, inspect, warm and remove frozen VMs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from forkd.cli.making import Order, make_snapshot
from forkd.cli.nouns import Nouns, add_action
from forkd.cli.plain import render_plain
from forkd.cli.reach import add_daemon_options, connect
from forkd.cli.tables import note, print_facts, print_json, print_rows, render_size, render_time
from forkd.errors import ForkdError, InvalidInput
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_image_name, parse_tag
from forkd.wire.api import SnapshotInfo

_HEADINGS = ("TAG", "STATUS", "CREATED", "MEMORY", "VCPUS", "ENGINE", "IMAGE", "TEMPLATE", "WARM")
_WARM_SHOWN = 40
_SCRIPT_BYTES = 512 * 1024  # what the daemon takes


def add_parser(nouns: Nouns[argparse.ArgumentParser]) -> None:
    parser = nouns.add_parser("snapshot", help="create, list, inspect, warm and remove snapshots")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    create = add_action(actions, "create", run_create, "boot an image, warm it up and freeze it")
    create.add_argument("--tag", required=True, metavar="NEW_TAG", help="the snapshot's name")
    create.add_argument("--image", required=True, metavar="IMAGE", help="name or id of the image to boot")
    create.add_argument("--memory", type=int, default=512, metavar="MIB", help="guest memory (default 512)")
    create.add_argument("--vcpus", type=int, default=1, metavar="N", help="virtual CPUs (default 1)")
    create.add_argument("--cpu-template", metavar="NAME", help="Firecracker's CPU template, such as T2 (default none)")
    create.add_argument("--warm", metavar="CODE", help="Python to run in the interpreter, such as 'import numpy'")
    create.add_argument("--warm-script", metavar="FILE", help="the same, from a file")
    create.add_argument("--warm-command", metavar="COMMAND", help="shell command to run in the guest")
    create.add_argument("--warm-timeout", type=float, default=300.0, metavar="S", help="for each of them (default 300)")
    create.add_argument("--rehearse", metavar="CODE", help="Python that forks of a template are to find warm")
    create.add_argument("--replace", action="store_true", help="replace a snapshot of this tag")
    listing = add_action(actions, "ls", run_ls, "list the snapshots")
    listing.add_argument("-q", "--quiet", action="store_true", help="print tags only")
    inspect = add_action(actions, "inspect", run_inspect, "show all about a snapshot")
    inspect.add_argument("tag", metavar="TAG")
    warm = add_action(actions, "warm", run_warm, "make a template of a snapshot ahead of its first fork")
    warm.add_argument("tag", metavar="TAG")
    remove = add_action(actions, "rm", run_rm, "remove snapshots; one that is being made is given up")
    remove.add_argument("tag", nargs="+", metavar="TAG")
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true", help="print JSON")
        add_daemon_options(action)


def run_create(args: argparse.Namespace) -> int:
    machine = MachineSpec(args.memory, args.vcpus, args.cpu_template)
    order = Order(
        tag=parse_tag(args.tag),
        image=parse_image_name(args.image),
        memory_mib=machine.memory_mib,
        vcpus=machine.vcpus,
        cpu_template=machine.cpu_template,
        warm=_warm_code(args.warm, args.warm_script),
        warm_command=args.warm_command,
        warm_timeout_s=args.warm_timeout,
        rehearse=_checked_text(args.rehearse, "rehearsal"),
        replace=args.replace,
    )
    made = make_snapshot(args, order)
    if args.json:
        print_json(made)
    else:
        print(f"{order.tag}  {render_size(made['memory_physical_bytes'])} on disk")
    return 0


def run_ls(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        found = controller.list_snapshots()
        templates = set() if args.json or args.quiet else {info["tag"] for info in controller.list_templates()}
    if args.json:
        print_json(found)
        return 0
    if args.quiet:
        for info in found:
            print(info["tag"])
        return 0
    usable = [info for info in found if info["status"] != "failed"]
    rows = [_render_row(info, info["tag"] in templates) for info in usable]
    shown = [name for name in _HEADINGS if name != "TEMPLATE" or any(row[name] for row in rows)]
    print_rows(shown, ([row[name] for name in shown] for row in rows), folded=("WARM",))
    for info in found:
        if warning := info.get("warning"):
            print(f"warning: {info['tag']}: {render_plain(warning)}", file=sys.stderr)
            if info["status"] == "failed":
                print(f"hint: Remove it with: forkd snapshot rm {info['tag']}", file=sys.stderr)
    if not found:
        note("There are no snapshots; make one with: forkd snapshot create --image IMAGE --tag TAG")
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    tag = parse_tag(args.tag)
    with connect(args) as controller:
        info = controller.get_snapshot(tag)
        if info["status"] == "failed":
            raise _failure(info)
        shown: dict[str, Any] = {**info, **controller.snapshot_info(tag)}
    if args.json:
        print_json(shown)
    else:
        print_facts(shown)
    return 0


def run_warm(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        info = controller.warm_snapshot(parse_tag(args.tag))
    if args.json:
        print_json(info)
    else:
        held, made_in_s = render_size(info["memory_bytes"]), info["made_in_seconds"]
        print(f"{info['tag']}  template of {held}, made in {made_in_s:.2f} s")
    return 0


def run_rm(args: argparse.Namespace) -> int:
    tags = list(dict.fromkeys(parse_tag(text) for text in args.tag))
    with connect(args) as controller:
        for tag in tags:
            controller.get_snapshot(tag)  # a mistyped one is found before others are gone
        for tag in tags:
            controller.delete_snapshot(tag)
    if args.json:
        print_json({"removed": tags})
    return 0


def _render_row(info: SnapshotInfo, template: bool) -> dict[str, str]:
    """What is not known yet of one that is being made is left open."""
    memory = info.get("memory_mib")
    return {
        "TAG": info["tag"],
        "STATUS": info["status"],
        "CREATED": render_time(info["created_at_unix"]),
        "MEMORY": f"{memory} MiB" if memory else "",
        "VCPUS": str(info.get("vcpus", "")),
        "ENGINE": info.get("engine", ""),
        "IMAGE": info.get("image_id", "")[:12],
        "TEMPLATE": "yes" if template else "",
        "WARM": (" ".join(info.get("warm", "").split()) or info.get("progress", ""))[:_WARM_SHOWN],
    }


def _failure(info: SnapshotInfo) -> ForkdError:
    """What a snapshot that cannot be used is: damaged, or never made."""
    from forkd.client.failures import BY_CODE

    kind = BY_CODE.get(info.get("code", ""), ForkdError)
    return kind(info.get("warning", "It cannot be used"), hint=f"Remove it with: forkd snapshot rm {info['tag']}")


def _warm_code(code: str | None, script: str | None) -> str | None:
    if script is None:
        return _checked_text(code, "warm-up")
    if code is not None:
        raise InvalidInput("--warm and --warm-script exclude each other", hint="Put the code into the script")
    try:
        with Path(script).open("rb") as file:
            text = file.read(_SCRIPT_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidInput(
            f"The warm-up script {script} cannot be read: {why}", hint="--warm-script takes a Python file"
        ) from error
    if len(text.encode()) > _SCRIPT_BYTES:
        raise InvalidInput(
            f"The warm-up script {script} is larger than {_SCRIPT_BYTES} bytes",
            hint="Put the code into the image and import it",
        )
    return text


def _checked_text(code: str | None, what: str) -> str | None:
    try:
        (code or "").encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"The {what} is not UTF-8 text", hint="Put it into a script saved as UTF-8") from None
    return code
