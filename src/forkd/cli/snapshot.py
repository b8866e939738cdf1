"""`forkd snapshot`: create, list, inspect, warm and remove frozen VMs; chains.py has what is about layers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forkd.cli.arguments import add_daemon_options, add_duration
from forkd.cli.chains import add_chain_actions
from forkd.cli.commands import Actions
from forkd.cli.connect import connect
from forkd.cli.making import make_snapshot
from forkd.cli.network import add_network_options, parse_options, render_line
from forkd.cli.output import note, print_columns, print_facts, print_lines, render_size, render_time, show
from forkd.cli.suggestions import suggesting_snapshot
from forkd.errors import ForkdError, InvalidInput, NotFound
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_image_name, parse_tag
from forkd.wire.api import SnapshotInfo, TemplateInfo

_HEADINGS = ("TAG", "STATUS", "CREATED", "MEMORY", "VCPUS", "ENGINE", "IMAGE", "PARENT", "TEMPLATE", "WARM")
_WARM_SHOWN = 40
_SCRIPT_BYTES = 512 * 1024  # the largest the daemon takes


def add_snapshot(parser: argparse.ArgumentParser) -> None:
    actions = Actions(parser)
    create = actions.add("create", run_create, "boot an image, warm it up and freeze it")
    create.add_argument("--tag", required=True, metavar="NEW_TAG", help="the snapshot's name")
    create.add_argument("--image", required=True, metavar="IMAGE", help="name or id of the image to boot")
    create.add_argument("--memory", type=int, default=512, metavar="MIB", help="guest memory (default 512)")
    create.add_argument("--vcpus", type=int, default=1, metavar="N", help="virtual CPUs (default 1)")
    create.add_argument("--cpu-template", metavar="NAME", help="Firecracker's CPU template, such as T2 (default none)")
    create.add_argument("--warm", metavar="CODE", help="Python to run in the interpreter, such as 'import numpy'")
    create.add_argument("--warm-script", metavar="FILE", help="the same, from a file")
    create.add_argument("--warm-command", metavar="COMMAND", help="shell command to run in the guest")
    add_duration(create, "--warm-timeout", "limit for each warm-up, such as 90s or 10m (default 300)", 300.0)
    create.add_argument(
        "--rehearse", metavar="CODE", help="Python to run in a template, so that its forks run it faster"
    )
    add_network_options(create)
    create.add_argument("--replace", action="store_true", help="replace the snapshot that has this tag")
    listing = actions.add("ls", run_ls, "list the snapshots")
    listing.add_argument("-q", "--quiet", action="store_true", help="print tags only")
    inspect = actions.add("inspect", run_inspect, "show everything about a snapshot")
    inspect.add_argument("tag", metavar="TAG")
    warm = actions.add("warm", run_warm, "make a template of a snapshot before its first fork")
    warm.add_argument("tag", metavar="TAG")
    add_chain_actions(actions)
    remove = actions.add("rm", run_rm, "remove snapshots; one that is being made is cancelled")
    remove.add_argument("tag", nargs="+", metavar="TAG")
    remove.add_argument("--cascade", action="store_true", help="also those that are layers of them")
    remove.add_argument("--force", action="store_true", help="even if others are layers of them, which are lost then")
    for action in actions.parsers():
        add_daemon_options(action)


def run_create(args: argparse.Namespace) -> int:
    tag, request = parse_tag(args.tag), render_request(args)
    with connect(args) as controller:
        make_snapshot(args, controller, tag, lambda: controller.create_snapshot(**request))
        made: dict[str, Any] = {**controller.get_snapshot(tag), **controller.snapshot_info(tag)}
    return show(args, made, lambda _: print(f"{tag}  {render_size(made['memory_physical_bytes'])} on disk"))


def render_request(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `create_snapshot`."""
    machine = MachineSpec(args.memory, args.vcpus, args.cpu_template)
    return {
        "tag": parse_tag(args.tag),
        "image": parse_image_name(args.image),
        "memory_mib": machine.memory_mib,
        "vcpus": machine.vcpus,
        "cpu_template": machine.cpu_template,
        "warm": _warm_code(args.warm, args.warm_script),
        "warm_command": args.warm_command,
        "warm_timeout_secs": args.warm_timeout,
        "rehearse": _checked_text(args.rehearse, "rehearsal"),
        "network": parse_options(args),
        "replace": args.replace,
        "wait": True,
    }


def run_ls(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        found = controller.list_snapshots()
        templates = set() if args.json or args.quiet else {info["tag"] for info in controller.list_templates()}
    if args.json or args.quiet:
        return show(args, found, lambda _: print_lines(info["tag"] for info in found))
    rows = [_render_row(info, info["tag"] in templates) for info in found if info["status"] != "failed"]
    print_columns(rows, _HEADINGS, always=set(_HEADINGS) - {"PARENT", "TEMPLATE"})
    for info in found:
        if warning := info.get("warning"):
            note(f"warning: {info['tag']}: {warning}")
            if info["status"] == "failed":
                note(f"hint: Remove it with: forkd snapshot rm {info['tag']}")
    if not found:
        note("There are no snapshots; make one with: forkd snapshot create --image IMAGE --tag TAG")
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    tag = parse_tag(args.tag)
    with connect(args) as controller, suggesting_snapshot(controller, tag):
        info = controller.get_snapshot(tag)
        if info["status"] == "failed":
            raise _failure(info)
        shown: dict[str, Any] = {**info, **controller.snapshot_info(tag)}
    return show(args, shown, lambda shown: print_facts(_render_facts(shown)))


def _render_facts(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Every field under its own name; sizes as people read them, the chain from its root to this one."""
    facts = dict(shown)
    for name in [name for name in facts if name.endswith("_bytes")]:
        facts[name] = f"{facts[name]} ({render_size(facts[name])})"
    facts["created_at_unix"] = f"{facts['created_at_unix']} ({render_time(facts['created_at_unix'])})"
    facts["ancestors"] = " > ".join([*facts["ancestors"], facts["tag"]]) if facts["ancestors"] else "none"
    if "network" in facts:
        facts["network"] = render_line(facts["network"])
    facts["dependents"] = ", ".join(facts["dependents"]) or "none"
    return facts


def run_warm(args: argparse.Namespace) -> int:
    tag = parse_tag(args.tag)
    with connect(args) as controller, suggesting_snapshot(controller, tag):
        info = controller.warm_snapshot(tag)
    return show(args, info, _print_template)


def _print_template(info: TemplateInfo) -> None:
    print(f"{info['tag']}  template of {render_size(info['memory_bytes'])}, made in {info['made_in_seconds']:.2f} s")


def run_rm(args: argparse.Namespace) -> int:
    if args.cascade and args.force:
        raise InvalidInput("--cascade and --force cannot be combined", hint="Leave --force out")
    tags = [parse_tag(text) for text in args.tag]
    with connect(args) as controller:
        found: dict[str, SnapshotInfo] = {tag: controller.get_snapshot(tag) for tag in tags}
        for tag in layers_first(found):
            with suppress(*((NotFound,) if args.cascade else ())):  # gone with another of them
                controller.delete_snapshot(tag, cascade=args.cascade, force=args.force)
    return show(args, {"removed": list(found)})


def layers_first(found: Mapping[str, SnapshotInfo]) -> list[str]:
    """An order in which each comes before what it is a layer of, if that is among them."""

    def depth(tag: str) -> int:
        steps, parent = 0, found[tag].get("parent_tag")
        while parent is not None and parent in found and steps < len(found):
            steps, parent = steps + 1, found[parent].get("parent_tag")
        return steps

    return sorted(found, key=depth, reverse=True)


def _render_row(info: SnapshotInfo, template: bool) -> dict[str, str]:
    """What is not known yet of one that is being made stays empty."""
    memory = info.get("memory_mib")
    return {
        "TAG": info["tag"],
        "STATUS": info["status"],
        "CREATED": render_time(info["created_at_unix"]),
        "MEMORY": f"{memory} MiB" if memory else "",
        "VCPUS": str(info.get("vcpus", "")),
        "ENGINE": info.get("engine", ""),
        "IMAGE": info.get("image_id", "")[:12],
        "PARENT": info.get("parent_tag", ""),
        "TEMPLATE": "yes" if template else "",
        "WARM": (" ".join(info.get("warm", "").split()) or info.get("progress", ""))[:_WARM_SHOWN],
    }


def _failure(info: SnapshotInfo) -> ForkdError:
    """Why a snapshot cannot be used: it is damaged, or was never made."""
    from forkd.client.failures import BY_CODE

    kind = BY_CODE.get(info.get("code", ""), ForkdError)
    return kind(info.get("warning", "It cannot be used"), hint=f"Remove it with: forkd snapshot rm {info['tag']}")


def _warm_code(code: str | None, script: str | None) -> str | None:
    if script is None:
        return _checked_text(code, "warm-up")
    if code is not None:
        raise InvalidInput("--warm and --warm-script cannot be combined", hint="Put the code into the script")
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
