"""Connections that guests make to their gateways, within bounds: each has its own, and all have one together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Awaitable, Callable

from forkd.network.slot import moved

_PER_WAKE = 16
# The hub has no descriptors or memory left: until it may have some again.
_REST_S = 0.5
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Spawn = Callable[[Awaitable[None]], "asyncio.Future[None]"]


class Room:
    """Places that all share. Each may take as many as are left then, so that a newcomer always finds some."""

    def __init__(self, places: int) -> None:
        self._left = places

    def enter(self, taken: int) -> bool:
        """Who has taken so many wants another."""
        if taken >= self._left:
            return False
        self._left -= 1
        return True

    def leave(self) -> None:
        self._left += 1


class Listener:
    """`spawn` runs `serve`, which closes its connection, and ends it with the sandbox. What is too much is reset."""

    def __init__(
        self,
        sock: socket.socket,
        most: int,
        room: Room,
        serve: Callable[[socket.socket], Awaitable[None]],
        spawn: Spawn,
    ) -> None:
        self._socket, self._most, self._room, self._serve, self._spawn = sock, most, room, serve, spawn
        self._open = 0
        self._resting: asyncio.TimerHandle | None = None

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        if self._resting is not None:
            self._resting.cancel()

    def _accept(self) -> None:
        for _ in range(_PER_WAKE):
            try:
                connection = moved(self._socket.accept()[0])
            except OSError as error:
                if error.errno in _SHORTAGES:
                    # It stays readable: we would be woken again at once, and for ever.
                    self.stop()
                    self._resting = asyncio.get_running_loop().call_later(_REST_S, self.start)
                return
            if self._open >= self._most or not self._room.enter(self._open):
                reset(connection)
                continue
            self._open += 1
            # Not in `serve`: what is cancelled before it began never comes to its end.
            self._spawn(self._serve(connection)).add_done_callback(self._left)

    def _left(self, _done: asyncio.Future[None]) -> None:
        self._open -= 1
        self._room.leave()


def reset(connection: socket.socket) -> None:
    """Unless it is closed."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    connection.close()
