"""Snapshots and their templates."""

from __future__ import annotations

from forkd.daemon.call import Call, Daemon
from forkd.daemon.errors import with_status
from forkd.daemon.inputs import Flag, Limit, PageToken, SnapshotBody, TagInPath
from forkd.daemon.render import render_snapshot, render_snapshot_detail, render_template, take_page
from forkd.daemon.route import Answer, route
from forkd.errors import InvalidInput
from forkd.host.threads import in_thread
from forkd.image import ImageStore
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.model.network import NO_NETWORK
from forkd.runtime.freeze import Warmup
from forkd.runtime.snapshots import SnapshotRequest
from forkd.wire.api import SnapshotInfo, SnapshotInfoDetail, TemplateInfo

_NO_IMAGE = "Name an image of the store, as in: forkd image ls"


@route("GET", "/v1/snapshots")
async def list_snapshots(
    call: Call, limit: Limit | None = None, page_token: PageToken | None = None
) -> Answer[list[SnapshotInfo]]:
    """By tag."""
    page = [render_snapshot(view) for view in call.runtime.snapshots.list()]
    return take_page(page, "tag", limit, page_token)


@route("POST", "/v1/snapshots", status=202, also={201: "It is ready"}, errors=(404, 409, 501, 502, 504))
async def create_snapshot(call: Call, body: SnapshotBody) -> Answer[SnapshotInfo]:
    """Make one: 201 when it is ready; **+** 202 while it is being made."""
    asked = SnapshotRequest(
        tag=parse_tag(body.tag),
        image=await _find_image(call.daemon, body),
        machine=MachineSpec(body.memory_mib, body.vcpus, body.cpu_template),
        warmup=Warmup(body.warm, body.warm_command, body.warm_timeout_secs, body.rehearse),
        replace=body.replace,
        network=body.network or NO_NETWORK,
    )
    view = await call.runtime.snapshots.create(asked)
    if body.image is not None and not body.wait:
        return Answer(render_snapshot(view))
    async with call.while_connected():
        view = await call.runtime.snapshots.wait(asked.tag)
    return Answer(render_snapshot(view), 201)


@route("GET", "/v1/snapshots/{tag}", errors=(409,), plus=True)
async def get_snapshot(call: Call, tag: TagInPath) -> SnapshotInfo:
    """Also while it is `writing`."""
    return render_snapshot(call.runtime.snapshots.get(parse_tag(tag)))


@route("DELETE", "/v1/snapshots/{tag}", errors=(409,))
async def delete_snapshot(call: Call, tag: TagInPath, cascade: Flag = False, force: Flag = False) -> None:
    """An unfinished one is given up. Layers over it: 409, unless `cascade` (they go too) or `force` (they stay, of no
    use); both: 400."""
    if cascade and force:
        raise InvalidInput("cascade and force exclude each other")
    await call.runtime.snapshots.remove(parse_tag(tag), cascade=cascade, force=force)


@route("GET", "/v1/snapshots/{tag}/info", errors=(409,))
async def get_snapshot_info(call: Call, tag: TagInPath) -> SnapshotInfoDetail:
    """Its size, the snapshots it stands on, and those that stand on it."""
    view = call.runtime.snapshots.get(parse_tag(tag))
    return render_snapshot_detail(await in_thread(lambda: call.runtime.snapshots.look_at(view)))


@route("POST", "/v1/snapshots/{tag}/warm", errors=(409, 422, 501, 502, 504), plus=True)
async def warm_snapshot(call: Call, tag: TagInPath) -> TemplateInfo:
    """Make its template before the first fork, or get the existing one. No body.
    422 `warmup_failed`: its rehearsal hung, or ended the interpreter. 501 `unsupported`: no
    templates with these settings, this engine or this host."""
    async with call.while_connected():
        return render_template(await call.runtime.snapshots.warm(parse_tag(tag)))


@route("GET", "/v1/templates", plus=True)
async def list_templates(
    call: Call, limit: Limit | None = None, page_token: PageToken | None = None
) -> Answer[list[TemplateInfo]]:
    """By tag."""
    page = [render_template(view) for view in call.runtime.templates.views()]
    return take_page(page, "tag", limit, page_token)


async def _find_image(daemon: Daemon, body: SnapshotBody) -> str:
    if body.image is not None:
        return body.image
    if body.kernel is None or body.rootfs is None:
        raise with_status(InvalidInput("The field image is missing, or kernel and rootfs", hint=_NO_IMAGE), 422)
    kernel, rootfs = body.kernel, body.rootfs
    return await in_thread(lambda: resolve_image(daemon.images, kernel, rootfs))


def resolve_image(images: ImageStore, kernel: str, rootfs: str) -> str:
    """The id of the one image that both mean. Compared as texts with what the store has: no path is opened."""
    every = images.list()
    found = {image.id for image in every if rootfs in (image.id, image.name, str(image.root))}
    found &= {image.id for image in every if kernel in (image.id, image.name, str(image.kernel))}
    if not found:
        raise InvalidInput("No image of this daemon's store has this kernel and rootfs", hint=_NO_IMAGE)
    return sorted(found)[0]
