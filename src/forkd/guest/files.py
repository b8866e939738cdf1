"""Files of the guest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from forkd.errors import InvalidInput, ProtocolError
from forkd.guest.channel import Channel
from forkd.guest.exchange import Caller, Exchange, get_flag, get_int, get_text
from forkd.guest.unread import Unread
from forkd.wire.agent import CALL, END, MAX_MESSAGE, STDOUT

TRANSFER_S = 3600.0
DEFAULT_READ_BYTES = 64 * 1024 * 1024
MAX_ENTRIES = 5000
MAX_PATH_BYTES = 4095
_TYPES = frozenset({"file", "dir", "symlink", "fifo", "socket", "char", "block", "unknown"})


@dataclass(frozen=True)
class FileInfo:
    """Names and targets may hold surrogate escapes: file names are bytes."""

    name: str
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: str | None = None


@dataclass(frozen=True)
class Listing:
    entries: tuple[FileInfo, ...]
    truncated: bool


class FileCalls(Caller):
    async def stat(self, path: str) -> FileInfo:
        answer = await self.call({"op": "stat", "path": check_path(path)}, "find a file", about=path)
        return parse_file(answer, path.rstrip("/").rpartition("/")[2])

    async def list_dir(self, path: str, *, limit: int = MAX_ENTRIES) -> Listing:
        request = {"op": "list", "path": check_path(path), "limit": limit}
        answer = await self.call(request, "list a directory", about=path)
        entries = answer.get("entries")
        if not isinstance(entries, list) or len(entries) > limit:
            raise ProtocolError("The guest sent an invalid directory listing")
        return Listing(tuple(map(parse_entry, entries)), get_flag(answer, "truncated"))

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None:
        request = {"op": "mkdir", "path": check_path(path), "mode": mode, "parents": parents}
        await self.call(request, "make a directory", about=path)

    async def rename(self, path: str, to: str) -> None:
        request = {"op": "rename", "path": check_path(path), "to": check_path(to)}
        await self.call(request, "rename a file", about=f"{path} -> {to}")

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        request = {"op": "remove", "path": check_path(path), "recursive": recursive}
        await self.call(request, "remove a file", about=path)

    async def read_file(
        self, path: str, *, offset: int = 0, length: int | None = None, max_bytes: int = DEFAULT_READ_BYTES
    ) -> bytes:
        """The contents; InvalidInput when there are more than `max_bytes` of them."""
        content = bytearray()
        async with aclosing(self.read_file_stream(path, offset=offset, length=length)) as pieces:
            async for data in pieces:
                content += data
                if len(content) > max_bytes:
                    raise InvalidInput(f"The file has more than {max_bytes} bytes", hint="Read it in parts")
        return bytes(content)

    async def read_file_stream(
        self, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        request = {"op": "read", "path": check_path(path), "offset": offset, "length": length}
        reading = _Reading(self.channel, request, path)
        try:
            async for data in reading.pieces():
                yield data
            await reading.answer()
        finally:
            reading.abandon()

    async def write_file(
        self,
        path: str,
        content: bytes | Iterable[bytes] | AsyncIterator[bytes],
        *,
        mode: int | None = None,
        parents: bool = False,
        append: bool = False,
        mtime_ns: int | None = None,
    ) -> int:
        """Bytes written. The file appears when complete; with `append`, data sent before a failure stays."""
        request: dict[str, Any] = {"op": "write", "path": check_path(path), "parents": parents, "append": append}
        if mode is not None:
            request["mode"] = mode
        if mtime_ns is not None:
            request["mtime_ns"] = mtime_ns
        payload = json.dumps(request).encode()
        exchange = Exchange(self.channel, "write a file", CALL, payload, TRANSFER_S, path)
        try:
            # A guest that refuses, such as a full one, does so early: what is still to come is not asked for.
            async with aclosing(_iterated(content)) as pieces:
                async for data in pieces:
                    await exchange.send_data(data)
                    if exchange.ended:
                        break
            exchange.send_control(END)
            return get_int(await exchange.answer_json(), "size")
        finally:
            exchange.abandon()


async def _iterated(content: bytes | Iterable[bytes] | AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    if isinstance(content, AsyncIterator):
        async for data in content:
            yield data
    else:
        for data in [content] if isinstance(content, bytes) else content:
            yield data


class _Reading(Exchange):
    def __init__(self, channel: Channel, request: dict[str, Any], path: str) -> None:
        self._pieces: Unread[int] = Unread()
        self._arrived = asyncio.Event()
        super().__init__(channel, "read a file", CALL, json.dumps(request).encode(), TRANSFER_S, path)
        self._answer.add_done_callback(lambda _: self._arrived.set())

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            while self._pieces:
                _, data = self._pieces.take()
                self.acknowledge(len(data))
                yield data
            if self._answer.done():
                return
            self._arrived.clear()
            await self._arrived.wait()

    def on_data(self, flags: int, payload: bytes) -> None:
        if flags != STDOUT:
            raise ProtocolError("The guest sent a file as something else than its content")
        self._pieces.add(flags, payload)
        self._arrived.set()


def check_path(path: str) -> str:
    """The same rule as the agent's; here for the better message."""
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise InvalidInput(f"{ascii(path)[:70]} is not an absolute path in the guest")
    try:
        size = len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as error:
        raise InvalidInput("The path has characters that a file name cannot have") from error
    if size > MAX_PATH_BYTES:
        raise InvalidInput(f"The path is longer than {MAX_PATH_BYTES} bytes")
    return path


def parse_entry(entry: object) -> FileInfo:
    if not isinstance(entry, dict):
        raise ProtocolError("The guest listed an invalid directory entry")
    return parse_file(entry, get_text(entry, "name", 4096))


def parse_file(answer: dict[str, Any], name: str) -> FileInfo:
    kind = get_text(answer, "type", 20)
    if kind not in _TYPES:
        raise ProtocolError("The guest described a file of unknown type")
    return FileInfo(
        name=name,
        type=kind,
        size=get_int(answer, "size"),
        mode=get_int(answer, "mode", 0, 0o10000),
        uid=get_int(answer, "uid"),
        gid=get_int(answer, "gid"),
        mtime_ns=get_int(answer, "mtime_ns", -(1 << 63)),
        target=get_text(answer, "target", MAX_MESSAGE) if "target" in answer else None,
    )
