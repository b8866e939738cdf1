"""Into a sandbox."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from forkd.cli.download import failing
from forkd.cli.transfers import CHUNK, MAX_DEPTH, Tally, is_directory, last_name
from forkd.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from forkd.client.controller import Controller

# Up to this size a file is sent in one piece, which can be sent again when a connection breaks.
_WHOLE_BYTES = 1 << 20


def upload(
    controller: Controller, sandbox_id: str, source: Path, target: str, tally: Tally, *, into: bool = False
) -> None:
    """Like cp -r: into a directory that is there (or, `into`, has to be), else under the name given."""
    with failing("read", source):
        mode = source.stat().st_mode
    name = last_name(os.fspath(source.absolute()) if source.name in ("", "..") else os.fspath(source))
    try:
        there = is_directory(controller, sandbox_id, target)
    except NotFound:
        there = into
    if there and name:
        target = posixpath.join(target, name)
    if stat.S_ISDIR(mode):
        _upload_tree(controller, sandbox_id, source, target, tally, depth=0)
    else:
        _upload_file(controller, sandbox_id, source, target, tally, flags=0)


def stream_in(controller: Controller, sandbox_id: str, source: BinaryIO, target: str, tally: Tally) -> None:
    controller.write_file(sandbox_id, target, _chunks(source, tally))
    tally.files += 1


def _upload_tree(controller: Controller, sandbox_id: str, source: Path, target: str, tally: Tally, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidInput(f"{source} is {depth} directories deep", hint="Copy a directory further down")
    controller.make_dir(sandbox_id, target)
    with failing("read", source), os.scandir(source) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        below = posixpath.join(target, entry.name)
        if entry.is_dir(follow_symlinks=False):
            _upload_tree(controller, sandbox_id, Path(entry.path), below, tally, depth + 1)
        elif entry.is_file(follow_symlinks=False):
            _upload_file(controller, sandbox_id, Path(entry.path), below, tally, flags=os.O_NOFOLLOW)
        else:
            tally.skip(entry.path, "it is a symlink" if entry.is_symlink() else "it is no file")


def _upload_file(
    controller: Controller, sandbox_id: str, source: Path, target: str, tally: Tally, *, flags: int
) -> None:
    with failing("read", source):
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | flags)
        with os.fdopen(fd, "rb", buffering=0) as file:
            info = os.fstat(fd)
            # Of a pipe or a device the mode means nothing to a file.
            mode = stat.S_IMODE(info.st_mode) & 0o777 if stat.S_ISREG(info.st_mode) else None
            if stat.S_ISREG(info.st_mode) and info.st_size <= _WHOLE_BYTES:
                controller.write_file(sandbox_id, target, b"".join(_chunks(file, tally)), mode)
            else:
                controller.write_file(sandbox_id, target, _chunks(file, tally), mode)
    tally.files += 1


def _chunks(file: BinaryIO, tally: Tally) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        tally.bytes += len(chunk)
        yield chunk
