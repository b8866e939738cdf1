"""Networks for the `fake` engine, whose guests are processes of this host: it keeps account and shuts nothing off."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from forkd.errors import NetworkFailed
from forkd.model.network import Network
from forkd.network.lease import Lease, Refused, Usage

CONNECT_S = 5.0


class FakeNetworks:
    def __init__(self, on_refused: Callable[[Refused], None]) -> None:
        self._on_refused = on_refused
        self.leased: dict[str, Network] = {}
        self.names: dict[str, tuple[str, ...]] = {}
        self.used: dict[str, Usage] = {}
        self.expected: list[tuple[Network, int]] = []
        self.errors: list[Exception] = []  # what the next calls raise, one each
        self.why: str | None = None
        self._numbers = 0

    @classmethod
    @asynccontextmanager
    async def opened(cls, directory: Path, on_refused: Callable[[Refused], None]) -> AsyncIterator[FakeNetworks]:
        yield cls(on_refused)

    def why_none(self) -> str | None:
        return self.why

    async def lease(self, name: str, network: Network, names: Sequence[str] = (), *, vnet_hdr: bool = False) -> Lease:
        self._fail()
        if name in self.leased:
            raise NetworkFailed(f"{name} has a network already")
        address = self._next_address()
        self.leased[name], self.names[name] = network, tuple(names)
        return Lease(name, os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), f"fake{self._numbers}", "/dev/null", address)

    async def change(self, name: str, network: Network, names: Sequence[str] = ()) -> None:
        self._fail()
        if name not in self.leased:
            raise NetworkFailed(f"{name} has no network")
        self.leased[name], self.names[name] = network, tuple(names)

    async def release(self, name: str) -> None:
        self.leased.pop(name, None)
        self.names.pop(name, None)

    async def adopt(self, name: str, tap: int, network: Network, names: Sequence[str] = ()) -> str:
        self._fail()
        os.fstat(tap)
        self.leased[name], self.names[name] = network, tuple(names)
        return self._next_address()

    def watch(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost

    def lose(self) -> None:
        """As when the hub dies."""
        self.leased.clear()
        self._on_lost()

    async def connect(self, name: str, port: int) -> socket.socket:
        self._fail()
        if name not in self.leased:
            raise NetworkFailed(f"{name} has no network")
        made = socket.socket()
        made.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
        except (OSError, TimeoutError) as error:
            made.close()
            raise NetworkFailed(f"Nothing answers at port {port} of {name}") from error
        return made

    async def usage(self, name: str) -> Usage:
        return self.used.get(name, Usage())

    def expect(self, network: Network, count: int) -> None:
        self.expected.append((network, count))

    def refuse(self, refused: Refused) -> None:
        self._on_refused(refused)

    def _next_address(self) -> str:
        self._numbers += 1
        return f"100.64.0.{self._numbers % 250 + 1}"

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
