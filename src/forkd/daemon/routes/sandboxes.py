"""Sandboxes: forking, looking, ending, pausing."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon import schemas
from forkd.daemon.bodies import BranchBody, SpawnBody, TimeoutBody
from forkd.daemon.errors import with_status
from forkd.daemon.openapi import BODY, NAMED, Responses, errors, gives, takes, with_header
from forkd.daemon.reading import parse_model, read_json, read_model
from forkd.daemon.render import Json, render_sandbox, render_spawned
from forkd.daemon.routes.parameters import MAX_ID, Flag, Id, Limit, PageToken, next_page
from forkd.daemon.state import call_of
from forkd.errors import InvalidInput, Unsupported
from forkd.model.names import parse_tag
from forkd.model.sandbox import OnTimeout, SandboxSpec, State, check_pairs
from forkd.runtime.registry import IdempotencyKey, SandboxQuery

router = APIRouter()

_MAX_KEY = 200
_KEY = re.compile(r"[\x20-\x7e]{1,200}")
_STATES = "|".join(state.value for state in State)
_SPAWNED: Responses = {201: with_header("X-Forkd-Failed", "How many did not come up, with allow_partial")}
_PAGE: Responses = {200: with_header("X-Next-Token", "page_token of the next page; absent on the last")}


@router.get("/v1/sandboxes", response_model=schemas.list_of(schemas.Sandbox), responses={**_PAGE, **errors()})
async def list_sandboxes(
    request: Request,
    state: Annotated[str | None, Query(pattern=f"^({_STATES})$")] = None,
    snapshot_tag: Annotated[str | None, Query(max_length=64)] = None,
    label: Annotated[list[str] | None, Query()] = None,
    metadata: Annotated[list[str] | None, Query()] = None,
    limit: Limit = None,
    page_token: PageToken = None,
) -> Response:
    query = SandboxQuery(
        states=frozenset() if state is None else frozenset({State(state)}),
        snapshot_tag=None if snapshot_tag is None else parse_tag(snapshot_tag),
        labels=parse_pairs(label or (), "label"),
        metadata=parse_pairs(metadata or (), "metadata"),
        after=parse_page(page_token),
        limit=limit,
    )
    records, after = call_of(request).fleet.find(query)
    return Json([render_sandbox(record) for record in records], headers=next_page(after))


@router.post(
    "/v1/sandboxes",
    status_code=201,
    response_model=schemas.list_of(schemas.Sandbox),
    responses={**_SPAWNED, **errors(*NAMED, *BODY, 501, 502, 504)},
    openapi_extra=takes(SpawnBody),
)
async def spawn_sandboxes(
    request: Request,
    phases: Flag = False,
    idempotency_key: Annotated[str | None, Header(max_length=_MAX_KEY)] = None,
) -> Response:
    call = call_of(request)
    raw = await read_json(request)
    spec = parse_spec(parse_model(raw, SpawnBody))
    key = None if idempotency_key is None else parse_key(idempotency_key, call.token or "", raw)
    begun = time.perf_counter()
    spawned = await call.fleet.spawn(spec, key=key)
    if spawned.fork_s:  # else these were made by the same request before
        call.daemon.metrics.spawn_s.observe(time.perf_counter() - begun)
        call.daemon.metrics.spawned.inc(len(spawned.records))
    for way in spawned.ways:
        call.daemon.metrics.forks.labels(way.value).inc()
    for took_s in spawned.contract_s:
        call.daemon.metrics.identity_s.observe(took_s)
    call.sandboxes += [record.id for record in spawned.records]
    headers = {"X-Forkd-Failed": str(spawned.failed)} if spawned.failed else {}
    return Json(render_spawned(spawned, phases=phases), 201, headers)


@router.get("/v1/sandboxes/{id}", response_model=schemas.Sandbox, responses=errors(404))
async def get_sandbox(request: Request, id: Id) -> Response:
    return Json(render_sandbox(call_of(request).fleet.get(id)))


@router.delete("/v1/sandboxes/{id}", status_code=204, responses=errors(*NAMED))
async def kill_sandbox(request: Request, id: Id) -> Response:
    await call_of(request).fleet.kill(id)
    return Response(status_code=204)


@router.post("/v1/sandboxes/{id}/pause", response_model=schemas.Sandbox, responses=errors(*NAMED, 502, 504))
async def pause_sandbox(request: Request, id: Id) -> Response:
    return Json(render_sandbox(await call_of(request).fleet.pause(id)))


@router.post("/v1/sandboxes/{id}/resume", response_model=schemas.Sandbox, responses=errors(*NAMED, 502, 504))
async def resume_sandbox(request: Request, id: Id) -> Response:
    return Json(render_sandbox(await call_of(request).fleet.resume(id)))


@router.post(
    "/v1/sandboxes/{id}/timeout",
    response_model=schemas.Sandbox,
    responses=errors(*NAMED, *BODY),
    openapi_extra=takes(TimeoutBody),
)
async def set_sandbox_timeout(request: Request, id: Id) -> Response:
    body = await read_model(request, TimeoutBody)
    on_timeout = None if body.on_timeout is None else OnTimeout(body.on_timeout)
    return Json(render_sandbox(call_of(request).fleet.set_timeout(id, body.timeout_secs, on_timeout)))


@router.get(
    "/v1/sandboxes/{id}/console",
    response_class=Response,
    responses=gives("text/plain", "The end of the guest's console") | errors(404),
)
async def read_console(request: Request, id: Id) -> Response:
    text = call_of(request).fleet.console(id)
    return Response(text.encode("utf-8", "replace"), media_type="text/plain; charset=utf-8")


@router.post(
    "/v1/sandboxes/{id}/branch",
    status_code=501,
    response_model=schemas.Error,
    responses=errors(*NAMED, *BODY, 501),
    openapi_extra=takes(BranchBody),
)
async def branch_sandbox(request: Request, id: Id) -> Response:
    check_branch(await read_model(request, BranchBody))
    call_of(request).fleet.get(id)
    raise Unsupported("A running sandbox cannot be branched yet", hint="Fork its snapshot again instead")


def check_branch(body: BranchBody) -> None:
    """What can never be asked for, in the order of forkd's own checks."""
    for tag in (body.tag, body.parent_tag):
        if tag is not None:
            parse_tag(tag)
    if body.mode is not None and (body.diff or body.live):
        raise InvalidInput("mode goes with neither diff nor live")
    if body.measure_diff + (body.diff or body.mode == "diff") + (body.live or body.mode == "live") > 1:
        raise InvalidInput("Only one of measure_diff, diff and live can be asked for")
    if not body.wait and not (body.live or body.mode == "live"):
        raise InvalidInput("Only a live branch can be asked for without waiting")
    if body.parent_tag is not None and not (body.diff or body.mode == "diff"):
        raise InvalidInput("parent_tag needs a diff")


def parse_spec(body: SpawnBody) -> SandboxSpec:
    if body.live_fork or body.hugepages:
        asked = "live_fork" if body.live_fork else "hugepages"
        error = Unsupported(f"{asked} is not built yet", hint="Ask without it: forks share memory as they are")
        raise with_status(error, 400)
    return SandboxSpec(
        snapshot_tag=parse_tag(body.snapshot_tag),
        n=body.n,
        limits=body.limits(),
        timeout_s=body.timeout_secs,
        on_timeout=OnTimeout(body.on_timeout),
        env=body.env,
        labels=body.labels,
        metadata=body.metadata,
        agent_port=body.agent_port,
        allow_partial=body.allow_partial,
    )


def parse_key(key: str, owner: str, raw: Any) -> IdempotencyKey:
    if _KEY.fullmatch(key) is None:
        raise InvalidInput(f"Idempotency-Key is of 1 to {_MAX_KEY} printable ASCII characters")
    canonical = json.dumps(raw, sort_keys=True, separators=(",", ":"))
    return IdempotencyKey(key, owner, hashlib.sha256(canonical.encode()).hexdigest())


def parse_page(token: str | None) -> int:
    if token is None:
        return 0
    if not (token.isascii() and token.isdigit() and len(token) < 20 and int(token) <= MAX_ID):
        raise InvalidInput("This page_token is none of ours", hint="Take it from the header X-Next-Token")
    return int(token)


def parse_pairs(texts: Sequence[str], what: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(f"A filter by {what} is name=value")
        pairs[name] = value
    check_pairs(pairs, what)
    return pairs
