"""Asking the guest: ping, exec, eval, and the streams of both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.responses import Response

from forkd.daemon import logs
from forkd.daemon.call import Call
from forkd.daemon.errors import error_body
from forkd.daemon.inputs import CommandBody, EvalBody, ExecBody, SandboxId
from forkd.daemon.render import render_data, render_eval, render_exec, render_exit, render_timeout
from forkd.daemon.route import Raw, route
from forkd.daemon.streams import EVENTS, LargeJson, Pieces, render_event, render_large_event
from forkd.errors import GuestTimeout, InvalidInput
from forkd.guest.files import check_path
from forkd.guest.unread import Unread
from forkd.runtime.child import LiveSandbox, Turn
from forkd.wire.api import EvalResponse, ExecResponse, PingResponse

# Beyond the guest's own deadline: to reach it, to start, to kill and to report. Then we stop waiting.
GRACE_S = 60.0
PING_S = 10.0
MAX_BACKLOG_BYTES = 512 * 1024


@asynccontextmanager
async def guest(call: Call, id: str, limit_s: float = GRACE_S, kind: Turn = Turn.CALL) -> AsyncIterator[LiveSandbox]:
    """The sandbox, when it is our turn, for as long as the client is there and `limit_s` allows."""
    try:
        async with asyncio.timeout(limit_s), call.while_connected():
            async with call.runtime.sandboxes.use(id) as live, live.turn(kind):
                logs.sandbox_id.set(live.id)
                yield live
    except TimeoutError:
        raise GuestTimeout(f"The guest of {id} did not answer within {limit_s:g} s") from None


@route("POST", "/v1/sandboxes/{id}/ping", guest=True)
async def ping_sandbox(call: Call, id: SandboxId) -> PingResponse:
    """`pong` true, `numpy_version`, `pid`, `agent_lang` (`python`), `warmup_ready` true. No body."""
    async with guest(call, id) as live:
        info = await live.agent.ping(deadline_s=PING_S)
        version = await live.agent.numpy_version()
    return {"pong": True, "numpy_version": version, "pid": info.pid, "agent_lang": "python", "warmup_ready": True}


@route("POST", "/v1/sandboxes/{id}/exec", guest=True)
async def exec_command(call: Call, id: SandboxId, body: ExecBody) -> ExecResponse | Response:
    """Run a command to its end."""
    begun = time.perf_counter()
    async with guest(call, id, body.timeout_secs + GRACE_S, Turn.RUN) as live:
        result = await live.agent.run(**parse_command(body), input=_parse_input(body), timeout_s=body.timeout_secs)
    call.daemon.metrics.exec_s.observe(time.perf_counter() - begun)
    if result.timed_out:
        error = GuestTimeout(
            f"The command did not end within {body.timeout_secs:g} s and was killed",
            hint="Give it more time with timeout_secs, or start it as a process",
        )
        return LargeJson(render_timeout(result), kept=result, error=error)
    return LargeJson(render_exec(result), kept=result)


@route("POST", "/v1/sandboxes/{id}/eval", guest=True)
async def eval_code(call: Call, id: SandboxId, body: EvalBody) -> EvalResponse | Response:
    """Evaluate in the warmed interpreter."""
    begun = time.perf_counter()
    async with guest(call, id, body.timeout_secs + GRACE_S, Turn.RUN) as live:
        result = await live.agent.eval(body.code, timeout_s=body.timeout_secs)
    call.daemon.metrics.eval_s.observe(time.perf_counter() - begun)
    if result.timed_out:
        return LargeJson(render_timeout(result), kept=result, error=_too_long(body))
    return LargeJson(render_eval(result), kept=result)


@route(
    "POST",
    "/v1/sandboxes/{id}/exec/stream",
    gives=Raw(EVENTS, "start, stdout, stderr, then exit or error"),
    guest=True,
    plus=True,
)
async def stream_command(call: Call, id: SandboxId, body: ExecBody) -> Pieces:
    """The body of exec; output as it is written."""
    begun = time.perf_counter()
    given = _parse_input(body)
    async with call.runtime.sandboxes.use(id) as live, live.turn(Turn.RUN):
        process = await live.agent.start(**parse_command(body), stdin=given is not None, timeout_s=body.timeout_secs)
        async with process, process.fed(given):
            yield render_event("start", {"pid": process.pid})
            async for kind, data in process:
                yield render_data(kind, data)
            result = await process.wait()
    call.daemon.metrics.exec_s.observe(time.perf_counter() - begun)
    yield render_exit(result)


@route(
    "POST",
    "/v1/sandboxes/{id}/eval/stream",
    gives=Raw(EVENTS, "stdout, stderr, then result or error"),
    guest=True,
    plus=True,
)
async def stream_evaluation(call: Call, id: SandboxId, body: EvalBody) -> Pieces:
    """The body of eval; output as it is written."""
    begun = time.perf_counter()
    backlog = Backlog(MAX_BACKLOG_BYTES)
    async with call.runtime.sandboxes.use(id) as live, live.turn(Turn.RUN):
        task = asyncio.create_task(live.agent.eval(body.code, timeout_s=body.timeout_secs, on_output=backlog.add))
        task.add_done_callback(lambda _: backlog.close())
        try:
            yield b""
            async for event in backlog:
                yield event
            result = await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    call.daemon.metrics.eval_s.observe(time.perf_counter() - begun)
    if result.timed_out:
        error = _too_long(body)
        call.code = error.code
        pieces = render_large_event("error", error_body(error, render_timeout(result)))
    else:
        pieces = render_large_event("result", render_eval(result))
    for piece in pieces:
        yield piece


class Backlog:
    """Output of an evaluation between guest and client. What a slow client leaves is dropped, and told as a gap."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._waiting: Unread[str] = Unread()
        self._dropped = 0
        self._closed = False
        self._news = asyncio.Event()

    def add(self, kind: str, data: bytes) -> None:
        if self._waiting.size_bytes + len(data) > self._limit:
            self._dropped += len(data)
        else:
            self._waiting.add(kind, data)
        self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self._news.clear()
            while self._waiting:
                yield render_data(*self._waiting.take())
            if self._dropped:
                gap, self._dropped = self._dropped, 0
                yield render_event("gap", {"bytes": gap})
            elif self._closed:
                return
            else:
                await self._news.wait()


def _parse_input(body: ExecBody) -> bytes | None:
    return None if body.stdin is None else body.stdin.encode("utf-8", "surrogateescape")


def _too_long(body: EvalBody) -> GuestTimeout:
    return GuestTimeout(
        f"The evaluation did not end within {body.timeout_secs:g} s and was interrupted",
        hint="Give it more time with timeout_secs",
    )


def parse_command(body: CommandBody) -> dict[str, Any]:
    """What starting it takes, by the names of the agent and of CommandSpec."""
    if (body.args is None) == (body.shell is None):
        raise InvalidInput("A command needs either args or shell", hint='Send args, such as ["ls", "-l"]')
    if body.args == []:
        raise InvalidInput("The field args is empty", hint='Send the program and its arguments: ["ls", "-l"]')
    cwd = None if body.cwd is None else check_path(body.cwd)
    return {"command": body.shell if body.args is None else body.args, "cwd": cwd, "env": body.env, "user": body.user}
