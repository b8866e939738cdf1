"""What a sandbox reaches, and what reaches it: the part of `Sandbox` that is about its network."""

from __future__ import annotations

from typing import Self

from forkd.client.arguments import NetworkLike
from forkd.client.async_controller import AsyncController
from forkd.errors import NotFound
from forkd.wire.api import NetworkInfo, PortInfo


class AsyncExposedPort:
    """A port of a guest at an address of the daemon's host. In a `with` block it is closed at the end."""

    def __init__(self, controller: AsyncController, sandbox_id: str, info: PortInfo) -> None:
        self._controller = controller
        self._sandbox_id = sandbox_id
        self.guest_port = info["port"]
        self.host = info["address"]
        self.port = info["host_port"]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.guest_port} at {self.host}:{self.port})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Safe to repeat."""
        try:
            await self._controller.close_port(self._sandbox_id, self.guest_port)
        except NotFound:
            pass


class AsyncNetworking:
    _controller: AsyncController
    _id: str

    async def network(self) -> NetworkInfo:
        """Its rules, and what it used."""
        return (await self._controller.get_sandbox(self._id))["network"]

    async def set_network(self, network: NetworkLike) -> NetworkInfo:
        """Another one while it runs, all or nothing: `Network(allow=["pypi"])`, "open" or "none"."""
        return (await self._controller.set_sandbox_network(self._id, network))["network"]

    async def expose(self, port: int, host_port: int | None = None, *, anyone: bool = False) -> AsyncExposedPort:
        """A port of the guest at a local address, for root and the daemon's user; `anyone`: for all users."""
        info = await self._controller.expose_port(self._id, port, host_port, anyone=anyone)
        return AsyncExposedPort(self._controller, self._id, info)

    async def ports(self) -> list[PortInfo]:
        return await self._controller.list_ports(self._id)
