"""What all requests share, and one request: what it carries, its body, and whether its client is still there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self

from starlette.types import Message, Receive

from forkd.daemon.access import TcpAccess
from forkd.daemon.audit import AuditLog
from forkd.daemon.connection import Link
from forkd.daemon.errors import ClientGone, with_status
from forkd.daemon.metrics import Metrics
from forkd.errors import ForkdError, InvalidInput
from forkd.image import ImageStore
from forkd.runtime.runtime import Runtime

MAX_JSON_BYTES = 2 * 1024 * 1024
GAP_S = 30.0  # between two pieces of a body
JSON_S = 120.0  # for the whole of a body that is read before anything is done
# Most calls are over by then, and need no task that watches the connection.
PATIENCE_S = 0.02
# A client that only closed its writing side looks like one that is gone. Short work is finished for both.
EOF_GRACE_S = 1.0


class Activity:
    """Whether anybody uses this daemon."""

    def __init__(self, idle_exit_s: float = 0.0) -> None:
        self.idle_exit_s = idle_exit_s  # 0: nobody using it is no reason to end
        self.in_flight = 0
        self.draining = False
        self._last = time.monotonic()
        self._endless: set[asyncio.Task[Any]] = set()

    def begin(self) -> None:
        self.in_flight += 1

    def end(self) -> None:
        self.in_flight -= 1
        self._last = time.monotonic()

    def touch(self) -> None:
        """Something here is in use, though no request is under way."""
        self._last = time.monotonic()

    def idle_s(self) -> float:
        return 0.0 if self.in_flight else time.monotonic() - self._last

    def add_endless(self, task: asyncio.Task[Any]) -> None:
        """A request that ends only when it is told to."""
        self._endless.add(task)
        task.add_done_callback(self._endless.discard)

    def drain(self) -> None:
        self.draining = True
        for task in list(self._endless):
            task.cancel()


@dataclass(frozen=True)
class Daemon:
    runtime: Runtime
    images: ImageStore
    metrics: Metrics
    audit: AuditLog | None
    tcp: TcpAccess
    listeners: list[str] = field(default_factory=list)  # URLs, once there are any
    activity: Activity = field(default_factory=Activity)


@dataclass
class Call:
    """One request. `token` to `code` are filled in on the way, for handlers, the audit log and the metrics."""

    daemon: Daemon
    link: Link
    id: str
    headers: Mapping[bytes, bytes]
    query: bytes
    receive: Receive
    token: str | None = None
    allowed: bool = False  # its client may use this daemon; else it is an outsider's, even if it was answered
    route: str = "unmatched"
    params: dict[str, str] = field(default_factory=dict)  # of the path
    json: Any = None  # the body as it came, before its model
    sandboxes: list[str] = field(default_factory=list)
    code: str | None = None

    @property
    def runtime(self) -> Runtime:
        return self.daemon.runtime

    def while_connected(self, *, watching: bool = True) -> while_connected:
        return while_connected(self.link, self.receive, watching=watching)

    async def read_json(self) -> Any:
        self._check_json_type()
        self.json = parse_json(await self.read_body(MAX_JSON_BYTES))
        return self.json

    async def read_body(self, limit_bytes: int) -> bytes:
        """All of it; 413 as soon as it is known to be too large."""
        declared = self.headers.get(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
            raise _too_large(limit_bytes)
        message = await self._receive_body()
        body = bytearray(message.get("body", b""))
        latest = asyncio.get_running_loop().time() + JSON_S
        while len(body) <= limit_bytes:
            if not message.get("more_body", False):
                return bytes(body)
            if asyncio.get_running_loop().time() > latest:
                raise InvalidInput(f"The body did not arrive within {JSON_S:g} s")
            message = await self._receive_body()
            body += message.get("body", b"")
        raise _too_large(limit_bytes)

    async def iterate_body(self) -> AsyncGenerator[bytes, None]:
        """The body, as it arrives."""
        more = True
        while more:
            message = await self._receive_body()
            more = message.get("more_body", False)
            if data := message.get("body", b""):
                yield data

    async def _receive_body(self) -> Message:
        """The next piece. Raises when none arrives for too long, and when the client has broken off."""
        try:
            async with asyncio.timeout(GAP_S):
                message = await self.receive()
        except TimeoutError:
            raise InvalidInput(f"No more of the body arrived within {GAP_S:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        if self.link.cut:
            raise InvalidInput("The body is shorter than announced", hint="Send as much as Content-Length says")
        return message

    def _check_json_type(self) -> None:
        given = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if given != b"application/json" and not (given.startswith(b"application/") and given.endswith(b"+json")):
            error = InvalidInput("The body is not declared as JSON", hint="Send Content-Type: application/json")
            raise with_status(error, 415)


class while_connected:
    """Cancels the block when the client closes its side; it then raises ClientGone."""

    def __init__(self, link: Link, receive: Receive, *, watching: bool = True) -> None:
        """Without `watching` the connection is left alone until `watch()`: the block reads a body from it."""
        self._link = link
        self._receive = receive
        self._watching = watching
        self._timer: asyncio.TimerHandle | None = None
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._watching:
            self.watch()
        return self

    def watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone:
            self._task.uncancel()
            if kind is asyncio.CancelledError:
                raise ClientGone from None

    def _start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while not self._link.eof:
            if (await self._receive())["type"] == "http.disconnect":
                break
        else:
            await asyncio.sleep(EOF_GRACE_S)
        self._gone = True
        self._task.cancel()


def parse_json(body: bytes) -> Any:
    """JSON and nothing else: no NaN, no other encoding, no nesting without end."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in body:
            # Bytes of a file name come as lone surrogates (U+DC80 to U+DCFF); no other lone surrogate means anything.
            json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")
        return value
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(f"The body is not JSON: {ascii(why)[1:-1][:200]}") from None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _too_large(limit_bytes: int) -> ForkdError:
    hint = "Write large content to a file of the guest"
    return with_status(InvalidInput(f"The body has more than {limit_bytes} bytes", hint=hint), 413)
