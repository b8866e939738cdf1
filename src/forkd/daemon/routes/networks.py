"""Networks of running sandboxes, and ports of their guests at an address of this host."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from forkd.daemon.call import Call
from forkd.daemon.inputs import Body, NetworkField, SandboxId, check_digits
from forkd.daemon.render import render_port, render_sandbox
from forkd.daemon.route import route
from forkd.wire.api import PortInfo, SandboxInfo

Port = Annotated[int, Field(ge=1, le=65535)]
PortInPath = Annotated[int, Field(ge=1, le=65535), BeforeValidator(check_digits)]


class ChangeNetworkBody(Body):
    network: NetworkField


class PortBody(Body):
    port: Port
    host_port: Port | None = None
    anyone: bool = False


@route("PUT", "/v1/sandboxes/{id}/network", errors=(409, 501, 502, 504), plus=True)
async def change_network(call: Call, id: SandboxId, body: ChangeNetworkBody) -> SandboxInfo:
    """Another [network](#networks) while it runs, all or nothing; connections that it does not allow end. A paused one:
    409."""
    record = await call.runtime.networks.change(id, body.network)
    return render_sandbox(record, await call.runtime.networks.look_at(record))


@route("POST", "/v1/sandboxes/{id}/ports", status=201, errors=(409, 501, 502, 504), plus=True)
async def expose_port(call: Call, id: SandboxId, body: PortBody) -> PortInfo:
    """Listen at 127.0.0.1, at `host_port` or any free port, and pass connections on to `port` in the guest. For root
    and the daemon's user only, unless `anyone`."""
    return render_port(await call.runtime.networks.expose(id, body.port, body.host_port, anyone=body.anyone))


@route("GET", "/v1/sandboxes/{id}/ports", plus=True)
async def list_ports(call: Call, id: SandboxId) -> list[PortInfo]:
    """By port."""
    return [render_port(each) for each in call.runtime.networks.ports(id)]


@route("DELETE", "/v1/sandboxes/{id}/ports/{port}", errors=(409,), plus=True)
async def close_port(call: Call, id: SandboxId, port: PortInPath) -> None:
    """Its connections end."""
    await call.runtime.networks.close_port(id, port)
