"""`forkd branch`, `checkpoint`, `rewind` and `promote`: a running sandbox is kept, goes back, or goes on elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from forkd.cli.arguments import add_daemon_options
from forkd.cli.connect import connect
from forkd.cli.output import note, print_rows, render_size, render_time, show
from forkd.cli.sandboxes import add_sandbox, print_sandboxes, resolve
from forkd.errors import InvalidInput
from forkd.model.names import parse_tag
from forkd.wire.api import CheckpointInfo, SandboxInfo, SnapshotInfo

_MODES = ("live", "diff", "full")
_HEADINGS = ("NAME", "STATUS", "CREATED", "PAUSED", "DIRTY")


def add_branch(parser: argparse.ArgumentParser) -> None:
    parser.description = "Freeze a running sandbox as a new snapshot. It runs on."
    add_sandbox(parser)
    parser.add_argument("--tag", metavar="NEW_TAG", help="the snapshot's name (default: a generated one)")
    parser.add_argument("--mode", choices=_MODES, default="live", help="how it is written (default live)")
    parser.add_argument("--no-wait", action="store_true", help="return while it is written; only with --mode live")
    add_daemon_options(parser, json="print one JSON object")


def run_branch(args: argparse.Namespace) -> int:
    tag = None if args.tag is None else parse_tag(args.tag)
    if args.no_wait and args.mode != "live":
        raise InvalidInput(f"--no-wait cannot be combined with --mode {args.mode}", hint="Leave --mode out")
    with connect(args) as controller:
        made = controller.branch_sandbox(resolve(controller, args.sandbox), tag, mode=args.mode, wait=not args.no_wait)
    return show(args, made, lambda made: print("  ".join([made["tag"], *render_branch(made)])))


def render_branch(info: SnapshotInfo) -> list[str]:
    """What is told of a branch beside its tag."""
    parts: list[str] = [] if info["status"] == "ready" else [info["status"]]
    if (pause_ms := info.get("pause_ms")) is not None:
        parts.append(f"paused {pause_ms} ms")
    if (written := info.get("diff_physical_bytes")) is not None:
        parts.append(f"{render_size(written)} on disk")
    return parts


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.description = "Remember where a sandbox is, to rewind it to; or list and delete its checkpoints."
    add_sandbox(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", help="of the checkpoint (default: a generated one)")
    parser.add_argument("--ls", action="store_true", help="list the checkpoints instead, oldest first")
    parser.add_argument("--rm", action="store_true", help="delete the checkpoint NAME instead")
    add_daemon_options(parser)


def run_checkpoint(args: argparse.Namespace) -> int:
    if args.ls and (args.rm or args.name):
        raise InvalidInput("--ls takes a sandbox and nothing else", hint="Write: forkd checkpoint SANDBOX --ls")
    if args.rm and not args.name:
        raise InvalidInput("--rm needs a checkpoint", hint="Write: forkd checkpoint SANDBOX NAME --rm")
    with connect(args) as controller:
        sandbox_id = resolve(controller, args.sandbox)
        if args.ls:
            return show(args, controller.list_checkpoints(sandbox_id), _print_checkpoints)
        if args.rm:
            controller.delete_checkpoint(sandbox_id, args.name)
            return show(args, {"removed": [args.name]})
        return show(args, controller.create_checkpoint(sandbox_id, args.name), _print_checkpoint)


def _print_checkpoint(info: CheckpointInfo) -> None:
    print(f"{info['name']}  paused {info['pause_ms']} ms")


def _print_checkpoints(infos: Sequence[CheckpointInfo]) -> None:
    if not infos:
        note("It has no checkpoints; make one with: forkd checkpoint SANDBOX")
        return
    rows = (
        (
            info["name"],
            info["status"],
            render_time(info["created_at_unix"]),
            f"{info['pause_ms']} ms",
            render_size(info["bytes_dirty"]) if "bytes_dirty" in info else "",
        )
        for info in infos
    )
    print_rows(_HEADINGS, rows)


def add_rewind(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Move a sandbox back to a checkpoint, in place: it keeps its id, address and limits. What it did since is gone."
    )
    add_sandbox(parser)
    parser.add_argument("name", metavar="NAME", nargs="?", help="the checkpoint (default: the newest)")
    parser.add_argument("--discard", action="store_true", help="delete the checkpoint afterwards")
    add_daemon_options(parser, json="print one JSON object")


def run_rewind(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        info = controller.rewind_sandbox(resolve(controller, args.sandbox), args.name, discard=args.discard)
    return show(args, info, _print_sandbox)


def add_promote(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Put a fork of a sandbox in that sandbox's place, which goes on from where the fork is. "
        "All of its forks are gone then."
    )
    add_sandbox(parser)
    parser.add_argument("--into", metavar="SANDBOX", help="the sandbox it was forked from (default: its parent)")
    add_daemon_options(parser, json="print one JSON object")


def run_promote(args: argparse.Namespace) -> int:
    with connect(args) as controller:
        child = resolve(controller, args.sandbox)
        parent = controller.get_sandbox(child)["parent_id"] if args.into is None else resolve(controller, args.into)
        if parent is None:
            raise InvalidInput(
                f"{child} was not forked from a sandbox", hint="Fork one with: forkd fork --from SANDBOX"
            )
        info = controller.promote_sandbox(parent, child)
    return show(args, info, _print_sandbox)


def _print_sandbox(info: SandboxInfo) -> None:
    print_sandboxes([info])
