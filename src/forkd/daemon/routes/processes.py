"""Commands that outlive the request that started them."""

from __future__ import annotations

from contextlib import aclosing

from forkd.daemon.call import Call
from forkd.daemon.inputs import Flag, Pid, ProcessBody, PtyBody, SandboxId, SignalBody
from forkd.daemon.render import render_data, render_exit, render_process
from forkd.daemon.route import Raw, RawBody, route
from forkd.daemon.routes.guest import guest, parse_command
from forkd.daemon.streams import EVENTS, Pieces, render_event
from forkd.runtime.processes import CommandSpec, Gap, GuestProcess, Output
from forkd.wire.api import ProcessInfo

MAX_STDIN_BYTES = 1024 * 1024
WRITE_S = 90.0  # longer than a command is given to read what is written to it


@route("GET", "/v1/sandboxes/{id}/processes", guest=True, plus=True)
async def list_processes(call: Call, id: SandboxId) -> list[ProcessInfo]:
    """Those started through the API; ended ones for a minute."""
    async with guest(call, id) as live:
        return [render_process(command) for command in live.processes.list()]


@route("POST", "/v1/sandboxes/{id}/processes", status=201, guest=True, plus=True)
async def start_process(call: Call, id: SandboxId, body: ProcessBody) -> ProcessInfo:
    """Start in the background; the body of exec, and below."""
    async with guest(call, id) as live:
        pty = None if body.pty is None else (body.pty.rows, body.pty.cols)
        spec = CommandSpec(**parse_command(body), pty=pty, stdin=body.stdin, timeout_s=body.timeout_secs)
        return render_process(await live.processes.start(spec))


@route("GET", "/v1/sandboxes/{id}/processes/{pid}", guest=True, plus=True)
async def get_process(call: Call, id: SandboxId, pid: Pid) -> ProcessInfo:
    """Whether it runs, else how it ended."""
    async with guest(call, id) as live:
        return render_process(live.processes.get(pid))


@route(
    "GET",
    "/v1/sandboxes/{id}/processes/{pid}/output",
    gives=Raw(EVENTS, "start, stdout, stderr, gap, then exit or error", endless=True),
    guest=True,
    plus=True,
)
async def follow_process(call: Call, id: SandboxId, pid: Pid) -> Pieces:
    """Its kept output (the last 1 MiB), then new output, then its exit."""
    async with guest(call, id) as live:
        return _follow(live.processes.get(pid))


@route("POST", "/v1/sandboxes/{id}/processes/{pid}/stdin", takes=RawBody(MAX_STDIN_BYTES), guest=True, plus=True)
async def write_stdin(call: Call, id: SandboxId, pid: Pid, body: bytes, eof: Flag = False) -> None:
    """At most 1 MiB; `?eof=true` closes it afterwards."""
    async with guest(call, id, WRITE_S) as live:
        command = live.processes.get(pid)
        if body:
            await command.write(body)
        if eof:
            command.close_stdin()


@route("POST", "/v1/sandboxes/{id}/processes/{pid}/signal", guest=True, plus=True)
async def signal_process(call: Call, id: SandboxId, pid: Pid, body: SignalBody) -> None:
    """By number; the default is 15."""
    async with guest(call, id) as live:
        live.processes.get(pid).signal(body.signal)


@route("POST", "/v1/sandboxes/{id}/processes/{pid}/resize", guest=True, plus=True)
async def resize_process(call: Call, id: SandboxId, pid: Pid, body: PtyBody) -> None:
    """Of its terminal."""
    async with guest(call, id) as live:
        live.processes.get(pid).resize(body.rows, body.cols)


async def _follow(command: GuestProcess) -> Pieces:
    yield render_event("start", {"pid": command.pid})
    async with aclosing(command.follow()) as items:  # type: ignore[type-var]
        async for item in items:
            if isinstance(item, Output):
                yield render_data(item.kind, item.data)
            elif isinstance(item, Gap):
                yield render_event("gap", {"bytes": item.bytes})
            else:
                yield render_exit(item)
