"""`forkd pack`, `unpack`, `push` and `pull`: snapshots with all they stand on, to and from other machines."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from forkd.cli.arguments import add_daemon_options
from forkd.cli.connect import connect
from forkd.cli.output import note, render_size, show
from forkd.cli.suggestions import suggesting_snapshot
from forkd.errors import InvalidInput
from forkd.model.names import parse_tag

if TYPE_CHECKING:
    from forkd.client.resume import OnProgress, PackOptions
    from forkd.wire.api import PackImported

_TICK_S = 0.1
_REMOTE_TOKEN = "FORKD_REMOTE_TOKEN"


def add_pack(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a snapshot, its chain and its image into one signed file, for forkd unpack on another machine. "
        "The same snapshot is the same bytes."
    )
    parser.add_argument("tag", metavar="TAG")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write, or - for the output")
    _add_without_image(parser)
    add_daemon_options(parser)


def add_unpack(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Take in a pack. It is checked as it is read; nothing is visible before all of it is right. A key that is not "
        "known is refused, with its text, until --trust accepts it."
    )
    parser.add_argument("file", metavar="FILE", help="the pack, or - for the input")
    _add_import_options(parser)
    add_daemon_options(parser)


def add_push(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Send a snapshot to another daemon, or put its pack on a web server that takes PUT. To a daemon it goes on "
        "after a cut, and without the image if that is there already."
    )
    parser.add_argument("tag", metavar="TAG")
    parser.add_argument("place", metavar="URL", help="another daemon, or where a web server shall have the pack")
    _add_without_image(parser)
    _add_remote_token(parser)
    _add_import_options(parser, option="--as")
    add_daemon_options(parser)


def add_pull(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Take in a pack from a web server or from another daemon (its /v1/snapshots/TAG/pack). It goes on after a cut, "
        "and follows no redirect to another host. The key is remembered for the host."
    )
    parser.add_argument("place", metavar="URL", help="where the pack is")
    _add_remote_token(parser)
    _add_import_options(parser)
    add_daemon_options(parser)


def run_pack(args: argparse.Namespace) -> int:
    tag = parse_tag(args.tag)
    if args.json and args.output == "-":
        raise InvalidInput("--json and the pack would both go to standard output", hint="Leave --json out")
    size = 0
    with connect(args) as controller, suggesting_snapshot(controller, tag), _shown(args, "Packing") as on_progress:
        pieces = controller.pack_snapshot(tag, image=not args.without_image, on_progress=on_progress)
        with closing(pieces), _written(args.output) as file:
            for piece in pieces:
                file.write(piece)
                size += len(piece)
    if args.output == "-":
        return 0
    return show(args, {"tag": tag, "file": args.output, "bytes": size}, lambda _: print(f"{tag}  {render_size(size)}"))


def run_unpack(args: argparse.Namespace) -> int:
    from forkd.client.local_files import failing

    with connect(args) as controller, _shown(args, "Unpacking") as on_progress:
        if args.file == "-":
            done = controller.unpack_snapshot(sys.stdin.buffer, on_progress=on_progress, **_options(args))
        else:
            path = Path(args.file)
            with failing("read", path), path.open("rb") as file:
                done = controller.unpack_snapshot(file, on_progress=on_progress, **_options(args))
    return show(args, done, _print_imported)


def run_push(args: argparse.Namespace) -> int:
    tag = parse_tag(args.tag)
    with connect(args) as controller, suggesting_snapshot(controller, tag), _shown(args, "Sending") as on_progress:
        done = controller.push_snapshot(
            tag,
            args.place,
            remote_token=_remote_token(args),
            image=False if args.without_image else None,
            on_progress=on_progress,
            **_options(args),
        )
    if not args.json and done["imported"] is not None and (warning := done["imported"]["warning"]):
        note(f"warning: it cannot run there: {warning}")
    return show(args, done, lambda _: print(f"{tag}  {render_size(done['bytes'])} to {done['url']}"))


def run_pull(args: argparse.Namespace) -> int:
    with connect(args) as controller, _shown(args, "Receiving") as on_progress:
        done = controller.pull_snapshot(
            args.place, remote_token=_remote_token(args), on_progress=on_progress, **_options(args)
        )
    return show(args, done, _print_imported)


def _add_without_image(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without-image", action="store_true", help="leave the image out: whoever takes the pack must have it"
    )


def _add_remote_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--remote-token", metavar="TOKEN", help=f"what the other side asks for; else {_REMOTE_TOKEN}, else none"
    )


def _add_import_options(parser: argparse.ArgumentParser, option: str = "--tag") -> None:
    parser.add_argument(option, dest="new_tag", metavar="NEW_TAG", help="another tag for the snapshot there")
    parser.add_argument("--trust", action="store_true", help="accept a key that is not known, and remember it")
    parser.add_argument("--unsigned", action="store_true", help="accept a pack that nobody signed")
    parser.add_argument("--force", action="store_true", help="replace other snapshots that have the same tags")
    parser.add_argument("--keep-anyway", action="store_true", help="keep it though that daemon cannot run it")


def _options(args: argparse.Namespace) -> PackOptions:
    return {
        "tag": None if args.new_tag is None else parse_tag(args.new_tag),
        "trust": args.trust,
        "unsigned": args.unsigned,
        "force": args.force,
        "keep_anyway": args.keep_anyway,
    }


def _remote_token(args: argparse.Namespace) -> str | None:
    token: str | None = args.remote_token
    return token or os.environ.get(_REMOTE_TOKEN) or None


def _print_imported(done: PackImported) -> None:
    if done["warning"]:
        note(f"warning: it cannot run here: {done['warning']}")
    if done["network_dropped"]:
        names = ", ".join(done["network_dropped"])
        note(f"the network of {names} was dropped: say --allow when you fork")
    reused = f"; there already: {', '.join(done['reused'])}" if done["reused"] else ""
    signed = f"signed by {done['key']}" if done["key"] else "unsigned"
    print(f"{done['tag']}  {signed}{reused}")


@contextmanager
def _written(place: str) -> Iterator[BinaryIO]:
    """The file appears when it is complete."""
    from forkd.client.local_files import failing

    if place == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(place)
    with failing("written", target):
        if target.exists() and not target.is_file():  # a device or a pipe
            with target.open("wb", buffering=0) as plain:
                yield plain
            return
        part = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}")
        try:
            with part.open("xb") as file:
                yield file
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def _shown(args: argparse.Namespace, what: str) -> Iterator[OnProgress | None]:
    if args.json or not sys.stderr.isatty():
        yield None
        return
    from forkd.cli.progress import Shown

    with Shown(quiet=False) as shown:
        begun = time.monotonic()
        told = 0.0

        def tell(done_bytes: int, part: float | None) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told >= _TICK_S:
                told = now
                shown.stage(what)
                shown.line(render_progress(done_bytes, part, now - begun))

        yield tell


def render_progress(done_bytes: int, part: float | None, seconds: float) -> str:
    share = "" if part is None else f"{part:4.0%}  "
    speed = f"  {done_bytes / 2**20 / seconds:.0f} MiB/s" if seconds > 0 else ""
    return f"{share}{render_size(done_bytes)}{speed}"
