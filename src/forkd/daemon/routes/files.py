"""Files of the guest, streamed both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forkd.daemon import schemas
from forkd.daemon.bodies import MkdirBody, RenameBody
from forkd.daemon.client import while_connected
from forkd.daemon.errors import CALL, ClientGone
from forkd.daemon.openapi import BODY, GUEST, errors, gives, takes, takes_raw
from forkd.daemon.reading import iterate_body, read_model
from forkd.daemon.render import Json, render_file
from forkd.daemon.routes.guest import GRACE_S, guest
from forkd.daemon.routes.parameters import Flag, Id, Number, OptionalNumber, parse_mode, parse_path, takes_path
from forkd.daemon.state import Call, call_of
from forkd.daemon.turns import Kind, turn
from forkd.errors import ForkdError, GuestTimeout

router = APIRouter()

STALL_S = 60.0  # in which a piece of a file has to move

_CONTENT = gives("application/octet-stream", "The content", binary=True)


@router.get(
    "/v1/sandboxes/{id}/files",
    response_class=Response,
    responses=_CONTENT | errors(*GUEST),
    openapi_extra=takes_path(),
)
async def read_file(request: Request, id: Id, offset: Number = 0, length: OptionalNumber = None) -> Response:
    content = _read(call_of(request), id, parse_path(request), offset, length)
    # The first piece decides between an answer with a status and one that has begun.
    async with while_connected(call_of(request).link, request.receive):
        first = await _next(content)
    return Content(first, content)


@router.put(
    "/v1/sandboxes/{id}/files",
    response_model=schemas.Written,
    responses=errors(*GUEST),
    openapi_extra={**takes_path(), **takes_raw()},
)
async def write_file(
    request: Request,
    id: Id,
    mode: Annotated[str | None, Query(pattern="^[0-7]{1,4}$")] = None,
    append: Flag = False,
) -> Response:
    call, path = call_of(request), parse_path(request)
    try:
        async with asyncio.timeout(STALL_S) as stall:
            async with while_connected(call.link, request.receive, watching=False) as tie:
                async with (
                    call.fleet.use(id) as live,
                    turn(live, Kind.CALL),
                    aclosing(_send_on(request, stall, tie)) as body,
                ):
                    size = await live.agent.write_file(path, body, mode=parse_mode(mode), parents=True, append=append)
    except TimeoutError:
        raise _stalled() from None
    return Json({"path": path, "size": size})


@router.delete("/v1/sandboxes/{id}/files", status_code=204, responses=errors(*GUEST), openapi_extra=takes_path())
async def remove_file(request: Request, id: Id, recursive: Flag = False) -> Response:
    path = parse_path(request)
    async with guest(request, id, GRACE_S) as live:
        await live.agent.remove(path, recursive=recursive)
    return Response(status_code=204)


@router.get(
    "/v1/sandboxes/{id}/files/stat",
    response_model=schemas.File,
    responses=errors(*GUEST),
    openapi_extra=takes_path(),
)
async def stat_file(request: Request, id: Id) -> Response:
    path = parse_path(request)
    async with guest(request, id, GRACE_S) as live:
        return Json(render_file(await live.agent.stat(path), path))


@router.get(
    "/v1/sandboxes/{id}/files/list",
    response_model=schemas.FileListing,
    responses=errors(*GUEST),
    openapi_extra=takes_path(),
)
async def list_files(request: Request, id: Id) -> Response:
    path = parse_path(request)
    async with guest(request, id, GRACE_S) as live:
        listing = await live.agent.list_dir(path)
    above = path.rstrip("/")
    entries = [render_file(entry, f"{above}/{entry.name}") for entry in listing.entries]
    return Json({"entries": entries, "truncated": listing.truncated})


@router.post(
    "/v1/sandboxes/{id}/files/mkdir",
    status_code=204,
    responses=errors(*GUEST, *BODY),
    openapi_extra=takes(MkdirBody),
)
async def make_directory(request: Request, id: Id) -> Response:
    body = await read_model(request, MkdirBody)
    async with guest(request, id, GRACE_S) as live:
        await live.agent.mkdir(body.path, mode=int(body.mode, 8), parents=body.parents)
    return Response(status_code=204)


@router.post(
    "/v1/sandboxes/{id}/files/rename",
    status_code=204,
    responses=errors(*GUEST, *BODY),
    openapi_extra=takes(RenameBody),
)
async def rename_file(request: Request, id: Id) -> Response:
    body = await read_model(request, RenameBody)
    async with guest(request, id, GRACE_S) as live:
        await live.agent.rename(body.path, body.to)
    return Response(status_code=204)


async def _send_on(request: Request, stall: asyncio.Timeout, tie: while_connected) -> AsyncGenerator[bytes, None]:
    """The body, as it comes; each piece gives the guest a new span of time to take it."""
    async for data in iterate_body(request):
        stall.reschedule(asyncio.get_running_loop().time() + STALL_S)
        yield data
    tie.watch()


async def _next(content: AsyncGenerator[bytes, None]) -> bytes:
    """The next piece, nothing at the end."""
    try:
        async with asyncio.timeout(STALL_S):
            return await anext(content, b"")
    except TimeoutError:
        raise _stalled() from None


def _stalled() -> GuestTimeout:
    return GuestTimeout(f"Nothing of the file moved for {STALL_S:g} s")


async def _read(call: Call, id: str, path: str, offset: int, length: int | None) -> AsyncGenerator[bytes, None]:
    async with call.fleet.use(id) as live, turn(live, Kind.CALL):
        async with aclosing(live.agent.read_file_stream(path, offset=offset, length=length)) as pieces:
            async for data in pieces:
                yield data


class Content(Response):
    """Of unknown length. One that breaks off is broken off: it must not look complete."""

    media_type = "application/octet-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(None, 200)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope[CALL]
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with while_connected(call.link, receive), aclosing(self._rest) as rest:
                data = self._first
                while data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    data = await _next(rest)
            await send({"type": "http.response.body", "body": b""})
        except ClientGone:
            call.link.abort()
        except ForkdError as error:
            call.code = error.code
            call.link.abort()
