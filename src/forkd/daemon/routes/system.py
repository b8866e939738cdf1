"""Health, version, metrics, lineage, events."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response

from forkd import __version__
from forkd.daemon import metrics, schemas
from forkd.daemon.envelope import stopping
from forkd.daemon.openapi import STREAM, Responses, errors, gives
from forkd.daemon.render import Json, render_event_record, render_sandbox
from forkd.daemon.routes.parameters import MAX_LIMIT, Flag, Limit, OptionalNumber
from forkd.daemon.sse import EventStream, render_event
from forkd.daemon.state import Daemon, call_of
from forkd.errors import InvalidInput
from forkd.model.sandbox import LIVE, State
from forkd.runtime.events import EventLog

router = APIRouter()

_MAX_ID_DIGITS = 19


@router.get("/healthz", response_model=schemas.Health)
async def answer_health() -> Response:
    return Json({"ok": True})


@router.get("/readyz", response_model=schemas.Readiness, responses={503: {"model": schemas.Error}})
async def answer_readiness(request: Request) -> Response:
    daemon = call_of(request).daemon
    if daemon.activity.draining or not daemon.fleet.ready:
        raise stopping()
    return Json({"ready": True})


@router.get("/version", response_model=schemas.Version, responses=errors())
async def answer_version(request: Request) -> Response:
    daemon = call_of(request).daemon
    engine = daemon.fleet.engine
    version = {"version": __version__, "api": "v1", "engine": engine.name, "isolation": engine.isolation}
    return Json(version | {"pid": os.getpid(), "listeners": daemon.listeners})


@router.get("/metrics", response_class=Response, responses=gives("text/plain", "Prometheus") | errors())
async def answer_metrics(request: Request) -> Response:
    daemon = call_of(request).daemon
    return Response(daemon.metrics.render(lambda seen: _look(seen, daemon)), media_type=metrics.CONTENT_TYPE)


@router.get("/v1/lineage", response_model=schemas.Lineage, responses=errors())
async def show_lineage(request: Request) -> Response:
    lineage = call_of(request).fleet.lineage()
    snapshots = [
        {
            "tag": view.tag,
            "parent_tag": None,
            "status": view.status,
            "sandboxes": [render_sandbox(record) for record in records],
        }
        for view, records in lineage.snapshots
    ]
    return Json({"snapshots": snapshots, "orphans": [render_sandbox(record) for record in lineage.orphans]})


_EVENTS: Responses = {
    200: {
        "description": "A list, or with follow=true a stream",
        "content": STREAM,
    }
}


@router.get("/v1/events", response_model=schemas.list_of(schemas.Event), responses=_EVENTS | errors())
async def list_events(
    request: Request,
    follow: Flag = False,
    since: OptionalNumber = None,
    type: Annotated[str | None, Query(max_length=64)] = None,
    sandbox_id: Annotated[str | None, Query(max_length=64)] = None,
    limit: Limit = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    log = call_of(request).fleet.events
    if not follow:
        found = log.list(since=since or 0, type=type, sandbox_id=sandbox_id, limit=limit or MAX_LIMIT)
        return Json([render_event_record(record) for record in found])
    if last_event_id is not None:
        since = parse_event_id(last_event_id)
    return EventStream(_follow(log, {"since": since, "type": type, "sandbox_id": sandbox_id}), endless=True)


def parse_event_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < _MAX_ID_DIGITS):
        raise InvalidInput("Last-Event-ID is not the id of an event")
    return int(text)


async def _follow(log: EventLog, what: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
    async for record in log.follow(**what):
        yield render_event(record.type, render_event_record(record), record.id)


def _look(seen: metrics.Metrics, daemon: Daemon) -> None:
    counts = daemon.fleet.counts()
    seen.snapshots.set(len(daemon.fleet.snapshots.list()))
    seen.sandboxes.set(sum(counts.get(state, 0) for state in LIVE))
    for state in State:
        seen.by_state.labels(state.value).set(counts.get(state, 0))
    templates = daemon.fleet.templates
    views = templates.views()
    seen.templates.set(len(views))
    seen.template_bytes.set(sum(view.memory_bytes for view in views))
    seen.count_up(seen.templates_made, templates.made)
    seen.count_up(seen.templates_failed, templates.failed)
