"""Accepting connections, in place of asyncio's server: that one does not count those that are still in their TLS
handshake, and where no file can be opened any more, it logs one traceback for each connection that waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Callable

from forkd.daemon.cap import ConnectionCap
from forkd.daemon.connection import Connection
from forkd.daemon.errors import RETRY_AFTER_S, error_body
from forkd.errors import NoCapacity

HANDSHAKE_S = 15.0
AT_ONCE = 64  # connections accepted before others get a turn
RETRY_S = 0.5  # after the kernel refused to open one

log = logging.getLogger("forkd.connections")


class Acceptor:
    """Of one listening socket, until it is closed."""

    def __init__(
        self,
        sock: socket.socket,
        make_connection: Callable[[], Connection],
        tls: ssl.SSLContext | None,
        cap: ConnectionCap,
    ) -> None:
        self._sock = sock
        self._make_connection = make_connection
        self._tls = tls
        self._cap = cap
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._start()

    def close(self) -> None:
        """No more are accepted. Those in a handshake are given up."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._sock)
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        if self._opening:
            await asyncio.wait(self._opening)

    def _start(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock, self._on_ready)

    def _on_ready(self) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("No connection can be accepted for %g s: %s", RETRY_S, error.strerror)
                self._loop.remove_reader(self._sock)
                self._retry = self._loop.call_later(RETRY_S, self._start)
                return
            accepted.setblocking(False)
            if self._cap.make_room():
                self._open(accepted)
            else:
                self._refuse(accepted)

    def _open(self, accepted: socket.socket) -> None:
        connection = self._make_connection()
        self._cap.enter(connection)
        task = self._loop.create_task(self._connect(connection, accepted))
        connection.opening = task
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

        def close_if_unopened(_: object) -> None:
            if not connection.opened:
                self._cap.leave(connection)
                accepted.close()

        task.add_done_callback(close_if_unopened)

    async def _connect(self, connection: Connection, accepted: socket.socket) -> None:
        deadline_s = None if self._tls is None else HANDSHAKE_S
        # A client that gives up, or does not speak TLS.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=deadline_s
            )

    def _refuse(self, accepted: socket.socket) -> None:
        log.warning("All %d connections are in use: a new one is refused", self._cap.most)
        with accepted, contextlib.suppress(OSError):
            if self._tls is None:
                accepted.send(render_refusal(self._cap.most))


def render_refusal(most: int) -> bytes:
    error = NoCapacity(
        f"All {most} connections of this listener are in use",
        hint="Close some, or raise max_connections in the daemon's settings",
    )
    body = json.dumps(error_body(error)).encode()
    head = (
        f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"retry-after: {RETRY_AFTER_S}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
