"""Around every request: its id, its line in the audit log, its metrics, and an answer in every case."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forkd.daemon import logs
from forkd.daemon.audit import AuditEntry
from forkd.daemon.call import Call, Daemon
from forkd.daemon.connection import LINK
from forkd.daemon.errors import CALL, ErrorResponse, Internal, Stopping
from forkd.errors import ForkdError

LINGER_S = 1.0  # for a client that is still sending to read its answer
CLIENT_GONE = 499  # in the audit log and the metrics: the client left before its answer
# Asked by monitors: they do not keep a daemon alive.
_PASSIVE = ("/healthz", "/readyz", "/metrics")
_LEGAL_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

log = logging.getLogger("forkd.requests")


class Envelope:
    def __init__(self, app: ASGIApp, daemon: Daemon) -> None:
        self._app = app
        self._daemon = daemon

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        begun = time.perf_counter()
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"))
        call = Call(self._daemon, scope[LINK], request_id, headers, scope["query_string"], receive)
        scope[CALL] = call
        logs.request_id.set(call.id)
        active = scope["path"] not in _PASSIVE
        if active:
            self._daemon.activity.begin()
        exchange = _Exchange(call, send)
        try:
            await self._answer(scope, exchange)
        finally:
            if active:
                self._daemon.activity.end()
            self._record(scope, call, exchange.status or CLIENT_GONE, time.perf_counter() - begun)

    async def _answer(self, scope: Scope, exchange: _Exchange) -> None:
        error: ForkdError
        try:
            await self._app(scope, exchange.receive, exchange.send)
            return
        except asyncio.CancelledError:
            error = Stopping()
        except Exception:
            log.exception("%s %s failed", scope["method"], ascii(scope["path"]))
            error = Internal()
        if exchange.status == 0:
            await ErrorResponse(error)(scope, exchange.receive, exchange.send)
        elif not exchange.complete:
            scope[LINK].abort()

    def _record(self, scope: Scope, call: Call, status: int, took_s: float) -> None:
        metrics = self._daemon.metrics
        metrics.requests.labels(scope["method"], call.route, status).inc()
        metrics.request_s.observe(took_s)
        if call.code is not None:
            metrics.errors.labels(call.code).inc()
        if self._daemon.audit is None:
            return
        agent = call.headers.get(b"user-agent")
        entry = AuditEntry(
            ts=logs.render_time(time.time()),
            request_id=call.id,
            peer=call.link.peer,
            token=call.token,
            method=scope["method"],
            path=scope["path"],
            status=status,
            latency_us=round(took_s * 1e6),
            sandboxes=[*([call.params["id"]] if "id" in call.params else ()), *call.sandboxes],
            ua=None if agent is None else agent.decode("latin-1"),
        )
        self._daemon.audit.write(entry, allowed=call.allowed)


class _Exchange:
    """How far the request was read and the answer sent."""

    def __init__(self, call: Call, send: Send) -> None:
        self.status = 0
        self.complete = False
        self._call = call
        self._receive, call.receive = call.receive, self.receive
        self._send = send
        self._unread = b"transfer-encoding" in call.headers or call.headers.get(b"content-length", b"0") != b"0"
        self._linger = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._unread = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers: list[tuple[bytes, bytes]] = [
                *message.get("headers", ()),
                (b"x-request-id", self._call.id.encode()),
            ]
            if self._unread:
                # The body will not be read: the connection cannot be used for another request.
                headers.append((b"connection", b"close"))
                self._linger = True
            self._call.link.hold(True)
            await self._send({**message, "headers": headers})
            return
        self._call.link.hold(False)
        last = not message.get("more_body", False)
        if last and self._linger:
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)
        self.complete = self.complete or last

    async def _drain(self) -> None:
        """A connection closed while the client still sends is reset, and the answer is lost."""
        self._call.link.discard = True
        try:
            async with asyncio.timeout(LINGER_S):
                while self._unread:
                    await self.receive()
        except TimeoutError:
            pass


def _request_id(given: bytes | None) -> str:
    if given is not None and _LEGAL_ID.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(8)
