"""Answers that are sent as they are made: server-sent events, and the content of a file."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forkd.daemon.call import Call
from forkd.daemon.errors import CALL, ClientGone, Internal, Stopping, error_body, status_of
from forkd.errors import ForkdError, GuestTimeout
from forkd.wire.json_pieces import render_pieces

Pieces = AsyncGenerator[bytes, None]

SILENCE_S = 15.0  # after which a comment shows that we are still there
STALL_S = 60.0  # in which a piece of a file has to move
EVENTS = "text/event-stream"
BYTES = "application/octet-stream"
LINES = "application/x-ndjson"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

log = logging.getLogger("forkd.requests")


def render_event(event: str, data: Mapping[str, Any], number: int | None = None) -> bytes:
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {event}\ndata: {json.dumps(data)}\n\n".encode()


def render_large_event(event: str, data: Mapping[str, object]) -> Iterator[bytes]:
    """In pieces; values that are bytes are texts of the guest."""
    yield f"event: {event}\ndata: ".encode()
    yield from render_pieces(data, end=b"\n\n")


async def start_events(call: Call, events: Pieces) -> Response:
    """With the first event at hand: an error before it is an answer with a status."""
    async with call.while_connected():
        first = await anext(events)
    return EventStream(_chained(first, events))


async def _chained(first: bytes, events: Pieces) -> Pieces:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


class EventStream(Response):
    """Ends when `events` does, when the client goes away, and, if `endless`, when the daemon stops."""

    def __init__(self, events: Pieces, *, endless: bool = False) -> None:
        super().__init__(None, 200, _HEADERS, EVENTS)
        del self.headers["content-length"]
        self._events = events
        self._endless = endless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope[CALL]
        if self._endless:
            task = asyncio.current_task()
            assert task is not None
            call.daemon.activity.add_endless(task)
        output = _Output(send)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await output.write(b"")  # the head waits for it
        try:
            await self._pump(call, output)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if not self._endless:
                await output.write(_render_error(call, Stopping()))
        except ForkdError as error:
            await output.write(_render_error(call, error))
        except Exception:
            log.exception("A stream of events failed")
            await output.write(_render_error(call, Internal()))
        await send({"type": "http.response.body", "body": b""})

    async def _pump(self, call: Call, output: _Output) -> None:
        ticking = asyncio.create_task(output.break_silence())
        try:
            async with call.while_connected(), aclosing(self._events) as events:
                async for event in events:
                    await output.write(event)
        finally:
            ticking.cancel()


class _Output:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._spoken = False
        self._between = True  # two events, and not two pieces of one

    async def write(self, data: bytes) -> None:
        self._spoken = True
        self._between = not data or data.endswith(b"\n\n")
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def break_silence(self) -> None:
        while True:
            self._spoken = False
            await asyncio.sleep(SILENCE_S)
            if not self._spoken and self._between:
                await self.write(b": still here\n\n")


def _render_error(call: Call, error: ForkdError) -> bytes:
    call.code = error.code
    return render_event("error", error_body(error))


async def start_content(call: Call, content: Pieces, media_type: str = BYTES) -> Response:
    """With the first piece at hand: an error before it is an answer with a status."""
    async with call.while_connected():
        first = await _next(content)
    return Content(first, content, media_type)


class Content(Response):
    """Of unknown length, unless the headers say it.

    When it fails half-way the connection is aborted: it must not look complete.
    """

    def __init__(
        self,
        first: bytes,
        rest: Pieces,
        media_type: str = BYTES,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, status, media_type=media_type)
        del self.headers["content-length"]
        self.headers.update(headers or {})
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope[CALL]
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with call.while_connected(), aclosing(self._rest) as rest:
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


class LargeJson(Response):
    """A JSON object whose values that are bytes are texts of the guest: rendered as the client reads it.

    It goes out whole when it is one piece. `kept` lives until it is sent; `error`: it is the body of that error.
    """

    media_type = "application/json"

    def __init__(self, value: Mapping[str, object], *, kept: object, error: ForkdError | None = None) -> None:
        self._kept = kept
        self._pieces = render_pieces(value if error is None else error_body(error, value))
        self._code = None if error is None else error.code
        self._first = next(self._pieces)
        self._second = next(self._pieces, None)
        super().__init__(self._first if self._second is None else None, 200 if error is None else status_of(error))
        if self._second is not None:
            del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CALL].code = self._code
        if self._second is None:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # The work is done: a client that has closed its writing side still gets all of it.
        for piece in itertools.chain((self._first, self._second), self._pieces):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # a socket that takes all at once would keep the others waiting
        await send({"type": "http.response.body", "body": b""})


async def _next(content: Pieces) -> bytes:
    """The next piece, nothing at the end."""
    try:
        async with asyncio.timeout(STALL_S):
            return await anext(content, b"")
    except TimeoutError:
        raise stalled() from None


def stalled() -> GuestTimeout:
    return GuestTimeout(f"No part of the file was transferred for {STALL_S:g} s")
