"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forkd.daemon.client import while_connected
from forkd.daemon.envelope import stopping
from forkd.daemon.errors import CALL, ClientGone, Internal, error_body
from forkd.daemon.state import Call
from forkd.errors import ForkdError

SILENCE_S = 15.0  # after which a comment shows that we are still there
MEDIA_TYPE = "text/event-stream"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

log = logging.getLogger("forkd.requests")


def render_event(event: str, data: Mapping[str, Any], number: int | None = None) -> bytes:
    head = f"id: {number}\n" if number is not None else ""
    return f"{head}event: {event}\ndata: {json.dumps(data)}\n\n".encode()


class EventStream(Response):
    """Ends when `events` does, when the client goes away, and, if `endless`, when the daemon stops."""

    def __init__(self, events: AsyncGenerator[bytes, None], *, endless: bool = False) -> None:
        super().__init__(None, 200, _HEADERS, MEDIA_TYPE)
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
            await self._pump(call, receive, output)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if not self._endless:
                await output.write(_render_error(call, stopping()))
        except ForkdError as error:
            await output.write(_render_error(call, error))
        except Exception:
            log.exception("A stream of events failed")
            await output.write(_render_error(call, Internal()))
        await send({"type": "http.response.body", "body": b""})

    async def _pump(self, call: Call, receive: Receive, output: _Output) -> None:
        ticking = asyncio.create_task(output.break_silence())
        try:
            async with while_connected(call.link, receive):
                async with aclosing(self._events) as events:
                    async for event in events:
                        await output.write(event)
        finally:
            ticking.cancel()


class _Output:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._spoken = False

    async def write(self, data: bytes) -> None:
        self._spoken = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def break_silence(self) -> None:
        while True:
            self._spoken = False
            await asyncio.sleep(SILENCE_S)
            if not self._spoken:
                await self.write(b": still here\n\n")


def _render_error(call: Call, error: ForkdError) -> bytes:
    call.code = error.code
    return render_event("error", error_body(error))
