"""Health, version, metrics, lineage, events."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import aclosing
from typing import Annotated, Any, cast

from starlette.responses import Response

from forkd import __version__
from forkd.daemon import metrics
from forkd.daemon.call import Call, Daemon
from forkd.daemon.errors import Stopping
from forkd.daemon.inputs import MAX_LIMIT, Flag, Limit, Number, ShortText
from forkd.daemon.render import render_event_record, render_lineage, render_sandbox
from forkd.daemon.route import InHeader, Raw, route
from forkd.daemon.streams import EVENTS, EventStream, Pieces, render_event
from forkd.errors import InvalidInput, NoCapacity
from forkd.model.sandbox import LIVE, State
from forkd.network.lease import Usage
from forkd.runtime.events import EventLog
from forkd.runtime.registry import SandboxRecord
from forkd.wire.api import Event, Health, Lineage, LineageSandbox, Readiness, VersionResponse

_MAX_ID_DIGITS = 19


@route("GET", "/healthz", common=False)
async def answer_health(call: Call) -> Health:
    """`{"ok": true}`: the process answers."""
    return {"ok": True}


@route("GET", "/readyz", common=False, errors=(503,), plus=True)
async def answer_readiness(call: Call) -> Readiness:
    """`{"ready": true}`: recovery is over, the engine can run, and deadlines are looked after; else 503."""
    if call.daemon.activity.draining:
        raise Stopping
    if not call.runtime.ready:
        raise NoCapacity("The daemon looks after no deadlines", hint="Its log says why. Restart it: sandboxes run on")
    return {"ready": True}


@route("GET", "/version")
async def answer_version(call: Call) -> VersionResponse:
    """`version`, `api` (`v1`); **+** `engine`, `isolation`, `pid`, `home` (its directory), `listeners` (URLs),
    `tcp_access` (`off`, `open`: no token is needed, `token`, `locked`: no token is left), `idle_exit_secs` (0: it
    stays)."""
    engine = call.runtime.engine
    return {
        "version": __version__,
        "api": "v1",
        "engine": engine.name,
        "isolation": engine.isolation,
        "pid": os.getpid(),
        "home": str(call.runtime.home.root),
        "listeners": call.daemon.listeners,
        "tcp_access": call.daemon.tcp.state,
        "idle_exit_secs": call.daemon.activity.idle_exit_s,
    }


@route("POST", "/v1/stay", plus=True)
async def stay(call: Call) -> None:
    """The daemon does not end when it is idle any more, until it is started again."""
    call.daemon.activity.idle_exit_s = 0.0


@route("GET", "/metrics", gives=Raw(metrics.CONTENT_TYPE, "Prometheus"))
async def answer_metrics(call: Call) -> bytes:
    """For Prometheus."""
    usage = await call.runtime.sandboxes.leases.total()
    return call.daemon.metrics.render(lambda seen: _look(seen, call.daemon, usage))


@route("GET", "/v1/lineage", plus=True)
async def show_lineage(call: Call) -> Lineage:
    """Snapshots with their parents and the sandboxes forked from each; the snapshot of an orphan is gone. What each
    holds alone is `unique_bytes`: on disk, or in memory."""
    lineage = await call.runtime.lineage()
    snapshots = [
        render_lineage(each.detail, [_render_member(*member) for member in each.sandboxes])
        for each in lineage.snapshots
    ]
    return {"snapshots": snapshots, "orphans": [_render_member(*member) for member in lineage.orphans]}


def _render_member(record: SandboxRecord, unique_bytes: int | None) -> LineageSandbox:
    info = cast(LineageSandbox, render_sandbox(record))
    return info if unique_bytes is None else info | {"unique_bytes": unique_bytes}


@route("GET", "/v1/events", streams=Raw(EVENTS, "A list, or with follow=true a stream"), plus=True)
async def list_events(
    call: Call,
    follow: Flag = False,
    since: Number | None = None,
    type: ShortText | None = None,
    sandbox_id: ShortText | None = None,
    limit: Limit | None = None,
    last_event_id: Annotated[str, InHeader()] | None = None,
) -> list[Event] | Response:
    """SSE with `?follow=true`; `since` and `Last-Event-Id` are ids of events."""
    log = call.runtime.events
    if not follow:
        found = log.list(since=since or 0, type=type, sandbox_id=sandbox_id, limit=limit or MAX_LIMIT)
        return [render_event_record(record) for record in found]
    if last_event_id is not None:
        since = parse_event_id(last_event_id)
    return EventStream(_follow(log, {"since": since, "type": type, "sandbox_id": sandbox_id}), endless=True)


def parse_event_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < _MAX_ID_DIGITS):
        raise InvalidInput("Last-Event-ID must be the id of an event, a whole number")
    return int(text)


async def _follow(log: EventLog, what: Mapping[str, Any]) -> Pieces:
    async with aclosing(log.follow(**what)) as records:
        async for record in records:
            yield render_event(record.type, render_event_record(record), record.id)


def _look(seen: metrics.Metrics, daemon: Daemon, usage: Usage) -> None:
    leases = daemon.runtime.sandboxes.leases
    seen.networks.set(leases.count)
    seen.count_up(seen.network_bytes.labels("in"), usage.bytes_in)
    seen.count_up(seen.network_bytes.labels("out"), usage.bytes_out)
    for reason, count in leases.refusals.totals.items():
        seen.count_up(seen.network_refused.labels(reason), count)
    counts = daemon.runtime.sandboxes.counts()
    seen.snapshots.set(len(daemon.runtime.snapshots.list()))
    seen.branches.set(daemon.runtime.branches.in_flight)
    seen.branch_cap.set(daemon.runtime.branches.at_once)
    seen.sandboxes.set(sum(counts.get(state, 0) for state in LIVE))
    for state in State:
        seen.by_state.labels(state.value).set(counts.get(state, 0))
    templates = daemon.runtime.templates
    views = templates.views()
    seen.templates.set(len(views))
    seen.template_bytes.set(sum(view.memory_bytes for view in views))
    seen.count_up(seen.templates_made, templates.made)
    seen.count_up(seen.templates_failed, templates.failed)
