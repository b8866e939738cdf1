# Generated from async_files.py by tools/unasync.py: do not edit.
"""`sandbox.files`: files of one sandbox, one by one and whole directories."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from forkd.client.arguments import Data, GuestPath, check_format, decode_file, guest_path
from forkd.client.controller import Controller
from forkd.client.copying import DEFAULT_MAX_BYTES, copy, download, upload
from forkd.client.results import CopyInfo, EntryInfo, WriteInfo
from forkd.errors import ForkdError, InvalidInput, NotFound
from forkd.wire.api import FileInfo

if TYPE_CHECKING:
    from forkd.client.sandbox import Sandbox


class Files:
    """`sandbox.files`. Relative paths start at /root."""

    def __init__(self, controller: Controller, sandbox_id: str) -> None:
        self._controller = controller
        self._id = sandbox_id

    @overload
    def read(self, path: GuestPath, format: Literal["text"] = "text") -> str: ...

    @overload
    def read(self, path: GuestPath, format: Literal["bytes"]) -> bytes: ...

    @overload
    def read(self, path: GuestPath, format: Literal["stream"]) -> Iterator[bytes]: ...

    def read(
        self, path: GuestPath, format: Literal["text", "bytes", "stream"] = "text"
    ) -> str | bytes | Iterator[bytes]:
        """`stream` is an iterator over pieces, for files that are not to be held in memory."""
        if check_format(format) == "stream":
            return self._controller.read_file_stream(self._id, guest_path(path))
        data = self._controller.read_file(self._id, guest_path(path))
        return decode_file(data, path) if format == "text" else data

    def write(self, path: GuestPath, data: Data, *, mode: int | str | None = None, append: bool = False) -> WriteInfo:
        """Text, bytes, an open file, or an iterator of either. Directories are made; the file appears when complete."""
        return WriteInfo.of(self._controller.write_file(self._id, guest_path(path), data, mode, append))

    def write_files(self, entries: Iterable[Mapping[str, Any]]) -> builtins.list[WriteInfo]:
        """Several, each `{"path": …, "data": …}`, one after the other."""
        return [self.write(entry["path"], entry["data"]) for entry in entries]

    def upload(self, local: str | os.PathLike[str], remote: GuestPath) -> CopyInfo:
        """A file or directory of this machine. `remote` is the name of the copy; a directory there is filled.

        A directory goes as one stream, with symlinks, modes and modification times. It is not undone when it fails.
        """
        return upload(self._controller, self._id, Path(local), guest_path(remote))

    def download(
        self, remote: GuestPath, local: str | os.PathLike[str], *, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> CopyInfo:
        """The other way round. `max_bytes` is for a directory: its files together have no more.

        The guest is not trusted: nothing is written outside `local` or through a link, and what is a device or a link
        that leads out is left out (`skipped`).
        """
        return download(self._controller, self._id, guest_path(remote), Path(local), max_bytes=max_bytes)

    def copy_to(self, path: GuestPath, other: Sandbox, to: GuestPath) -> CopyInfo:
        """A file or directory into another sandbox. `to` is the name of the copy; a directory there is filled.

        It goes through this process as it comes. The other one must be of the same daemon.
        """
        return copy(self._controller, self._id, guest_path(path), other.id, guest_path(to))

    def list(self, path: GuestPath = ".") -> builtins.list[EntryInfo]:
        listing = self._controller.list_files(self._id, guest_path(path))
        if listing["truncated"]:
            raise InvalidInput(f"{path} has more entries than are listed", hint="List it with: commands.run('ls …')")
        return [EntryInfo.of(entry) for entry in listing["entries"]]

    def exists(self, path: GuestPath) -> bool:
        return self._find(path) is not None

    def _find(self, path: GuestPath) -> FileInfo | None:
        try:
            return self._controller.stat_file(self._id, guest_path(path))
        except ForkdError as error:
            if not isinstance(error, NotFound) and error.code != "not_dir":
                raise
            self._controller.get_sandbox(self._id)  # raises when it is the sandbox that does not exist
            return None

    def get_info(self, path: GuestPath) -> EntryInfo:
        return EntryInfo.of(self._controller.stat_file(self._id, guest_path(path)))

    def remove(self, path: GuestPath) -> None:
        """A directory with all that is in it."""
        self._controller.remove_file(self._id, guest_path(path), True)

    def rename(self, old_path: GuestPath, new_path: GuestPath) -> EntryInfo:
        self._controller.rename_file(self._id, guest_path(old_path), guest_path(new_path))
        return self.get_info(new_path)

    def make_dir(self, path: GuestPath) -> bool:
        """With its parents. False when it existed."""
        found = self._find(path)
        if found is not None and found["type"] == "dir":
            return False
        self._controller.make_dir(self._id, guest_path(path), True)
        return True
