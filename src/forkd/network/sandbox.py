"""A sandbox as the hub serves it: its slot, its names, its gate, and what it was refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from forkd.model.network import GUEST_ADDRESS, Network
from forkd.network import rules
from forkd.network.gate import Gate
from forkd.network.lease import Refused, Usage
from forkd.network.listener import Room
from forkd.network.named import NamedAddresses
from forkd.network.nameserver import NameServer
from forkd.network.refusals import Refusals, parse_packet
from forkd.network.resolver import Resolver
from forkd.network.slot import Slot, SlotMaker, read_counted

T = TypeVar("T")

CONNECT_DEADLINE_S = 5.0
_TELL_EVERY_S = 0.25
_CONNTRACK_COUNT = "/proc/sys/net/netfilter/nf_conntrack_count"


class Surroundings(Protocol):
    """What a sandbox needs of the hub."""

    maker: SlotMaker
    resolver: Resolver
    room: Room  # for connections to all gateways

    async def in_namespaces(self, work: Callable[[], T]) -> T:
        """In the thread that owns the namespaces."""

    def find_member(self, group: str | None, name: str) -> str | None: ...
    def is_ours(self, address: str) -> bool: ...
    def tell(self, refused: list[Refused]) -> None: ...


class Sandbox:
    def __init__(self, name: str, slot: Slot, hub: Surroundings) -> None:
        self.name, self.slot, self._hub = name, slot, hub
        self.named = NamedAddresses()
        # One at a time: what names stand for, and the rules that allow them.
        self.changing = asyncio.Lock()
        self._refusals = Refusals()
        self._tasks: set[asyncio.Future[None]] = set()
        self._names = NameServer(self, hub.resolver, slot.dns, slot.dns_tcp, hub.room, self._spawn)
        self._gate = Gate(self, slot.gate, hub.room, self._spawn)

    @property
    def network(self) -> Network:
        return self.slot.network

    def start(self) -> None:
        self._names.start()
        self._gate.start()
        asyncio.get_running_loop().add_reader(self.slot.log, self._logged)

    def stop(self) -> None:
        self._names.stop()
        self._gate.stop()
        asyncio.get_running_loop().remove_reader(self.slot.log)
        for task in self._tasks:
            task.cancel()
        self._hub.tell(self._refusals.take())

    def cut_gate(self) -> None:
        self._gate.cut()

    async def let_reach(self, plan: dict[rules.Named, int], *, new: bool) -> None:
        text = rules.render_new_named(plan) if new else rules.render_named(plan)
        await self._hub.in_namespaces(lambda: self._hub.maker.run(self.slot, text))

    async def open_socket(self) -> socket.socket:
        return await self._hub.in_namespaces(lambda: self._hub.maker.socket_inside(self.slot))

    async def connect(self, port: int) -> socket.socket:
        """To a port of the guest. Raises OSError."""
        sock = await self.open_socket()
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                await asyncio.get_running_loop().sock_connect(sock, (GUEST_ADDRESS, port))
        except BaseException:
            sock.close()
            raise
        return sock

    def read_usage(self) -> Usage:
        """In the thread that owns the namespaces."""
        with self._hub.maker.inside(self.slot):
            counted = read_counted()
            with open(_CONNTRACK_COUNT) as count:  # noqa: PTH123 - as the thread sees it, now
                connections = int(count.read())
        return Usage(counted.bytes_in, counted.bytes_out, connections, counted.refused)

    def refuse(
        self, reason: str, asked: str | None, protocol: str, address: str | None = None, port: int | None = None
    ) -> None:
        if self._refusals.add(Refused(self.name, reason, asked, address, port, protocol)):
            asyncio.get_running_loop().call_later(_TELL_EVERY_S, lambda: self._hub.tell(self._refusals.take()))

    def find_member(self, name: str) -> str | None:
        return self._hub.find_member(self.network.group, name)

    def is_ours(self, address: str) -> bool:
        return self._hub.is_ours(address)

    def _logged(self) -> None:
        for logged in self.slot.log.read():
            packet = parse_packet(logged.payload)
            if packet is not None and logged.prefix in rules.REASONS:
                asked = self.named.find_name(packet.address)
                self.refuse(logged.prefix, asked, packet.protocol, packet.address, packet.port)

    def _spawn(self, work: Awaitable[None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
