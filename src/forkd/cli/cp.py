"""`forkd cp`: files and directories into and out of a sandbox, and between two.

Names and files in a sandbox are not trusted: nothing is written outside the target, or through a link in it.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from forkd.cli.arguments import add_daemon_options
from forkd.cli.connect import connect
from forkd.cli.output import note, print_json, render_size
from forkd.cli.sandboxes import resolve
from forkd.errors import ForkdError, InvalidInput, NotFound, ProtocolError

if TYPE_CHECKING:
    from forkd.client import Controller
    from forkd.client.local_files import OnBytes
    from forkd.client.results import CopyInfo

_REMOTE = re.compile(r"([A-Za-z0-9_-]+):(/.*)", re.DOTALL)
_PATIENCE_S = 1.0  # a copy that takes longer shows how far it is


@dataclass(frozen=True)
class Remote:
    sandbox: str
    path: str


@dataclass(frozen=True)
class Guest:
    """The files of one sandbox."""

    controller: Controller
    sandbox_id: str
    on_bytes: OnBytes | None


def add_cp(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Copy a file or a directory into a sandbox, out of it, or from one to another. SANDBOX:/path is in a sandbox; "
        "the other side may be a path here, or - for standard input or "
        "output. Symlinks, modes and modification times are kept. Special files inside a directory are left out, and "
        "on the way out of a sandbox symlinks that lead out of the copy, with a warning."
    )
    parser.add_argument("source", metavar="FROM", help="a path, SANDBOX:/path, or -")
    parser.add_argument("target", metavar="TO", help="a path, SANDBOX:/path, or -")
    add_daemon_options(parser, json="print one JSON object")


def run_cp(args: argparse.Namespace) -> int:
    source, target = parse_place(args.source), parse_place(args.target)
    if args.json and target == "-":
        raise InvalidInput("--json and the file would both go to standard output", hint="Leave --json out")
    if isinstance(source, Remote) and isinstance(target, str):
        with _opened(args, source.sandbox) as guest:
            copied = _download(guest, source.path, target)
    elif isinstance(source, str) and isinstance(target, Remote):
        with _opened(args, target.sandbox) as guest:
            copied = _upload(guest, source, target.path)
    elif isinstance(source, Remote) and isinstance(target, Remote):
        with _opened(args, source.sandbox) as guest:
            copied = _across(guest, source.path, target)
    else:
        raise InvalidInput(
            "forkd cp copies into a sandbox, out of it, or between two; neither is SANDBOX:/path",
            hint="Write: forkd cp FILE SANDBOX:/path, or forkd cp SANDBOX:/path FILE",
        )
    for skipped in copied.skipped:
        note(f"warning: left out {skipped.path}: {skipped.why}")
    if args.json:
        print_json(asdict(copied))
    return 0


def parse_place(text: str) -> Remote | str:
    """An id, a colon and an absolute path are in a sandbox; `./` before a name keeps it on this machine."""
    found = _REMOTE.fullmatch(text)
    return Remote(found[1], found[2]) if found else text


@contextmanager
def _opened(args: argparse.Namespace, sandbox: str) -> Iterator[Guest]:
    with connect(args) as controller, _progress(quiet=args.json) as on_bytes:
        yield Guest(controller, resolve(controller, sandbox), on_bytes)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[OnBytes | None]:
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from forkd.cli.progress import Shown

    with Shown(quiet=False) as shown:
        copied_bytes, begun = 0, time.monotonic()

        def count(size: int) -> None:
            nonlocal copied_bytes
            copied_bytes += size
            if time.monotonic() - begun > _PATIENCE_S:
                shown.stage("Copying")
                shown.line(render_size(copied_bytes))

        yield count


def _download(guest: Guest, source: str, place: str) -> CopyInfo:
    """Like cp -r: into the target when it is a directory, else under that name."""
    from forkd.client.copying import download_directory, download_file
    from forkd.client.local_files import failing

    if place == "-":
        return _stream_out(guest, source, sys.stdout.buffer)
    directory = _is_directory(guest, source)
    target, name = Path(place), last_name(source)
    if target.is_dir() and name:
        target = target / check_name(name)
    if directory:
        return download_directory(guest.controller, guest.sandbox_id, source, target, guest.on_bytes)
    # The target that the user names may be a link or a device. What the guest names may not.
    real = Path(os.path.realpath(target))
    if real.exists() and not real.is_file() and not real.is_dir():
        with failing("written", target), real.open("wb", buffering=0) as file:
            return _stream_out(guest, source, file)
    return download_file(guest.controller, guest.sandbox_id, source, target, guest.on_bytes)


def _stream_out(guest: Guest, source: str, output: BinaryIO) -> CopyInfo:
    from forkd.client.results import CopyInfo

    size = 0
    for chunk in guest.controller.read_file_stream(guest.sandbox_id, source):
        output.write(chunk)
        size += len(chunk)
    output.flush()
    return CopyInfo(1, size)


def _upload(guest: Guest, place: str, target: str) -> CopyInfo:
    """Like cp -r: into the target when it is a directory or ends in a slash, else under that name."""
    from forkd.client.copying import upload
    from forkd.client.local_files import chunks_of, failing
    from forkd.client.results import CopyInfo

    if place == "-":
        written = guest.controller.write_file(guest.sandbox_id, target, chunks_of(sys.stdin.buffer, guest.on_bytes))
        return CopyInfo(1, written["size"])
    source = Path(place)
    with failing("read", source):
        source.stat()
    name = last_name(os.fspath(source.absolute()) if source.name in ("", "..") else place)
    return upload(guest.controller, guest.sandbox_id, source, _place(guest, target, name), guest.on_bytes)


def _place(guest: Guest, target: str, name: str) -> str:
    """Where a copy goes: into the target when it is a directory or ends in a slash, else under that name."""
    try:
        into = _is_directory(guest, target)
    except NotFound:
        into = target.endswith("/")
    return posixpath.join(target, name) if into and name else target


def _across(guest: Guest, source: str, target: Remote) -> CopyInfo:
    """Like an upload; nothing is kept here on the way."""
    from forkd.client.copying import copy

    other = Guest(guest.controller, resolve(guest.controller, target.sandbox), guest.on_bytes)
    _is_directory(guest, source)  # raises when there is no such file
    path = _place(other, target.path, last_name(source))
    if other.sandbox_id == guest.sandbox_id:
        _check_apart(source, path)
    return copy(guest.controller, guest.sandbox_id, source, other.sandbox_id, path, guest.on_bytes)


def _check_apart(source: str, target: str) -> None:
    """Within one sandbox: a directory in itself would have no end, and a file onto itself would be lost."""
    above, below = (posixpath.normpath(path) for path in (source, target))
    if posixpath.commonpath([above, below]) == above:
        raise InvalidInput(f"{target} is {source} itself or in it", hint="Choose another target")


def check_name(name: str) -> str:
    """A name from the guest, which must be a single step down: never up, never elsewhere."""
    legal = name not in ("", ".", "..") and not any(each in name for each in "/\0")
    if legal and os.sep == "\\":
        legal = not any(each in name for each in "\\:")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        legal = False
    if not legal:
        raise ProtocolError(f"The guest sent a file name that is not valid: {ascii(name)[:80]}")
    return name


def _is_directory(guest: Guest, path: str) -> bool:
    """Whether a path in the guest is a directory, or a link to one."""
    controller, sandbox_id = guest.controller, guest.sandbox_id
    try:
        info = controller.stat_file(sandbox_id, path)
    except NotFound as error:
        if error.url is None or sandbox_id in error.message:
            raise  # the sandbox itself is not there
        raise NotFound(
            f"There is no {path} in {sandbox_id}", hint=f"Look with: forkd exec {sandbox_id} -- ls"
        ) from error
    if info["type"] != "symlink":
        return info["type"] == "dir"
    try:
        controller.list_files(sandbox_id, path)
    except ForkdError as error:
        if error.code != "not_dir":
            raise
        return False
    return True


def last_name(path: str) -> str:
    """The name of a copy when only its directory is given; empty for a root, or a path that ends in `/.`."""
    name = posixpath.basename(path.rstrip("/"))
    return "" if name == "." else name
