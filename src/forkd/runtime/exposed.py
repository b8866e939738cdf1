"""Ports of guests at a local address: each connection is passed on to the guest, byte by byte, while both sides live.

As with the agents' own ports every user of this host could connect, so that only root and the user of the daemon are
served unless anyone is to be. Nobody else gets as much as a byte.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from forkd.errors import Conflict, ForkdError, NotFound
from forkd.host.peer import find_peer_uid
from forkd.runtime.ports import HOST, FindUid, bind_port

# Of one port; the rest waits in the kernel.
MAX_CONNECTIONS = 256
MAX_PORTS = 64  # of one sandbox
CONNECT_S = 15.0
# A side that takes nothing for so long, or goes on for so long after the other has ended, is given up.
STALLED_S = 300.0
_BACKLOG = 128
_RETRY_S = 0.5
_PIECE_BYTES = 64 * 1024

_log = logging.getLogger(__name__)

Connect = Callable[[str, int], Awaitable[socket.socket]]


@dataclass(frozen=True)
class Exposed:
    port: int  # in the guest
    host_port: int
    anyone: bool = False  # every user of this host may connect

    @property
    def address(self) -> str:
        return HOST


class ExposedPorts:
    """`connect` makes a connection to a port of the guest that a sandbox has at that moment."""

    def __init__(self, connect: Connect, find_uid: FindUid = find_peer_uid) -> None:
        self._connect = connect
        self._find_uid = find_uid
        self._forwards: dict[str, dict[int, _Forward]] = {}

    def list(self, sandbox_id: str) -> list[Exposed]:
        return [each.exposed for _, each in sorted(self._forwards.get(sandbox_id, {}).items())]

    def open(self, sandbox_id: str, port: int, host_port: int | None = None, *, anyone: bool = False) -> Exposed:
        """Bound, and not served yet."""
        forwards = self._forwards.setdefault(sandbox_id, {})
        if port in forwards:
            raise Conflict(f"Port {port} of {sandbox_id} is exposed already", hint="Close it first, to change it")
        if len(forwards) >= MAX_PORTS:
            raise Conflict(f"Sandbox {sandbox_id} has {MAX_PORTS} exposed ports already", hint="Close one of them")
        listener = bind_port(host_port or 0)
        exposed = Exposed(port, listener.getsockname()[1], anyone)
        forwards[port] = _Forward(sandbox_id, exposed, listener, self._connect, self._find_uid)
        return exposed

    def serve(self, sandbox_id: str, port: int) -> None:
        self._forwards[sandbox_id][port].serve()

    def close(self, sandbox_id: str, port: int) -> None:
        forward = self._forwards.get(sandbox_id, {}).pop(port, None)
        if forward is None:
            raise NotFound(
                f"Port {port} of {sandbox_id} is not exposed", hint=f"List them with: forkd port {sandbox_id}"
            )
        forward.close()

    def close_of(self, sandbox_id: str) -> None:
        """All of a sandbox; safe to repeat."""
        for forward in self._forwards.pop(sandbox_id, {}).values():
            forward.close()

    def close_all(self) -> None:
        for sandbox_id in list(self._forwards):
            self.close_of(sandbox_id)


class _Forward:
    def __init__(
        self, sandbox_id: str, exposed: Exposed, listener: socket.socket, connect: Connect, find_uid: FindUid
    ) -> None:
        self.exposed = exposed
        self._id = sandbox_id
        self._listener = listener
        self._connect = connect
        self._find_uid = find_uid
        self._accepting: asyncio.Task[None] | None = None
        self._refused = False
        self._served: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_CONNECTIONS)

    def serve(self) -> None:
        self._listener.listen(_BACKLOG)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(), name=f"port of {self._id}")

    def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        for task in self._served:
            task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                self._room.release()
                _log.warning("Cannot accept a connection to sandbox %s: %s", self._id, error)
                await asyncio.sleep(_RETRY_S)
                continue
            except BaseException:
                self._room.release()
                raise
            self._take(client)

    def _take(self, client: socket.socket) -> None:
        client.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._serve(client))
        self._served.add(task)
        task.add_done_callback(lambda _: self._on_done(task, client))

    def _on_done(self, task: asyncio.Task[None], client: socket.socket) -> None:
        self._served.discard(task)
        self._room.release()
        # A task that is cancelled before it has run would close nothing.
        client.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("A connection to sandbox %s failed", self._id, exc_info=error)

    async def _serve(self, client: socket.socket) -> None:
        if not self.exposed.anyone and self._find_uid(client) not in (0, os.geteuid()):
            if not self._refused:
                _log.warning("Port %d of sandbox %s is not for a user who asks", self.exposed.port, self._id)
            self._refused = True  # told once: anybody can ask often
            return
        try:
            async with asyncio.timeout(CONNECT_S):
                guest = await self._connect(self._id, self.exposed.port)
        except (ForkdError, OSError, TimeoutError) as error:
            _log.info("Port %d of sandbox %s does not answer: %s", self.exposed.port, self._id, error)
            return
        with guest:
            guest.setblocking(False)
            await join(client, guest)


async def join(one: socket.socket, other: socket.socket) -> None:
    """Pass bytes both ways until both have ended, one is lost, or one stalls."""
    ways = {asyncio.ensure_future(_pass_on(one, other)), asyncio.ensure_future(_pass_on(other, one))}
    try:
        done, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if left and all(task.result() for task in done):
            await asyncio.wait(left, timeout=STALLED_S)
    finally:
        for task in ways:
            task.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _pass_on(source: socket.socket, sink: socket.socket) -> bool:
    """One piece at a time: who reads slowly slows the writer. True: it came to its end."""
    loop = asyncio.get_running_loop()
    try:
        while piece := await loop.sock_recv(source, _PIECE_BYTES):
            async with asyncio.timeout(STALLED_S):
                await loop.sock_sendall(sink, piece)
        sink.shutdown(socket.SHUT_WR)
    except (OSError, TimeoutError):
        return False
    return True
