"""Snapshots."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from forkd.daemon import schemas
from forkd.daemon.bodies import CompactBody, SnapshotBody
from forkd.daemon.client import while_connected
from forkd.daemon.openapi import BODY, NAMED, Responses, errors, takes
from forkd.daemon.reading import read_model
from forkd.daemon.render import Json, render_snapshot, render_snapshot_detail, render_template
from forkd.daemon.routes.parameters import Flag, Limit, PageToken, Tag, take_page
from forkd.daemon.state import Daemon, call_of
from forkd.errors import InvalidInput, Unsupported
from forkd.host.threads import in_thread
from forkd.image import ImageStore
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.runtime.snapshots import SnapshotRequest
from forkd.runtime.warmup import Warmup

router = APIRouter()

_MAKING: Responses = {201: {"model": schemas.Snapshot, "description": "It is ready"}}
_NO_IMAGE = "Name an image of the store, as in: forkd image ls"


@router.get("/v1/snapshots", response_model=schemas.list_of(schemas.Snapshot), responses=errors())
async def list_snapshots(request: Request, limit: Limit = None, page_token: PageToken = None) -> Response:
    views = call_of(request).fleet.snapshots.list()
    page, headers = take_page([(view.tag, view) for view in views], limit, page_token)
    return Json([render_snapshot(view) for view in page], headers=headers)


@router.post(
    "/v1/snapshots",
    status_code=202,
    response_model=schemas.Snapshot,
    responses={**_MAKING, **errors(*NAMED, *BODY, 501, 502, 504)},
    openapi_extra=takes(SnapshotBody),
)
async def create_snapshot(request: Request) -> Response:
    call = call_of(request)
    daemon = call.daemon
    body = await read_model(request, SnapshotBody)
    compatible = body.image is None
    asked = SnapshotRequest(
        tag=parse_tag(body.tag),
        image=await _find_image(daemon, body),
        machine=MachineSpec(body.memory_mib, body.vcpus, body.cpu_template),
        warmup=Warmup(body.warm, body.warm_command, body.warm_timeout_secs, body.rehearse),
        replace=body.replace,
    )
    view = await daemon.fleet.snapshots.create(asked)
    if not (compatible or body.wait):
        return Json(render_snapshot(view), 202)
    async with while_connected(call.link, request.receive):
        view = await daemon.fleet.snapshots.wait(asked.tag)
    return Json(render_snapshot(view), 201)


@router.get("/v1/snapshots/{tag}", response_model=schemas.Snapshot, responses=errors(*NAMED))
async def get_snapshot(request: Request, tag: Tag) -> Response:
    return Json(render_snapshot(call_of(request).fleet.snapshots.get(parse_tag(tag))))


@router.delete("/v1/snapshots/{tag}", status_code=204, responses=errors(*NAMED))
async def delete_snapshot(request: Request, tag: Tag, cascade: Flag = False, force: Flag = False) -> Response:
    if cascade and force:
        raise InvalidInput("cascade and force exclude each other")
    await call_of(request).fleet.snapshots.remove(parse_tag(tag))
    return Response(status_code=204)


@router.get("/v1/snapshots/{tag}/info", response_model=schemas.SnapshotDetail, responses=errors(*NAMED))
async def get_snapshot_info(request: Request, tag: Tag) -> Response:
    return Json(render_snapshot_detail(call_of(request).fleet.snapshots.detail(parse_tag(tag))))


@router.post("/v1/snapshots/{tag}/warm", response_model=schemas.Template, responses=errors(*NAMED, 422, 501, 502, 504))
async def warm_snapshot(request: Request, tag: Tag) -> Response:
    call = call_of(request)
    async with while_connected(call.link, request.receive):
        return Json(render_template(await call.fleet.warm(parse_tag(tag))))


@router.get("/v1/templates", response_model=schemas.list_of(schemas.Template), responses=errors())
async def list_templates(request: Request, limit: Limit = None, page_token: PageToken = None) -> Response:
    views = call_of(request).fleet.templates.views()
    page, headers = take_page([(view.tag, view) for view in views], limit, page_token)
    return Json([render_template(view) for view in page], headers=headers)


@router.post(
    "/v1/snapshots/{tag}/compact",
    status_code=501,
    response_model=schemas.Error,
    responses=errors(*NAMED, *BODY, 501),
    openapi_extra=takes(CompactBody),
)
async def compact_snapshot(request: Request, tag: Tag) -> Response:
    body = await read_model(request, CompactBody)
    if parse_tag(body.to) == parse_tag(tag):
        raise InvalidInput("A snapshot cannot be compacted into itself")
    call_of(request).fleet.snapshots.get(parse_tag(tag))
    raise Unsupported("There are no chains to compact yet", hint="Every snapshot is whole: use it as it is")


async def _find_image(daemon: Daemon, body: SnapshotBody) -> str:
    if body.image is not None:
        return body.image
    if body.kernel is None or body.rootfs is None:
        error = InvalidInput("The field image is missing, or kernel and rootfs", hint=_NO_IMAGE)
        error.status = 422
        raise error
    kernel, rootfs = body.kernel, body.rootfs
    return await in_thread(lambda: resolve_image(daemon.images, kernel, rootfs))


def resolve_image(images: ImageStore, kernel: str, rootfs: str) -> str:
    """The id of the one image that both mean. Compared as texts with what the store has: no path is opened."""
    every = images.list()
    found = {image.id for image in every if rootfs in (image.id, image.name, str(image.root))}
    found &= {image.id for image in every if kernel in (image.id, image.name, str(image.kernel))}
    if not found:
        raise InvalidInput("kernel and rootfs are no image of this daemon's store", hint=_NO_IMAGE)
    return sorted(found)[0]
