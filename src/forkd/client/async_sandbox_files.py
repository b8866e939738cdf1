"""`files` of an AsyncSandbox. Relative paths start at /root."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Literal, overload

from forkd.client import plans
from forkd.client.async_transport import AsyncTransport
from forkd.client.calls import files
from forkd.client.content import AsyncData, async_content_of, decoded
from forkd.client.plans import guest_path
from forkd.client.values import EntryInfo, WriteInfo


class AsyncFiles:
    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._id = sandbox_id

    @overload
    async def read(self, path: str, format: Literal["text"] = "text") -> str: ...

    @overload
    async def read(self, path: str, format: Literal["bytes"]) -> bytes: ...

    @overload
    async def read(self, path: str, format: Literal["stream"]) -> AsyncIterator[bytes]: ...

    async def read(
        self, path: str, format: Literal["text", "bytes", "stream"] = "text"
    ) -> str | bytes | AsyncIterator[bytes]:
        """`stream` is an iterator over pieces, for files that are not to be held in memory."""
        call = files.read_file(self._id, guest_path(path))
        if plans.check_format(format) == "stream":
            return self._transport.download(call)
        data = await self._transport.send(call)
        return decoded(data, path) if format == "text" else data

    async def write(
        self, path: str, data: AsyncData, *, mode: int | str | None = None, append: bool = False
    ) -> WriteInfo:
        """Text, bytes, an open file, or an iterator of either. Directories are made; the file appears when complete."""
        content = async_content_of(data)
        return WriteInfo.of(
            await self._transport.send(files.write_file(self._id, guest_path(path), content, mode, append))
        )

    async def write_files(self, entries: Iterable[Mapping[str, Any]]) -> list[WriteInfo]:
        """Several, each `{"path": …, "data": …}`, one after the other."""
        return [await self.write(entry["path"], entry["data"]) for entry in entries]

    async def list(self, path: str = ".") -> list[EntryInfo]:
        entries = await self._transport.perform(plans.list_directory(self._id, guest_path(path)))
        return [EntryInfo.of(entry) for entry in entries]

    async def exists(self, path: str) -> bool:
        return await self._transport.perform(plans.find_file(self._id, guest_path(path))) is not None

    async def get_info(self, path: str) -> EntryInfo:
        return EntryInfo.of(await self._transport.send(files.stat_file(self._id, guest_path(path))))

    async def remove(self, path: str) -> None:
        """A directory with all that is in it."""
        await self._transport.send(files.remove_file(self._id, guest_path(path), True))

    async def rename(self, old_path: str, new_path: str) -> EntryInfo:
        return EntryInfo.of(
            await self._transport.perform(plans.rename(self._id, guest_path(old_path), guest_path(new_path)))
        )

    async def make_dir(self, path: str) -> bool:
        """With its parents. False when it existed."""
        return await self._transport.perform(plans.make_directory(self._id, guest_path(path)))
