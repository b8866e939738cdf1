"""The seam between the runtime and networks: what a VM is given, what is refused, what was used."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from forkd.errors import HostLacks
from forkd.model.network import Network

DEFAULT_POOL = 16
# The hub's user outside of its own namespace, when the daemon is root: no account has it.
HUB_UID = 0x3FFF0000


@dataclass(frozen=True)
class NetworkOptions:
    uplink: Literal["auto", "veth", "pasta"] = "auto"
    pool: int = DEFAULT_POOL
    resolvers: tuple[str, ...] | None = None  # None: those of /etc/resolv.conf
    hub_uid: int = HUB_UID


@dataclass(frozen=True)
class Lease:
    """What a VM is given."""

    name: str  # of the VM's directory, unique in this home
    tap: int  # a descriptor of the tap, -1 when it is opened by name; the caller closes it once the VMM has its own
    tap_name: str
    namespace: str  # a path by which another process of ours can enter it
    address: str  # its address among the sandboxes, for groups


@dataclass(frozen=True)
class Refused:
    """A refused connection or name, `count` times."""

    name: str  # of the VM's directory
    reason: str  # name, address, private, denied, sni, connections, quota
    asked: str | None  # the name that was asked for, or that stood for the address
    address: str | None
    port: int | None
    protocol: str
    count: int = 1


@dataclass(frozen=True)
class Usage:
    """`connections`: those that the namespace knows now; `refused`: packets, not told one by one."""

    bytes_in: int = 0  # to the guest
    bytes_out: int = 0
    connections: int = 0
    refused: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
            self.connections + other.connections,
            self.refused + other.refused,
        )


class Networks(Protocol):
    def why_none(self) -> str | None:
        """Why this host can give no network; cheap, asked often."""

    async def lease(self, name: str, network: Network, names: Sequence[str] = (), *, vnet_hdr: bool = False) -> Lease:
        """Its rules are in force when it returns. `names`: by which its group finds it.

        With `vnet_hdr` the tap is for the VMM to open by its name, once.
        """

    async def change(self, name: str, network: Network, names: Sequence[str] = ()) -> None:
        """All or nothing."""

    async def release(self, name: str) -> None:
        """Safe to repeat."""

    async def adopt(self, name: str, tap: int, network: Network, names: Sequence[str] = ()) -> str:
        """That of a VM which an earlier daemon, or hub, left. Its address among the sandboxes."""

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Have it called whenever all networks are lost at once. They are closed until they are adopted."""

    async def connect(self, name: str, port: int) -> socket.socket:
        """A TCP connection to a port of the guest, made inside its namespace."""

    async def usage(self, name: str) -> Usage: ...

    def expect(self, network: Network, count: int) -> None:
        """Keep so many ready with these rules, if that is possible."""


OpenNetworks = Callable[[Path, Callable[[Refused], None]], AbstractAsyncContextManager[Networks]]


class NoNetworks:
    """Of a daemon that gives none, and says why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def why_none(self) -> str | None:
        return self._why

    async def lease(self, name: str, network: Network, names: Sequence[str] = (), *, vnet_hdr: bool = False) -> Lease:
        raise self._refusal()

    async def change(self, name: str, network: Network, names: Sequence[str] = ()) -> None:
        raise self._refusal()

    async def release(self, name: str) -> None:
        pass

    async def adopt(self, name: str, tap: int, network: Network, names: Sequence[str] = ()) -> str:
        raise self._refusal()

    def watch(self, on_lost: Callable[[], None]) -> None:
        pass

    async def connect(self, name: str, port: int) -> socket.socket:
        raise self._refusal()

    async def usage(self, name: str) -> Usage:
        return Usage()

    def expect(self, network: Network, count: int) -> None:
        pass

    def _refusal(self) -> HostLacks:
        return no_network(self._why)


def no_network(why: str) -> HostLacks:
    return HostLacks(
        f"Sandboxes cannot have a network here: {why}", hint="Without a network they work; see: forkd doctor"
    )
