"""Files of the guest, streamed both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from forkd.daemon.call import Call, while_connected
from forkd.daemon.inputs import FilePath, Flag, MkdirBody, Mode, Number, RenameBody, SandboxId
from forkd.daemon.render import render_change, render_clocks, render_file, render_line
from forkd.daemon.route import Raw, RawBody, route
from forkd.daemon.routes.guest import guest
from forkd.daemon.streams import BYTES, LINES, STALL_S, Pieces, stalled
from forkd.guest.changes import Change
from forkd.runtime.child import LiveSandbox, Turn
from forkd.wire.api import ArchiveWritten, ChangeInfo, ChangesHead, FileInfo, FileListing, FileWritten, LeftOut
from forkd.wire.archive import PIECE_BYTES


@route("GET", "/v1/sandboxes/{id}/files", gives=Raw(BYTES, "The content"), guest=True, plus=True)
async def read_file(
    call: Call, id: SandboxId, path: FilePath, offset: Number = 0, length: Number | None = None
) -> Pieces:
    """A file, or `length` bytes of it from `offset` on."""
    async with call.runtime.sandboxes.use(id) as live, live.turn(Turn.CALL):
        async with aclosing(live.agent.read_file_stream(path, offset=offset, length=length)) as pieces:
            async for data in pieces:
                yield data


@route("PUT", "/v1/sandboxes/{id}/files", takes=RawBody(), guest=True, plus=True)
async def write_file(
    call: Call,
    id: SandboxId,
    path: FilePath,
    body: AsyncGenerator[bytes, None],
    mode: Mode | None = None,
    append: Flag = False,
    mtime_ns: Number | None = None,
) -> FileWritten:
    """Of any size; `mode` in octal digits. Parents are made. The file appears when it is complete."""
    octal = None if mode is None else int(mode, 8)
    async with _taken(call, id, body) as (live, sent):
        size = await live.agent.write_file(path, sent, mode=octal, parents=True, append=append, mtime_ns=mtime_ns)
    return {"path": path, "size": size}


@route("GET", "/v1/sandboxes/{id}/archive", gives=Raw(BYTES, "A tar archive"), guest=True, plus=True)
async def read_archive(call: Call, id: SandboxId, path: FilePath) -> Pieces:
    """What is in a directory, as a tar archive. Sockets are in it as FIFOs."""
    async with call.runtime.sandboxes.use(id) as live, live.turn(Turn.CALL):
        async with aclosing(live.agent.pack(path)) as pieces:
            async for data in pieces:
                yield data


@route("PUT", "/v1/sandboxes/{id}/archive", takes=RawBody(), guest=True, plus=True)
async def write_archive(
    call: Call, id: SandboxId, path: FilePath, body: AsyncGenerator[bytes, None], keep: Flag = False
) -> ArchiveWritten:
    """Unpack a tar archive into a directory, which is made. `skipped`: devices, FIFOs and sockets. With `?keep=true`
    owners and set-id bits too."""
    async with _taken(call, id, body) as (live, sent):
        done = await live.agent.unpack(path, sent, keep=keep)
    skipped: list[LeftOut] = [{"path": name, "why": why} for name, why in done.skipped]
    return {"path": path, "files": done.files, "bytes": done.bytes, "skipped": skipped}


@route("DELETE", "/v1/sandboxes/{id}/files", guest=True, plus=True)
async def remove_file(call: Call, id: SandboxId, path: FilePath, recursive: Flag = False) -> None:
    """A directory that is not empty needs `?recursive=true`."""
    async with guest(call, id) as live:
        await live.agent.remove(path, recursive=recursive)


@route("GET", "/v1/sandboxes/{id}/files/stat", guest=True, plus=True)
async def stat_file(call: Call, id: SandboxId, path: FilePath) -> FileInfo:
    """Of a symlink itself."""
    async with guest(call, id) as live:
        return render_file(await live.agent.stat(path), path)


@route("GET", "/v1/sandboxes/{id}/files/list", guest=True, plus=True)
async def list_files(call: Call, id: SandboxId, path: FilePath) -> FileListing:
    """`{"entries": [FileInfo], "truncated": bool}`."""
    async with guest(call, id) as live:
        listing = await live.agent.list_dir(path)
    above = path.rstrip("/")
    entries = [render_file(entry, f"{above}/{entry.name}") for entry in listing.entries]
    return {"entries": entries, "truncated": listing.truncated}


@route("POST", "/v1/sandboxes/{id}/files/mkdir", guest=True, plus=True)
async def make_directory(call: Call, id: SandboxId, body: MkdirBody) -> None:
    """Defaults: `parents` true, `mode` `"755"`."""
    async with guest(call, id) as live:
        await live.agent.mkdir(body.path, mode=int(body.mode, 8), parents=body.parents)


@route("POST", "/v1/sandboxes/{id}/files/rename", guest=True, plus=True)
async def rename_file(call: Call, id: SandboxId, body: RenameBody) -> None:
    """Within the guest."""
    async with guest(call, id) as live:
        await live.agent.rename(body.path, body.to)


_CHANGES = Raw(LINES, "A head, changes, an end", lines=(ChangesHead, ChangeInfo))


@route("GET", "/v1/sandboxes/{id}/changes", gives=_CHANGES, guest=True, plus=True)
async def list_changes(call: Call, id: SandboxId, since: Number = 0, sha256: Flag = False) -> Pieces:
    """What was written over the image, with a ctime later than `since` (ns): JSON lines, below."""
    count = 0
    async with call.runtime.sandboxes.use(id) as live, live.turn(Turn.CALL):
        async with aclosing(live.agent.changes(since_ns=since, sha256=sha256)) as found:
            held = bytearray()
            async for each in found:
                if isinstance(each, Change):
                    count += 1
                    held += render_change(each)
                elif each is not None:
                    yield render_clocks(each)
                if len(held) >= PIECE_BYTES or (each is None and held):
                    yield bytes(held)
                    held.clear()
                elif each is None:
                    yield b"\n"  # it hashes a large file
    yield render_line({"end": True, "count": count})


@asynccontextmanager
async def _taken(call: Call, id: str, body: AsyncGenerator[bytes, None]) -> AsyncIterator[tuple[LiveSandbox, Pieces]]:
    """The sandbox, and a body for it, for as long as the client is there and the guest takes it."""
    try:
        async with asyncio.timeout(STALL_S) as stall, call.while_connected(watching=False) as tie:
            async with (
                call.runtime.sandboxes.use(id) as live,
                live.turn(Turn.CALL),
                aclosing(_send_on(body, stall, tie)) as sent,
            ):
                yield live, sent
    except TimeoutError:
        raise stalled() from None


async def _send_on(body: AsyncGenerator[bytes, None], stall: asyncio.Timeout, tie: while_connected) -> Pieces:
    """The body, as it arrives; each piece gives the guest new time to take it."""
    async for data in body:
        stall.reschedule(asyncio.get_running_loop().time() + STALL_S)
        yield data
    tie.watch()
