"""Files of the guest, streamed both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from forkd.daemon.call import Call, while_connected
from forkd.daemon.inputs import FilePath, Flag, MkdirBody, Mode, Number, RenameBody, SandboxId
from forkd.daemon.render import render_file
from forkd.daemon.route import Raw, RawBody, route
from forkd.daemon.routes.guest import guest
from forkd.daemon.streams import BYTES, STALL_S, Pieces, stalled
from forkd.runtime.child import Turn
from forkd.wire.api import FileInfo, FileListing, FileWritten


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
) -> FileWritten:
    """Of any size; `mode` in octal digits. Parents are made. The file appears when it is complete."""
    octal = None if mode is None else int(mode, 8)
    try:
        async with asyncio.timeout(STALL_S) as stall, call.while_connected(watching=False) as tie:
            async with (
                call.runtime.sandboxes.use(id) as live,
                live.turn(Turn.CALL),
                aclosing(_send_on(body, stall, tie)) as sent,
            ):
                size = await live.agent.write_file(path, sent, mode=octal, parents=True, append=append)
    except TimeoutError:
        raise stalled() from None
    return {"path": path, "size": size}


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


async def _send_on(body: AsyncGenerator[bytes, None], stall: asyncio.Timeout, tie: while_connected) -> Pieces:
    """The body, as it arrives; each piece gives the guest new time to take it."""
    async for data in body:
        stall.reschedule(asyncio.get_running_loop().time() + STALL_S)
        yield data
    tie.watch()
