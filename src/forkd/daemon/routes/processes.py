"""Commands that outlive the request that started them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon import schemas
from forkd.daemon.bodies import ProcessBody, PtyBody, SignalBody
from forkd.daemon.openapi import BODY, GUEST, errors, gives_events, takes, takes_raw
from forkd.daemon.reading import read_body, read_model
from forkd.daemon.render import Json, render_process
from forkd.daemon.routes.guest import GRACE_S, guest, parse_command, parse_cwd, render_data, render_exit
from forkd.daemon.routes.parameters import Flag, Id, Pid
from forkd.daemon.sse import EventStream, render_event
from forkd.runtime.processes import Command, CommandSpec, Gap, Output

router = APIRouter()

MAX_STDIN_BYTES = 1024 * 1024
WRITE_S = 90.0  # longer than a command is given to read what is written to it


@router.get("/v1/sandboxes/{id}/processes", response_model=schemas.list_of(schemas.Process), responses=errors(*GUEST))
async def list_processes(request: Request, id: Id) -> Response:
    async with guest(request, id, GRACE_S) as live:
        return Json([render_process(command) for command in live.processes.list()])


@router.post(
    "/v1/sandboxes/{id}/processes",
    status_code=201,
    response_model=schemas.Process,
    responses=errors(*GUEST, *BODY),
    openapi_extra=takes(ProcessBody),
)
async def start_process(request: Request, id: Id) -> Response:
    body = await read_model(request, ProcessBody)
    async with guest(request, id, GRACE_S) as live:
        spec = CommandSpec(
            command=parse_command(body),
            cwd=parse_cwd(body),
            env=body.env,
            user=body.user,
            pty=None if body.pty is None else (body.pty.rows, body.pty.cols),
            stdin=body.stdin,
            timeout_s=body.timeout_secs,
        )
        return Json(render_process(await live.processes.start(spec)), 201)


@router.get("/v1/sandboxes/{id}/processes/{pid}", response_model=schemas.Process, responses=errors(*GUEST))
async def get_process(request: Request, id: Id, pid: Pid) -> Response:
    async with guest(request, id, GRACE_S) as live:
        return Json(render_process(live.processes.get(pid)))


@router.get(
    "/v1/sandboxes/{id}/processes/{pid}/output",
    response_class=Response,
    responses=gives_events("start, stdout, stderr, gap, then exit or error") | errors(*GUEST),
)
async def follow_process(request: Request, id: Id, pid: Pid) -> Response:
    async with guest(request, id, GRACE_S) as live:
        command = live.processes.get(pid)
    return EventStream(_follow(command), endless=True)


@router.post(
    "/v1/sandboxes/{id}/processes/{pid}/stdin",
    status_code=204,
    responses=errors(*GUEST, 413),
    openapi_extra=takes_raw(),
)
async def write_stdin(request: Request, id: Id, pid: Pid, eof: Flag = False) -> Response:
    data = await read_body(request, MAX_STDIN_BYTES)
    async with guest(request, id, WRITE_S) as live:
        command = live.processes.get(pid)
        if data:
            await command.write(data)
        if eof:
            command.close_stdin()
    return Response(status_code=204)


@router.post(
    "/v1/sandboxes/{id}/processes/{pid}/signal",
    status_code=204,
    responses=errors(*GUEST, *BODY),
    openapi_extra=takes(SignalBody),
)
async def signal_process(request: Request, id: Id, pid: Pid) -> Response:
    body = await read_model(request, SignalBody)
    async with guest(request, id, GRACE_S) as live:
        live.processes.get(pid).signal(body.signal)
    return Response(status_code=204)


@router.post(
    "/v1/sandboxes/{id}/processes/{pid}/resize",
    status_code=204,
    responses=errors(*GUEST, *BODY),
    openapi_extra=takes(PtyBody),
)
async def resize_process(request: Request, id: Id, pid: Pid) -> Response:
    body = await read_model(request, PtyBody)
    async with guest(request, id, GRACE_S) as live:
        live.processes.get(pid).resize(body.rows, body.cols)
    return Response(status_code=204)


async def _follow(command: Command) -> AsyncGenerator[bytes, None]:
    yield render_event("start", {"pid": command.pid})
    async with aclosing(command.follow()) as items:  # type: ignore[type-var]
        async for item in items:
            if isinstance(item, Output):
                yield render_data(item.kind, item.data)
            elif isinstance(item, Gap):
                yield render_event("gap", {"bytes": item.bytes})
            else:
                yield render_exit(item.exit_code, item.signal, item.timed_out)
