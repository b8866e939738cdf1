# Generated from async_networking.py by tools/unasync.py: do not edit.
"""What a sandbox reaches, and what reaches it: the part of `Sandbox` that is about its network."""

from __future__ import annotations

from typing import Self

from forkd.client.arguments import NetworkLike
from forkd.client.controller import Controller
from forkd.errors import NotFound
from forkd.wire.api import NetworkInfo, PortInfo


class ExposedPort:
    """A port of a guest at an address of the daemon's host. In a `with` block it is closed at the end."""

    def __init__(self, controller: Controller, sandbox_id: str, info: PortInfo) -> None:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Safe to repeat."""
        try:
            self._controller.close_port(self._sandbox_id, self.guest_port)
        except NotFound:
            pass


class Networking:
    _controller: Controller
    _id: str

    def network(self) -> NetworkInfo:
        """Its rules, and what it used."""
        return (self._controller.get_sandbox(self._id))["network"]

    def set_network(self, network: NetworkLike) -> NetworkInfo:
        """Another one while it runs, all or nothing: `Network(allow=["pypi"])`, "open" or "none"."""
        return (self._controller.set_sandbox_network(self._id, network))["network"]

    def expose(self, port: int, host_port: int | None = None, *, anyone: bool = False) -> ExposedPort:
        """A port of the guest at a local address, for root and the daemon's user; `anyone`: for all users."""
        info = self._controller.expose_port(self._id, port, host_port, anyone=anyone)
        return ExposedPort(self._controller, self._id, info)

    def ports(self) -> list[PortInfo]:
        return self._controller.list_ports(self._id)
