"""`forkd diff` and `forkd merge`: what sandboxes have written, compared, and brought from a child to its parent."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from forkd.cli.arguments import add_daemon_options
from forkd.cli.connect import connect
from forkd.cli.interrupts import Interrupts
from forkd.cli.output import note, print_json, render_plain
from forkd.cli.sandboxes import resolve
from forkd.errors import ForkdError, NotFound

if TYPE_CHECKING:
    from forkd.client import Controller
    from forkd.client.merge_plan import MergePlan
    from forkd.client.written import Difference, Facts

_DIFFERENT = 1
_TROUBLE = 2
_CONFLICT = 4
_MAX_PATCH_BYTES = 1 << 20
_COLOURS = {"added": "32", "removed": "31", "changed": "33"}
_PATCH_COLOURS = {"+": "32", "-": "31", "@": "36"}
_NO_NEWLINE = "\\ No newline at end of file"


def add_diff(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare the files of two sandboxes or snapshots. Both must come from the same image: only what was written "
        "over it, and in /tmp, is looked at. A snapshot is forked for the time of that. Exits with 0 when nothing is "
        "different, with 1 when something is, with more when it failed."
    )
    parser.add_argument("before", metavar="A", help="a sandbox, or the tag of a snapshot")
    parser.add_argument("after", metavar="B", help="the other one: what is only here was added")
    parser.add_argument("--patch", action="store_true", help="show the lines of text files, as diff -u does")
    parser.add_argument("--name-only", action="store_true", help="print paths only")
    add_daemon_options(parser, json="print a JSON array")


def run_diff(args: argparse.Namespace) -> int:
    from forkd.client.comparing import compare_sandboxes

    try:
        with connect(args) as controller, Interrupts():
            with _found(controller, args.before) as before, _found(controller, args.after) as after:
                found = compare_sandboxes(controller, before, after).differences
                if args.json:
                    print_json([render_difference(each) for each in found])
                else:
                    _print(args, controller, (before, after), found)
    except ForkdError as error:
        if error.exit_code == _DIFFERENT:
            error.exit_code = _TROUBLE
        raise
    return _DIFFERENT if found else 0


def _print(
    args: argparse.Namespace, controller: Controller, ids: tuple[str, str], found: tuple[Difference, ...]
) -> None:
    coloured = sys.stdout.isatty()
    for each in found:
        if args.name_only:
            print(render_plain(each.path))
            continue
        if not args.patch or not _is_file(each):
            _print_line(render_plain(render_line(each)), _COLOURS[each.kind] if coloured else None)
            continue
        for line in _patch(controller, ids, each):
            _print_line(render_plain(line) if coloured else line, _PATCH_COLOURS.get(line[:1]) if coloured else None)


def _print_line(line: str, colour: str | None) -> None:
    text = line if colour is None else f"\x1b[{colour}m{line}\x1b[0m"
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape") + b"\n")


@contextmanager
def _found(controller: Controller, name: str) -> Iterator[str]:
    """The id of a sandbox; of a snapshot's tag that of a fork of it."""
    from forkd.client.comparing import found

    try:
        name = resolve(controller, name)
    except NotFound:
        pass  # it may be a tag
    with found(controller, name) as sandbox_id:
        yield sandbox_id


def render_difference(each: Difference) -> dict[str, Any]:
    before, after = (None if facts is None else asdict(facts) for facts in (each.before, each.after))
    return {"path": each.path, "kind": each.kind, "before": before, "after": after}


def render_line(each: Difference) -> str:
    """`changed  /path  what of it`, when that is not the content."""
    path = each.path + ("/" if _kind_of(each) == "dir" else "")
    return f"{each.kind:9}{path}{_details(each)}"


def _kind_of(each: Difference) -> str:
    facts = each.after if each.after is not None else each.before
    assert facts is not None
    return facts.type


def _details(each: Difference) -> str:
    before, after = each.before, each.after
    if before is None or after is None:
        return ""
    parts = []
    if before.type != after.type:
        parts.append(f"{before.type} -> {after.type}")
    elif before.target != after.target:
        parts.append(f"{before.target} -> {after.target}")
    if before.mode != after.mode:
        parts.append(f"mode {before.mode:o} -> {after.mode:o}")
    if (before.uid, before.gid) != (after.uid, after.gid):
        parts.append(f"owner {before.uid}:{before.gid} -> {after.uid}:{after.gid}")
    return f"  ({', '.join(parts)})" if parts else ""


def _is_file(each: Difference) -> bool:
    return all(facts is None or facts.type == "file" for facts in (each.before, each.after))


def _patch(controller: Controller, ids: tuple[str, str], each: Difference) -> Iterator[str]:
    """The lines of one file that differ, or one that says why they are not shown."""
    sides = (each.before, each.after)
    if any(facts is not None and facts.size > _MAX_PATCH_BYTES for facts in sides):
        yield f"{render_line(each)}  (larger than {_MAX_PATCH_BYTES >> 20} MiB)"
        return
    old, new = (_read(controller, sandbox_id, each.path, facts) for sandbox_id, facts in zip(ids, sides, strict=True))
    yield from render_patch(each, old, new)


def _read(controller: Controller, sandbox_id: str, path: str, facts: Facts | None) -> bytes:
    if facts is None:
        return b""
    return b"".join(controller.read_file_stream(sandbox_id, path, _MAX_PATCH_BYTES))


def render_patch(each: Difference, old: bytes, new: bytes) -> Iterator[str]:
    """Without line ends."""
    import difflib

    before, after = _decode(old), _decode(new)
    if before is None or after is None:
        yield f"{render_line(each)}  (binary)"
        return
    if old == new:
        yield render_line(each)
        return
    names = [
        "/dev/null" if facts is None else f"{side}{each.path}"
        for side, facts in (("a", each.before), ("b", each.after))
    ]
    for line in difflib.unified_diff(_split(before), _split(after), names[0], names[1]):
        yield line.rstrip("\n")
        if not line.endswith("\n"):
            yield _NO_NEWLINE


def _split(text: str) -> list[str]:
    """At line feeds only, as diff(1) does."""
    lines = text.split("\n")
    last = lines.pop()
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def _decode(data: bytes) -> str | None:
    """None: it is not text."""
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def add_merge(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Bring what a sandbox has written since it was forked to its parent: files, links, modes, owners, new "
        "directories and deletions. Where both have changed the same path, all such paths are named and nothing is "
        "written."
    )
    parser.add_argument("child", metavar="CHILD", help="a name, an id, or the beginning of one")
    parser.add_argument(
        "--into", metavar="PARENT", help="its parent (the default), or another sandbox of the same snapshot"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    parser.add_argument("--force", action="store_true", help="where both have changed, the child wins")
    add_daemon_options(parser, json="print one JSON object")


def run_merge(args: argparse.Namespace) -> int:
    from forkd.client.merging import merge

    with connect(args) as controller, Interrupts():
        child = resolve(controller, args.child)
        parent = None if args.into is None else resolve(controller, args.into)
        plan = merge(controller, child, parent, force=args.force, dry_run=args.dry_run)
    if args.json:
        print_json(render_plan(plan, dry_run=args.dry_run))
    else:
        _print_plan(plan, dry_run=args.dry_run)
    return _CONFLICT if args.dry_run and plan.conflicts and not args.force else 0


def render_plan(plan: MergePlan, *, dry_run: bool) -> dict[str, Any]:
    return {
        "written": [each.path for each in plan.write],
        "removed": [each.path for each in plan.remove],
        "conflicts": [{"path": each.path, "why": each.why} for each in plan.conflicts],
        "skipped": [{"path": each.path, "why": each.why} for each in plan.skipped],
        "dry_run": dry_run,
    }


def _print_plan(plan: MergePlan, *, dry_run: bool) -> None:
    for each in plan.remove:
        print(render_plain(f"removed  {each.path}"))
    for each in plan.write:
        print(render_plain(f"written  {each.path}"))
    for conflict in plan.conflicts:
        note(f"conflict: {conflict.path}: {conflict.why}{'; kept' if conflict.kept else ''}")
    for left in plan.skipped:
        note(f"warning: left out {left.path}: {left.why}")
    if plan.empty and not plan.conflicts:
        note("There is nothing to merge")
    elif dry_run:
        note("Nothing was written: this was a dry run")
