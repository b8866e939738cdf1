"""`forkd cp`: files and directories into and out of a sandbox.

Names and files in a sandbox are not trusted: nothing is written outside the target, or through a link in it.
"""

from __future__ import annotations

import argparse
import errno
import os
import posixpath
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from forkd.cli.arguments import add_daemon_options
from forkd.cli.connect import connect
from forkd.cli.output import note, print_json
from forkd.cli.sandboxes import resolve
from forkd.errors import ForkdError, HostLacks, InvalidInput, NoCapacity, NotFound, ProtocolError
from forkd.wire.api import FileInfo

if TYPE_CHECKING:
    from forkd.client import Controller

_REMOTE = re.compile(r"([A-Za-z0-9_-]+):(/.*)", re.DOTALL)
_CHUNK = 256 * 1024
# No tree that somebody made on purpose is deeper.
_MAX_DEPTH = 100
# Up to this size a file is sent in one piece, which can be sent again when a connection breaks.
_WHOLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Remote:
    sandbox: str
    path: str


@dataclass(frozen=True)
class Skipped:
    path: str
    why: str


@dataclass
class Tally:
    files: int = 0
    bytes: int = 0
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True)
class Guest:
    """The files of one sandbox, and what was copied."""

    controller: Controller
    sandbox_id: str
    tally: Tally


def add_cp(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Copy a file or a directory into a sandbox or out of it. One side is SANDBOX:/path; - is standard input or "
        "output. Symlinks and special files inside a directory are left out, with a warning."
    )
    parser.add_argument("source", metavar="FROM", help="a path, SANDBOX:/path, or -")
    parser.add_argument("target", metavar="TO", help="a path, SANDBOX:/path, or -")
    add_daemon_options(parser, json="print one JSON object")


def run_cp(args: argparse.Namespace) -> int:
    source, target = parse_place(args.source), parse_place(args.target)
    if args.json and target == "-":
        raise InvalidInput("--json and the file would both go to standard output", hint="Leave --json out")
    tally = Tally()
    if isinstance(source, Remote) and isinstance(target, str):
        with connect(args) as controller:
            guest = Guest(controller, resolve(controller, source.sandbox), tally)
            if target == "-":
                _stream_out(guest, source.path, sys.stdout.buffer)
            else:
                _download(guest, source.path, Path(target))
    elif isinstance(source, str) and isinstance(target, Remote):
        with connect(args) as controller:
            guest = Guest(controller, resolve(controller, target.sandbox), tally)
            if source == "-":
                guest.controller.write_file(guest.sandbox_id, target.path, _chunks(sys.stdin.buffer, tally))
                tally.files += 1
            else:
                _upload(guest, Path(source), target.path)
    else:
        found = "both are in a sandbox" if isinstance(source, Remote) else "neither is SANDBOX:/path"
        raise InvalidInput(
            f"forkd cp copies between this machine and one sandbox; {found}",
            hint="Write: forkd cp FILE SANDBOX:/path, or forkd cp SANDBOX:/path FILE",
        )
    for skipped in tally.skipped:
        note(f"warning: left out {skipped.path}: {skipped.why}")
    if args.json:
        print_json(asdict(tally))
    return 0


def parse_place(text: str) -> Remote | str:
    """An id, a colon and an absolute path are in a sandbox; `./` before a name keeps it on this machine."""
    found = _REMOTE.fullmatch(text)
    return Remote(found[1], found[2]) if found else text


def _download(guest: Guest, source: str, target: Path) -> None:
    """Like cp -r: into the target when it is a directory, else under that name."""
    directory = _is_directory(guest, source)
    name = last_name(source)
    if target.is_dir() and name:
        target = target / check_name(name)
    with _failing("written", target):
        if directory:
            target.mkdir(exist_ok=True)
            with _opened(target, follow=True) as fd:
                _download_tree(guest, source, target, fd, depth=0)
            return
        # The target that the user names may be a link or a device. What the guest names may not.
        target = Path(os.path.realpath(target))
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb", buffering=0) as file:
                _stream_out(guest, source, file)
            return
        mode = guest.controller.stat_file(guest.sandbox_id, source)["mode"]
        with _opened(target.parent, follow=True) as parent:
            _download_file(guest, source, mode, parent, target.name)


def _stream_out(guest: Guest, source: str, output: BinaryIO) -> None:
    for chunk in guest.controller.read_file_stream(guest.sandbox_id, source):
        output.write(chunk)
        guest.tally.bytes += len(chunk)
    output.flush()
    guest.tally.files += 1


def _download_tree(guest: Guest, source: str, shown: Path, directory: int, depth: int) -> None:
    _check_depth(source, depth)
    listing = guest.controller.list_files(guest.sandbox_id, source)
    if listing["truncated"]:
        raise InvalidInput(
            f"{source} has more entries than can be listed",
            hint=f"Copy an archive of it: forkd exec {guest.sandbox_id} -- tar c -C {source} . > files.tar",
        )
    for info in listing["entries"]:
        name = check_name(info["name"])
        with _failing("written", shown / name):
            _download_entry(guest, info, posixpath.join(source, name), shown / name, directory, depth)


def _download_entry(guest: Guest, info: FileInfo, source: str, shown: Path, directory: int, depth: int) -> None:
    name = shown.name
    if info["type"] == "file":
        _download_file(guest, source, info["mode"], directory, name)
    elif info["type"] == "dir":
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=directory)
        with _opened(name, follow=False, below=directory) as below:
            _download_tree(guest, source, shown, below, depth + 1)
    else:
        guest.tally.skipped.append(Skipped(source, f"it is a {info['type']}"))


@contextmanager
def _opened(path: Path | str, *, follow: bool, below: int | None = None) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags, dir_fd=below)
    try:
        yield fd
    finally:
        os.close(fd)


def _download_file(guest: Guest, source: str, mode: int, directory: int, name: str) -> None:
    """It gets its name when it is complete. A file or link of that name is replaced, not written through."""
    with suppress(FileNotFoundError):
        there = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(there.st_mode) and not stat.S_ISLNK(there.st_mode):
            raise InvalidInput(f"{name} is there already, and is not a file", hint="Move it out of the way")
    temporary = f".forkd-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            for chunk in guest.controller.read_file_stream(guest.sandbox_id, source):
                guest.tally.bytes += len(chunk)
                view = memoryview(chunk)
                while view:
                    view = view[file.write(view) :]
            # Never set-id: the guest must not choose as whom it runs here.
            os.fchmod(file.fileno(), mode & 0o777)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise
    guest.tally.files += 1


def _upload(guest: Guest, source: Path, target: str) -> None:
    """Like cp -r: into the target when it is a directory or ends in a slash, else under that name."""
    with _failing("read", source):
        mode = source.stat().st_mode
    name = last_name(os.fspath(source.absolute()) if source.name in ("", "..") else os.fspath(source))
    try:
        into = _is_directory(guest, target)
    except NotFound:
        into = target.endswith("/")
    if into and name:
        target = posixpath.join(target, name)
    if stat.S_ISDIR(mode):
        _upload_tree(guest, source, target, depth=0)
    else:
        _upload_file(guest, source, target, flags=0)


def _upload_tree(guest: Guest, source: Path, target: str, depth: int) -> None:
    _check_depth(source, depth)
    guest.controller.make_dir(guest.sandbox_id, target)
    with _failing("read", source), os.scandir(source) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        below = posixpath.join(target, entry.name)
        if entry.is_dir(follow_symlinks=False):
            _upload_tree(guest, Path(entry.path), below, depth + 1)
        elif entry.is_file(follow_symlinks=False):
            _upload_file(guest, Path(entry.path), below, flags=os.O_NOFOLLOW)
        else:
            why = "it is a symlink" if entry.is_symlink() else "it is not a regular file"
            guest.tally.skipped.append(Skipped(entry.path, why))


def _upload_file(guest: Guest, source: Path, target: str, *, flags: int) -> None:
    with _failing("read", source):
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | flags)
        with os.fdopen(fd, "rb", buffering=0) as file:
            info = os.fstat(fd)
            regular = stat.S_ISREG(info.st_mode)
            # The mode of a pipe or a device means nothing for a file.
            mode = info.st_mode & 0o777 if regular else None
            chunks = _chunks(file, guest.tally)
            data = b"".join(chunks) if regular and info.st_size <= _WHOLE_BYTES else chunks
            guest.controller.write_file(guest.sandbox_id, target, data, mode)
    guest.tally.files += 1


def _chunks(file: BinaryIO, tally: Tally) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        tally.bytes += len(chunk)
        yield chunk


def _check_depth(source: object, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise InvalidInput(f"{source} is {depth} directories deep", hint="Copy a directory further down")


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


@contextmanager
def _failing(verb: str, path: Path) -> Iterator[None]:
    """OSErrors of this machine's files become ours. A broken pipe is main's to handle."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        said = f"{path} cannot be {verb}: {error.strerror}"
        if error.errno == errno.ENOENT:
            raise NotFound(said, hint="Check the path") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoCapacity(said, hint="Free some space, or choose another disk") from error
        raise HostLacks(said, hint="Check what is there, and whether it belongs to you") from error
