"""The gate for TLS: a connection to an address that a name stands for passes when it names that name.

It reads the client's first message, and carries both directions on without decrypting anything.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from typing import Protocol

from forkd.model.network import Network
from forkd.network import hello
from forkd.network.listener import Listener, Room, Spawn, reset
from forkd.network.named import NamedAddresses
from forkd.network.rules import TLS_PORT, ports_of

# Of one sandbox at one time.
MAX_CONNECTIONS = 1024
_HELLO_DEADLINE_S = 10.0
_CONNECT_DEADLINE_S = 15.0
_PIECE_BYTES = 1 << 17
_SO_ORIGINAL_DST = 80


class Passenger(Protocol):
    """What the gate needs of a sandbox."""

    named: NamedAddresses

    @property
    def network(self) -> Network: ...

    async def open_socket(self) -> socket.socket:
        """In its namespace. Raises OSError."""

    def refuse(self, reason: str, asked: str | None, protocol: str, address: str | None = None) -> None: ...


@dataclass(eq=False)
class _Passing:
    name: str
    inner: socket.socket
    outer: socket.socket
    task: asyncio.Task[None] | None


class Gate:
    """Of one sandbox. `spawn` runs work that ends with the sandbox."""

    def __init__(self, passenger: Passenger, sock: socket.socket, room: Room, spawn: Spawn) -> None:
        self.passenger = passenger
        self._listener = Listener(sock, MAX_CONNECTIONS, room, self._serve, spawn)
        self._passing: set[_Passing] = set()

    def start(self) -> None:
        self._listener.start()

    def stop(self) -> None:
        self._listener.stop()

    def cut(self) -> None:
        """End connections that the rules no longer allow."""
        for each in list(self._passing):
            allowed = may_pass(self.passenger.network, self.passenger.named, each.name, _destination(each.inner))
            if not allowed and each.task is not None:
                each.task.cancel()

    async def _serve(self, inner: socket.socket) -> None:
        try:
            address = _destination(inner)
            begun = await self._let_in(inner, address)
            if begun is not None and await self._pass(inner, address, *begun):
                inner.close()
        finally:
            reset(inner)

    async def _let_in(self, inner: socket.socket, address: str) -> tuple[str, bytes] | None:
        """The name and the bytes read with it; None: it was refused."""
        name: str | None = None
        said = hello.Hello()
        try:
            async with asyncio.timeout(_HELLO_DEADLINE_S):
                while name is None:
                    piece = await asyncio.get_running_loop().sock_recv(inner, hello.MAX_BYTES - len(said.data))
                    if not piece:
                        raise hello.NotTls
                    name = said.feed(piece)
        except (OSError, hello.NotTls):  # TimeoutError is an OSError
            self.passenger.refuse("sni", self.passenger.named.find_name(address), "tls", address)
            return None
        if not may_pass(self.passenger.network, self.passenger.named, name, address):
            self.passenger.refuse("sni", name, "tls", address)
            return None
        return name, bytes(said.data)

    async def _pass(self, inner: socket.socket, address: str, name: str, data: bytes) -> bool:
        """True: both sides have ended it."""
        loop = asyncio.get_running_loop()
        try:
            outer = await self.passenger.open_socket()
        except OSError:
            return False
        passing = _Passing(name, inner, outer, asyncio.current_task())
        self._passing.add(passing)
        try:
            async with asyncio.timeout(_CONNECT_DEADLINE_S):
                await loop.sock_connect(outer, (address, TLS_PORT))
                await loop.sock_sendall(outer, data)
            async with asyncio.TaskGroup() as both:
                both.create_task(_carry(inner, outer))
                both.create_task(_carry(outer, inner))
            outer.close()
        except (OSError, ExceptionGroup):
            return False  # one side broke: so does the other
        else:
            return True
        finally:
            self._passing.discard(passing)
            reset(outer)


def may_pass(network: Network, named: NamedAddresses, name: str, address: str) -> bool:
    """The name is allowed, and it is one that stood for that address here."""
    ports = ports_of(network, name) if not network.off else ()
    return any(low <= TLS_PORT <= high for low, high in ports) and named.stands_for(name, address)


async def _carry(source: socket.socket, target: socket.socket) -> None:
    loop, buffer = asyncio.get_running_loop(), bytearray(_PIECE_BYTES)
    view = memoryview(buffer)
    while size := await loop.sock_recv_into(source, view):
        await loop.sock_sendall(target, view[:size])
    target.shutdown(socket.SHUT_WR)


def _destination(connection: socket.socket) -> str:
    """Where the guest wanted to go; nowhere, when it came to the gate itself."""
    try:
        raw = connection.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    except OSError:
        return "0.0.0.0"
    return str(ipaddress.IPv4Address(raw[4:8]))
