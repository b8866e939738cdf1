"""`sandbox.files`. Relative paths start at /root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, overload

from forkd.client import plans
from forkd.client.calls import files
from forkd.client.content import Data, content_of, decoded
from forkd.client.plans import guest_path
from forkd.client.transport import Transport
from forkd.client.values import EntryInfo, WriteInfo


class Files:
    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._id = sandbox_id

    @overload
    def read(self, path: str, format: Literal["text"] = "text") -> str: ...

    @overload
    def read(self, path: str, format: Literal["bytes"]) -> bytes: ...

    @overload
    def read(self, path: str, format: Literal["stream"]) -> Iterator[bytes]: ...

    def read(self, path: str, format: Literal["text", "bytes", "stream"] = "text") -> str | bytes | Iterator[bytes]:
        """`stream` is an iterator over pieces, for files that are not to be held in memory."""
        call = files.read_file(self._id, guest_path(path))
        if plans.check_format(format) == "stream":
            return self._transport.download(call)
        data = self._transport.send(call)
        return decoded(data, path) if format == "text" else data

    def write(self, path: str, data: Data, *, mode: int | str | None = None, append: bool = False) -> WriteInfo:
        """Text, bytes, an open file, or an iterator of either. Directories are made; the file appears when complete."""
        content = content_of(data)
        return WriteInfo.of(self._transport.send(files.write_file(self._id, guest_path(path), content, mode, append)))

    def write_files(self, entries: Iterable[Mapping[str, Any]]) -> list[WriteInfo]:
        """Several, each `{"path": …, "data": …}`, one after the other."""
        return [self.write(entry["path"], entry["data"]) for entry in entries]

    def list(self, path: str = ".") -> list[EntryInfo]:
        entries = self._transport.perform(plans.list_directory(self._id, guest_path(path)))
        return [EntryInfo.of(entry) for entry in entries]

    def exists(self, path: str) -> bool:
        return self._transport.perform(plans.find_file(self._id, guest_path(path))) is not None

    def get_info(self, path: str) -> EntryInfo:
        return EntryInfo.of(self._transport.send(files.stat_file(self._id, guest_path(path))))

    def remove(self, path: str) -> None:
        """A directory with all that is in it."""
        self._transport.send(files.remove_file(self._id, guest_path(path), True))

    def rename(self, old_path: str, new_path: str) -> EntryInfo:
        return EntryInfo.of(self._transport.perform(plans.rename(self._id, guest_path(old_path), guest_path(new_path))))

    def make_dir(self, path: str) -> bool:
        """With its parents. False when it existed."""
        return self._transport.perform(plans.make_directory(self._id, guest_path(path)))
