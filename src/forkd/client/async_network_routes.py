"""The routes for networks and exposed ports: the part of the controller that is about what reaches a sandbox."""

from __future__ import annotations

from typing import TypeVar

from forkd.client.arguments import NetworkLike, drop_unset, render_network
from forkd.client.call import API, Again, Call, delete, get, post
from forkd.wire import api

T = TypeVar("T")


class AsyncNetworkRoutes:
    async def _send(self, call: Call[T]) -> T:
        raise NotImplementedError

    async def set_sandbox_network(self, sandbox_id: str, network: NetworkLike) -> api.SandboxInfo:
        """Another network while it runs, all or nothing."""
        path, body = (API, "sandboxes", sandbox_id, "network"), {"network": render_network(network)}
        return await self._send(Call(api.SandboxInfo, "PUT", path, body=body, again=Again.SAFE))

    async def expose_port(
        self, sandbox_id: str, port: int, host_port: int | None = None, *, anyone: bool = False
    ) -> api.PortInfo:
        """A port of the guest at an address of the daemon's host. `anyone`: for all users of that host."""
        body = drop_unset(port=port, host_port=host_port, anyone=anyone or None)
        return await self._send(post(api.PortInfo, "sandboxes", sandbox_id, "ports", body=body))

    async def list_ports(self, sandbox_id: str) -> list[api.PortInfo]:
        return await self._send(get(list[api.PortInfo], "sandboxes", sandbox_id, "ports"))

    async def close_port(self, sandbox_id: str, port: int) -> None:
        await self._send(delete("sandboxes", sandbox_id, "ports", str(port)))
