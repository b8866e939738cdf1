"""Packs: a snapshot with its chain and its image, out of this daemon and into it. Both can go on after a cut."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from forkd.daemon.call import Call
from forkd.daemon.errors import with_status
from forkd.daemon.inputs import Flag, Number, PackBody, TagInPath, UploadId
from forkd.daemon.route import Answer, InHeader, Raw, RawBody, route
from forkd.daemon.streams import BYTES, Content, Pieces
from forkd.errors import InvalidInput
from forkd.host.threads import in_thread
from forkd.model.names import parse_tag
from forkd.runtime.packing import OpenPack
from forkd.runtime.packs import IDLE_S, MAX_PIECE_BYTES, Upload, check_origin
from forkd.runtime.unpacking import ImportOptions
from forkd.wire.api import PackImported, PackUpload

_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})", re.ASCII)
_Header = Annotated[str, Field(max_length=200), InHeader()]


@route(
    "GET",
    "/v1/snapshots/{tag}/pack",
    gives=Raw(BYTES, "A pack"),
    errors=(409, 416),
    also={206: "A part of it"},
    headers={"ETag": "Of these bytes", "X-Forkd-Unpacked-Bytes": "What is in it"},
    plus=True,
)
async def read_pack(
    call: Call, tag: TagInPath, image: Flag = True, range: _Header | None = None, if_range: _Header | None = None
) -> Response:
    """The snapshot with its chain, and its image unless `?image=false`, signed. The same snapshot is
    the same bytes, so that `Range` goes on where a download ended; with `If-Range`, only of the same."""
    stack = AsyncExitStack()
    async with call.while_connected(), stack:
        pack = await stack.enter_async_context(call.runtime.packs.opened(parse_tag(tag), image=image))
        headers = {"ETag": f'"{pack.etag}"', "Accept-Ranges": "bytes", "X-Forkd-Unpacked-Bytes": str(pack.raw_bytes)}
        first, last = 0, None
        asked = _RANGE.fullmatch(range) if range and if_range in (None, headers["ETag"]) else None
        if asked:
            first, last = await _find_part(pack, asked)
            size = pack.size
            headers |= {"Content-Range": f"bytes {first}-{last}/{size}", "Content-Length": str(last - first + 1)}
        elif pack.size is not None:
            headers["Content-Length"] = str(pack.size)
        pieces = _send(stack.pop_all(), pack, first, None if last is None else last - first + 1)
        return Content(await anext(pieces), pieces, status=206 if asked else 200, headers=headers)


async def _find_part(pack: OpenPack, asked: re.Match[str]) -> tuple[int, int]:
    size = await in_thread(pack.measure)
    first = int(asked[1])
    last = min(int(asked[2]), size - 1) if asked[2] else size - 1
    if first > last:
        raise with_status(InvalidInput(f"The pack has {size} bytes: there are none from {first} on"), 416)
    return first, last


async def _send(stack: AsyncExitStack, pack: OpenPack, first: int, length: int | None) -> Pieces:
    async with stack:
        frames = pack.stream(first)
        try:
            while data := await in_thread(lambda: next(frames, b"")):
                if length is not None:
                    data = data[:length]
                    length -= len(data)
                yield data
                if length == 0:
                    break
        finally:
            await in_thread(lambda: _close(frames))


def _close(frames: object) -> None:
    close = getattr(frames, "close", None)
    if close is not None:
        close()


@route("POST", "/v1/packs", status=201, plus=True)
async def begin_upload(call: Call, body: PackBody) -> PackUpload:
    """Begin to send a pack. `tag` renames its head; `trust`: remember a key that is not known;
    `unsigned`, `force` (replace), `keep_anyway` (though it cannot run here)."""
    origin = check_origin(body.origin or f"push:{call.token or 'local'}")
    tag = None if body.tag is None else parse_tag(body.tag)
    options = ImportOptions(origin, tag, body.trust, body.unsigned, body.force, body.keep_anyway)
    return _render(call.runtime.packs.begin(call.token, options))


@route("GET", "/v1/packs/{id}", plus=True)
async def get_upload(call: Call, id: UploadId) -> PackUpload:
    """Where it is: to go on after a cut."""
    return _render(call.runtime.packs.get(id, call.token))


@route("PATCH", "/v1/packs/{id}", takes=RawBody(MAX_PIECE_BYTES), errors=(409,), plus=True)
async def append_upload(call: Call, id: UploadId, body: bytes, offset: Number) -> PackUpload:
    """The next piece, at most 8 MiB. What cannot be taken in is refused as soon as that is known, and the
    upload is gone: 403 `untrusted`, 409 `snapshot_damaged`, `snapshot_incompatible`, `conflict`."""
    return _render(await call.runtime.packs.append(id, call.token, offset, body))


@route("POST", "/v1/packs/{id}/finish", status=201, errors=(409,), plus=True)
async def finish_upload(call: Call, id: UploadId) -> Answer[PackImported]:
    """All of it was sent: its snapshots become visible. No body."""
    done = await call.runtime.packs.finish(id, call.token)
    return Answer(
        {
            "tag": done.head,
            "made": list(done.made),
            "reused": list(done.reused),
            "image_id": done.image_id,
            "image_reused": done.image_reused,
            "key": done.key,
            "warning": done.warning,
            "network_dropped": list(done.network_dropped),
        }
    )


@route("DELETE", "/v1/packs/{id}", plus=True)
async def drop_upload(call: Call, id: UploadId) -> None:
    """Give it up."""
    await call.runtime.packs.drop(id, call.token)


def _render(upload: Upload) -> PackUpload:
    unpacker = upload.work.unpacker
    return {
        "id": upload.id,
        "offset": upload.offset,
        "done": upload.done is not None,
        "unpacked_bytes": unpacker.raw_bytes,
        "total_bytes": unpacker.total_bytes,
        "expires_in_secs": IDLE_S,
    }
