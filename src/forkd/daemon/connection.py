"""One HTTP connection: uvicorn's, with bounds on what a slow, silent or broken client may hold."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any, NoReturn, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forkd.daemon.cap import ConnectionCap
from forkd.daemon.errors import error_body
from forkd.errors import InvalidInput

HEAD_S = 30.0  # for a request's line and headers to arrive
# Of a request's line, headers and trailers. All of it is held before anyone knows whose request it is.
HEAD_BYTES = 32 * 1024
MAX_HEADERS = 100
MAX_PIPELINED = 16  # requests that wait for the answer to the one before them
WRITE_STALL_S = 60.0  # for a client to read at least a part of its answer
KEEP_ALIVE_S = 75
_HEAD_TOO_LARGE = "The head of the request is too large"
LINK = "forkd.link"  # the key in the ASGI scope


class Joining:
    """A transport that can hold writes back, to join the head of an answer with its body.

    A write by itself is a packet by itself, which wakes the client once more than needed.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] = []
        self.holding = False

    def write(self, data: bytes) -> None:
        if self.holding:
            self._held.append(data)
            return
        if self._held:
            data = b"".join([*self._held, data])
            self._held.clear()
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Link:
    """The connection of a request, as far as the application may know and change it."""

    def __init__(self, transport: asyncio.Transport, joining: Joining, on_let_in: Callable[[], None]) -> None:
        self._transport = transport
        self._joining = joining
        self.let_in = on_let_in  # to be called when a request may be answered
        self.discard = False  # what still arrives of the body is of no use
        self.eof = False  # the client has closed its side; it may still read
        self.cut = False  # and did so within a body
        sock = transport.get_extra_info("socket")
        self.local = sock is not None and sock.family == socket.AF_UNIX
        self.peer = _unix_peer(sock) if self.local else _tcp_peer(transport)

    def hold(self, on: bool) -> None:
        """While on, nothing is sent; then all of it together with what is written next."""
        self._joining.holding = on

    def abort(self) -> None:
        """Break it off: the client must not take what was sent for the whole."""
        self._transport.abort()


class TooLarge(Exception):
    """What a client sent goes beyond a bound. The parser stops at an exception of a callback."""


class Connection(HttpToolsProtocol):
    link: Link
    cap: ConnectionCap | None = None
    opening: asyncio.Task[None] | None = None  # until it is opened
    opened = False
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0
    _unseen_bytes = 0  # received since the parser last had something to report
    _moved = False
    _refusal: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.opened = True
        joining = Joining(transport)
        self.transport = cast(asyncio.Transport, joining)
        self.link = Link(transport, joining, self._on_let_in)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        _cancel(self._write_timer)
        if self.cap is not None:
            self.cap.leave(self)
        super().connection_lost(exc)

    def evict(self) -> None:
        """Another one needs the room."""
        if self.opened:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def data_received(self, data: bytes) -> None:
        self._moved = False
        super().data_received(data)
        self._unseen_bytes = 0 if self._moved else self._unseen_bytes + len(data)
        if self._unseen_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(_HEAD_TOO_LARGE)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client has closed its writing side. A request under way still gets its answer, or an error."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.scheme == "https":
            return None
        self.link.eof = True
        self.link.cut = cycle.more_body
        cycle.keep_alive = False
        cycle.more_body = False
        cycle.message_event.set()
        return True

    def _on_let_in(self) -> None:
        if self.cap is not None:
            self.cap.let_in(self)

    # Parser callbacks

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._moved = True
        self._count_head(len(name) + len(value))
        if not self._in_head:
            return  # a trailer: nothing here reads one
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(f"The request has more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._moved = True
        if not self.link.discard:
            super().on_body(body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[LINK] = self.link  # type: ignore[literal-required]
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        _cancel(self._head_timer)
        self._head_timer = None
        self._in_head = False
        self._moved = True
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse("Too many requests were sent before their answers were read")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0
        self._moved = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cap is not None and not self.pipeline:
            self.cap.rest(self)
        if self.transport.get_write_buffer_size():
            self._watch_writes()

    # Bounds

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_writes()

    def _count_head(self, more_bytes: int) -> None:
        self._head_bytes += more_bytes
        if self._head_bytes > HEAD_BYTES:
            self._refuse(_HEAD_TOO_LARGE)

    def _refuse(self, why: str) -> NoReturn:
        self._refusal = why
        raise TooLarge(why)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # within another answer it could not be told from that
            return
        msg = self._refusal or msg
        error = InvalidInput(msg.rstrip("."), hint="This port speaks HTTP/1.1; see docs/reference/rest.md")
        body = json.dumps(error_body(error)).encode()
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {secrets.token_hex(8)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._watch_writes()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._on_head_overdue)

    def _on_head_overdue(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # the next request is late, and the answer to this one is under way
        elif self._head_bytes or self._unseen_bytes:
            self.send_400_response(f"The head of the request did not arrive within {HEAD_S:g} s")
        else:
            self.transport.close()

    def _watch_writes(self) -> None:
        _cancel(self._write_timer)
        waiting = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(WRITE_STALL_S, self._on_write_overdue, waiting)

    def _on_write_overdue(self, before: int) -> None:
        self._write_timer = None
        waiting = self.transport.get_write_buffer_size()
        if waiting and waiting >= before:
            self.transport.abort()
        elif waiting:
            self._watch_writes()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _unix_peer(sock: Any) -> str:
    try:
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:
        return "unix"
    return f"unix uid={uid} pid={pid}"


def _tcp_peer(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return "unknown"
    return f"[{name[0]}]:{name[1]}" if ":" in str(name[0]) else f"{name[0]}:{name[1]}"
