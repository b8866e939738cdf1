"""Asking the guest: ping, exec, eval, and the streams of both."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon import logs, schemas
from forkd.daemon.bodies import CommandBody, EvalBody, ExecBody
from forkd.daemon.client import while_connected
from forkd.daemon.errors import ErrorResponse, error_body
from forkd.daemon.openapi import BODY, GUEST, errors, gives_events, takes
from forkd.daemon.reading import read_model
from forkd.daemon.render import Json, render_eval, render_exec, render_output
from forkd.daemon.routes.parameters import Id
from forkd.daemon.sse import EventStream, render_event
from forkd.daemon.state import Call, call_of
from forkd.daemon.turns import Kind, turn
from forkd.errors import GuestTimeout, InvalidInput
from forkd.guest.files import check_path
from forkd.guest.results import EvalResult
from forkd.runtime.live import LiveSandbox

router = APIRouter()

# Beyond the guest's own deadline: to be reached, to start, to be killed and to say so. Then nobody waits any more.
GRACE_S = 60.0
PING_S = 10.0
MAX_BACKLOG_BYTES = 4 * 1024 * 1024


@asynccontextmanager
async def guest(request: Request, id: str, limit_s: float, kind: Kind = Kind.CALL) -> AsyncIterator[LiveSandbox]:
    """The sandbox's agent, when it is our turn, for as long as the client is there and `limit_s` allows."""
    call = call_of(request)
    try:
        async with asyncio.timeout(limit_s), while_connected(call.link, request.receive):
            async with call.fleet.use(id) as live, turn(live, kind):
                logs.sandbox_id.set(live.id)
                yield live
    except TimeoutError:
        raise GuestTimeout(f"The guest of {id} did not answer within {limit_s:g} s") from None


@router.post("/v1/sandboxes/{id}/ping", response_model=schemas.Ping, responses=errors(*GUEST))
async def ping_sandbox(request: Request, id: Id) -> Response:
    async with guest(request, id, GRACE_S) as live:
        info = await live.agent.ping(deadline_s=PING_S)
        version = await live.numpy_version.ask(live.agent)
    pong = {"pong": True, "numpy_version": version, "pid": info.pid}
    return Json(pong | {"agent_lang": "python", "warmup_ready": True})


@router.post(
    "/v1/sandboxes/{id}/exec",
    response_model=schemas.Exec,
    responses=errors(*GUEST, *BODY),
    openapi_extra=takes(ExecBody),
)
async def exec_command(request: Request, id: Id) -> Response:
    body = await read_model(request, ExecBody)
    begun = time.perf_counter()
    async with guest(request, id, body.timeout_secs + GRACE_S, Kind.RUN) as live:
        result = await live.agent.run(
            parse_command(body),
            input=_parse_input(body),
            cwd=parse_cwd(body),
            env=body.env,
            user=body.user,
            timeout_s=body.timeout_secs,
        )
    call_of(request).daemon.metrics.exec_s.observe(time.perf_counter() - begun)
    if result.timed_out:
        error = GuestTimeout(
            f"The command did not end within {body.timeout_secs:g} s and was killed",
            hint="Give it more time with timeout_secs, or start it as a process",
        )
        return ErrorResponse(error, {"stdout": render_output(result.stdout), "stderr": render_output(result.stderr)})
    return Json(render_exec(result))


@router.post(
    "/v1/sandboxes/{id}/eval",
    response_model=schemas.Eval,
    responses=errors(*GUEST, *BODY),
    openapi_extra=takes(EvalBody),
)
async def eval_code(request: Request, id: Id) -> Response:
    body = await read_model(request, EvalBody)
    begun = time.perf_counter()
    async with guest(request, id, body.timeout_secs + GRACE_S, Kind.RUN) as live:
        result = await live.agent.eval(body.code, timeout_s=body.timeout_secs)
    call_of(request).daemon.metrics.eval_s.observe(time.perf_counter() - begun)
    if result.timed_out:
        return ErrorResponse(_too_long(body), _timeout_more(result))
    return Json(render_eval(result))


@router.post(
    "/v1/sandboxes/{id}/exec/stream",
    response_class=Response,
    responses=gives_events("start, stdout, stderr, then exit or error") | errors(*GUEST, *BODY),
    openapi_extra=takes(ExecBody),
)
async def stream_command(request: Request, id: Id) -> Response:
    body = await read_model(request, ExecBody)
    return await _streamed(request, _stream_exec(call_of(request), id, body))


@router.post(
    "/v1/sandboxes/{id}/eval/stream",
    response_class=Response,
    responses=gives_events("stdout, stderr, then result or error") | errors(*GUEST, *BODY),
    openapi_extra=takes(EvalBody),
)
async def stream_evaluation(request: Request, id: Id) -> Response:
    body = await read_model(request, EvalBody)
    return await _streamed(request, _stream_eval(call_of(request), id, body))


def parse_command(body: CommandBody) -> str | list[str]:
    if (body.args is None) == (body.shell is None):
        raise InvalidInput("A command is either args or shell", hint='Send args, such as ["ls", "-l"]')
    if body.args is not None:
        if not body.args:
            raise InvalidInput("The field args is empty", hint='Send the program and its arguments: ["ls", "-l"]')
        return body.args
    assert body.shell is not None
    return body.shell


def parse_cwd(body: CommandBody) -> str | None:
    return None if body.cwd is None else check_path(body.cwd)


def render_data(kind: str, data: bytes) -> bytes:
    return render_event(kind, {"data": base64.b64encode(data).decode("ascii")})


def render_exit(exit_code: int | None, signal: int | None, timed_out: bool) -> bytes:
    return render_event("exit", {"exit_code": exit_code, "signal": signal, "timed_out": timed_out})


async def _streamed(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """With its first event at hand: until then, what is wrong is an answer with a status."""
    async with while_connected(call_of(request).link, request.receive):
        first = await anext(events)
    return EventStream(_chained(first, events))


async def _chained(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def _stream_exec(call: Call, id: str, body: ExecBody) -> AsyncGenerator[bytes, None]:
    begun = time.perf_counter()
    given = _parse_input(body)
    async with call.fleet.use(id) as live, turn(live, Kind.RUN):
        process = await live.agent.start(
            parse_command(body),
            cwd=parse_cwd(body),
            env=body.env,
            user=body.user,
            stdin=given is not None,
            timeout_s=body.timeout_secs,
        )
        async with process, process.fed(given):
            yield render_event("start", {"pid": process.pid})
            async for kind, data in process:
                yield render_data(kind, data)
            result = await process.wait()
    call.daemon.metrics.exec_s.observe(time.perf_counter() - begun)
    yield render_exit(result.exit_code, result.signal, result.timed_out)


async def _stream_eval(call: Call, id: str, body: EvalBody) -> AsyncGenerator[bytes, None]:
    begun = time.perf_counter()
    backlog = Backlog(MAX_BACKLOG_BYTES)
    async with call.fleet.use(id) as live, turn(live, Kind.RUN):
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
        yield render_event("error", error_body(error, _timeout_more(result)))
    else:
        yield render_event("result", render_eval(result))


class Backlog:
    """Output of an evaluation between guest and client. What a slow client leaves is dropped, and said."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._size = 0
        self._dropped = 0
        self._closed = False
        self._news = asyncio.Event()

    def add(self, kind: str, data: bytes) -> None:
        if self._size + len(data) > self._limit:
            self._dropped += len(data)
        else:
            self._waiting.append((kind, data))
            self._size += len(data)
        self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self._news.clear()
            while self._waiting:
                kind, data = self._waiting.popleft()
                self._size -= len(data)
                yield render_data(kind, data)
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


def _timeout_more(result: EvalResult) -> dict[str, str | bool]:
    return {
        "stdout": render_output(result.stdout),
        "stderr": render_output(result.stderr),
        "interpreter_restarted": result.interpreter_restarted,
    }
