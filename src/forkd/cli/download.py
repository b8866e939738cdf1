"""Out of a sandbox. Its names and files are a stranger's: nothing is written beside the target, through no link."""

from __future__ import annotations

import os
import posixpath
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from forkd.cli.transfers import MAX_DEPTH, Tally, check_name, failed, is_directory, last_name
from forkd.errors import InvalidInput
from forkd.wire.api import FileInfo

if TYPE_CHECKING:
    from forkd.client.controller import Controller


def download(controller: Controller, sandbox_id: str, source: str, target: Path, tally: Tally) -> None:
    """Like cp -r: into a directory that is there, else under the name given."""
    directory = is_directory(controller, sandbox_id, source)
    name = last_name(source)
    if target.is_dir() and name:
        target = target / check_name(name)
    if directory:
        _download_tree(controller, sandbox_id, source, target, tally)
        return
    with failing("written", target):
        # What the user names may be a link or a device; it is theirs. What the guest names may not.
        target = Path(os.path.realpath(target))
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb", buffering=0) as file:
                stream_out(controller, sandbox_id, source, file, tally)
            return
        mode = controller.stat_file(sandbox_id, source)["mode"]
        with _opened(target.parent, follow=True) as parent:
            _write(parent, target.name, mode, controller.read_file_stream(sandbox_id, source), tally)


def stream_out(controller: Controller, sandbox_id: str, source: str, output: BinaryIO, tally: Tally) -> None:
    for chunk in controller.read_file_stream(sandbox_id, source):
        output.write(chunk)
        tally.bytes += len(chunk)
    output.flush()
    tally.files += 1


def _download_tree(controller: Controller, sandbox_id: str, source: str, target: Path, tally: Tally) -> None:
    with failing("written", target):
        target.mkdir(exist_ok=True)
        with _opened(target, follow=True) as directory:
            _Tree(controller, sandbox_id, tally).copy(source, target, directory, depth=0)


class _Tree:
    def __init__(self, controller: Controller, sandbox_id: str, tally: Tally) -> None:
        self._controller = controller
        self._sandbox_id = sandbox_id
        self._tally = tally

    def copy(self, source: str, shown: Path, directory: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise InvalidInput(f"{source} is {depth} directories deep", hint="Copy a directory further down")
        listing = self._controller.list_files(self._sandbox_id, source)
        if listing["truncated"]:
            raise InvalidInput(
                f"{source} has more entries than can be listed",
                hint=f"Copy an archive of it: forkd exec {self._sandbox_id} -- tar c -C {source} . > files.tar",
            )
        for info in listing["entries"]:
            name = check_name(info["name"])
            self._copy_entry(info, posixpath.join(source, name), shown / name, name, directory, depth)

    def _copy_entry(self, info: FileInfo, source: str, shown: Path, name: str, directory: int, depth: int) -> None:
        if info["type"] == "file":
            with failing("written", shown):
                chunks = self._controller.read_file_stream(self._sandbox_id, source)
                _write(directory, name, info["mode"], chunks, self._tally)
        elif info["type"] == "dir":
            with failing("written", shown):
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=directory)
                with _opened(name, follow=False, below=directory) as below:
                    self.copy(source, shown, below, depth + 1)
        else:
            self._tally.skip(source, f"it is a {info['type']}")


@contextmanager
def _opened(path: Path | str, *, follow: bool, below: int | None = None) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags, dir_fd=below)
    try:
        yield fd
    finally:
        os.close(fd)


def _write(directory: int, name: str, mode: int, chunks: Iterable[bytes], tally: Tally) -> None:
    """Under its name when complete. What is there by that name is replaced, not written through."""
    with suppress(FileNotFoundError):
        there = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(there.st_mode) and not stat.S_ISLNK(there.st_mode):
            raise InvalidInput(f"{name} is there already, and no file", hint="Move it out of the way")
    temporary = f".forkd-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            for chunk in chunks:
                tally.bytes += len(chunk)
                view = memoryview(chunk)
                while view:
                    view = view[file.write(view) :]
            # Never set-id: whoever runs it here would be somebody else for the guest's sake.
            os.fchmod(file.fileno(), mode & 0o777)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise
    tally.files += 1


@contextmanager
def failing(verb: str, path: Path) -> Iterator[None]:
    """OSErrors of this machine's files as ours. A pipe that broke is the reader's affair."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise failed(verb, path, error) from error
