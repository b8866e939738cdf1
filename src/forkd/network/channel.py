"""Messages between the daemon and the hub: JSON with descriptors, one a packet, bounded, on a pair of sockets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from forkd.errors import NetworkFailed

# More than two lists of 256 rules with 300 characters need.
MAX_BYTES = 300_000
MAX_DESCRIPTORS = 4
_SEND_DEADLINE_S = 10.0

OnMessage = Callable[[dict[str, Any], list[int]], None]


def make_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in pair:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
    return pair


class Channel:
    """One end, in a running event loop. Takes the socket over. What is not a message ends it."""

    def __init__(self, sock: socket.socket, on_message: OnMessage, on_end: Callable[[], None]) -> None:
        self._socket: socket.socket | None = sock
        self._turn = asyncio.Lock()  # one sends at a time, in the order of the calls
        self._room = asyncio.Event()
        self._on_message, self._on_end = on_message, on_end
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)

    def close(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
            self._room.set()  # who waits for it hears at once

    async def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Raises NetworkFailed when the other side is gone, or does not read."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_BYTES:
            raise NetworkFailed(f"A message of {len(data)} bytes about a network is too long")
        try:
            async with asyncio.timeout(_SEND_DEADLINE_S), self._turn:
                while not self._sent(data, descriptors):
                    await self._writable()
        except OSError as error:  # TimeoutError is one
            raise NetworkFailed("The process that serves networks does not answer", hint="Try again") from error

    def _sent(self, data: bytes, descriptors: Sequence[int]) -> bool:
        if self._socket is None:
            raise BrokenPipeError
        try:
            socket.send_fds(self._socket, [data], list(descriptors))
        except BlockingIOError:
            return False
        return True

    async def _writable(self) -> None:
        if (sock := self._socket) is None:
            return
        self._room.clear()
        self._loop.add_writer(sock, self._room.set)
        try:
            await self._room.wait()
        finally:
            if self._socket is not None:  # else it was closed meanwhile, and its number may be another's
                self._loop.remove_writer(sock)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._socket, MAX_BYTES, MAX_DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors, flags = b"", [], 0
        message = _parse(data) if data and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) else None
        if message is None:
            for descriptor in descriptors:
                os.close(descriptor)
            self.close()
            self._on_end()
            return
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._on_message(message, descriptors)


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
