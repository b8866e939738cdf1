"""Workspaces."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon import schemas
from forkd.daemon.bodies import SuspendBody, WorkspaceBody
from forkd.daemon.openapi import BODY, NAMED, errors, takes
from forkd.daemon.reading import read_model
from forkd.daemon.render import Json, render_workspace
from forkd.daemon.routes.parameters import Limit, Name, PageToken, take_page
from forkd.daemon.state import Call, call_of
from forkd.runtime.workspaces import WorkspaceRecord

router = APIRouter()


@router.get("/v1/workspaces", response_model=schemas.list_of(schemas.Workspace), responses=errors())
async def list_workspaces(request: Request, limit: Limit = None, page_token: PageToken = None) -> Response:
    records = sorted(call_of(request).fleet.workspaces.list(), key=lambda record: record.name)
    page, headers = take_page([(record.name, record) for record in records], limit, page_token)
    return Json([render_workspace(record) for record in page], headers=headers)


@router.post(
    "/v1/workspaces",
    status_code=201,
    response_model=schemas.Workspace,
    responses=errors(*NAMED, *BODY, 501, 502, 504),
    openapi_extra=takes(WorkspaceBody),
)
async def create_workspace(request: Request) -> Response:
    call = call_of(request)
    body = await read_model(request, WorkspaceBody)
    record = await call.fleet.workspaces.create(body.name, body.snapshot_tag, body.limits())
    return _answer(call, record, 201)


@router.get("/v1/workspaces/{name}", response_model=schemas.Workspace, responses=errors(404))
async def get_workspace(request: Request, name: Name) -> Response:
    call = call_of(request)
    return _answer(call, call.fleet.workspaces.get(name))


@router.delete("/v1/workspaces/{name}", status_code=204, responses=errors(*NAMED))
async def delete_workspace(request: Request, name: Name) -> Response:
    await call_of(request).fleet.workspaces.remove(name)
    return Response(status_code=204)


@router.post(
    "/v1/workspaces/{name}/suspend",
    response_model=schemas.Workspace,
    responses=errors(*NAMED, *BODY, 502, 504),
    openapi_extra=takes(SuspendBody),
)
async def suspend_workspace(request: Request, name: Name) -> Response:
    call = call_of(request)
    await read_model(request, SuspendBody)
    return _answer(call, await call.fleet.workspaces.suspend(name))


@router.post("/v1/workspaces/{name}/resume", response_model=schemas.Workspace, responses=errors(*NAMED, 501, 502, 504))
async def resume_workspace(request: Request, name: Name) -> Response:
    call = call_of(request)
    return _answer(call, await call.fleet.workspaces.resume(name))


def _answer(call: Call, record: WorkspaceRecord, status: int = 200) -> Response:
    if record.live_sandbox_id is not None:
        call.sandboxes.append(record.live_sandbox_id)
    return Json(render_workspace(record), status)
