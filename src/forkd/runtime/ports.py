"""Each sandbox's own `host:port`, where its agent speaks forkd's guest protocol.

The protocol has no secrets, and every user of this host can connect: only root and the user of the daemon are
served. A connection is one line and one answer; it is never closed without an answer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from forkd.errors import Conflict, ForkdError, HostLacks, InvalidInput, NoCapacity, Unauthorized
from forkd.guest.agent import Agent
from forkd.guest.results import CommandResult, EvalResult
from forkd.host.peer import find_peer_uid
from forkd.wire.forkd_agent import (
    MAX_LINE_BYTES,
    Eval,
    Exec,
    Ping,
    parse_request,
    render_eval,
    render_exec,
    render_failure,
    render_pong,
)

HOST = "127.0.0.1"
MAX_SERVED = 32  # connections of one sandbox; more get an error
REQUEST_S = 10.0  # to send the request
EVAL_S = 30.0  # the SDK waits 35 s for an answer
_REPLY_S = 30.0  # to take the answer
_LINGER_S = 1.0  # for what the client still sends, as closing on it could destroy the answer
_MAX_CONNECTIONS = 4 * MAX_SERVED  # served and being refused; the rest waits in the kernel
_BACKLOG = 512  # an overflow resets connections that have asked already
_ACCEPT_AT_ONCE = 16
_ACCEPT_RETRY_S = 0.5  # when this process is out of descriptors
_READ_BYTES = 64 * 1024

_log = logging.getLogger(__name__)


class Live(Protocol):
    @property
    def agent(self) -> Agent: ...


Use = Callable[[str], AbstractAsyncContextManager[Live]]
FindUid = Callable[[socket.socket], int | None]


class AgentPorts:
    """`use` gives a sandbox's agent for the length of a block, or says why not."""

    def __init__(self, use: Use, find_uid: FindUid = find_peer_uid) -> None:
        self._use = use
        self._find_uid = find_uid
        self._ports: dict[str, _Port] = {}

    def open(self, sandbox_id: str, port: int | None = None, *, serve: bool = True) -> int:
        """Its port: the one asked for, or any. Without `serve` it is only taken, and connections are refused."""
        if sandbox_id in self._ports:
            raise Conflict(f"Sandbox {sandbox_id} has a port already")
        if port is not None and any(other.number == port for other in self._ports.values()):
            raise _taken(port)
        opened = self._ports[sandbox_id] = _Port(sandbox_id, bind_port(port or 0), self._use, self._find_uid)
        if serve:
            opened.serve()
        return opened.number

    def serve(self, sandbox_id: str) -> None:
        """From here on connections are answered. forkd's SDK takes any answer for a sign that the sandbox is up."""
        self._ports[sandbox_id].serve()

    def close(self, sandbox_id: str) -> None:
        """No more connections; those there are get an answer. Safe to repeat."""
        port = self._ports.pop(sandbox_id, None)
        if port is not None:
            port.close()

    def close_all(self) -> None:
        for sandbox_id in list(self._ports):
            self.close(sandbox_id)


class _Port:
    def __init__(self, sandbox_id: str, listener: socket.socket, use: Use, find_uid: FindUid) -> None:
        self.number: int = listener.getsockname()[1]
        self._id = sandbox_id
        self._listener = listener
        self._use = use
        self._find_uid = find_uid
        self._loop = asyncio.get_running_loop()
        self._conversations: set[asyncio.Task[None]] = set()
        self._served = 0
        self._retry: asyncio.TimerHandle | None = None
        self._listening = False

    def serve(self) -> None:
        try:
            self._listener.listen(_BACKLOG)
            # Now, as no other socket can share it: after a restart it is ours again in spite of old connections.
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError as error:
            # Only where others may share an address that is forgotten slowly; the sandbox is there all the same.
            _log.error("Sandbox %s cannot be reached at its port: %s", self._id, error)
            return
        self._listen()

    def close(self) -> None:
        self._pause()
        if self._retry is not None:
            self._retry.cancel()
        self._listener.close()
        for conversation in self._conversations:
            conversation.cancel()

    def _listen(self) -> None:
        if not self._listening and self._listener.fileno() >= 0:
            self._listening = True
            self._loop.add_reader(self._listener.fileno(), self._on_connections)

    def _pause(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._listener.fileno())

    def _on_connections(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            if len(self._conversations) >= _MAX_CONNECTIONS:
                self._pause()
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("Cannot accept a connection to sandbox %s: %s", self._id, error)
                self._pause()
                self._retry = self._loop.call_later(_ACCEPT_RETRY_S, self._listen)
                return
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # At once: a client that is gone again has no owner any more.
        uid = self._find_uid(connection)
        conversation = self._loop.create_task(self._converse(connection, uid))
        self._conversations.add(conversation)
        conversation.add_done_callback(self._on_done)
        # A task that is cancelled before it has run would close nothing.
        conversation.add_done_callback(lambda _: connection.close())

    def _on_done(self, conversation: asyncio.Task[None]) -> None:
        self._conversations.discard(conversation)
        self._listen()

    async def _converse(self, connection: socket.socket, uid: int | None) -> None:
        incoming = _Incoming(self._loop, connection)
        try:
            reply = await self._answer(incoming, uid)
        except asyncio.CancelledError:
            _send_now(connection, render_failure("NotRunning", f"Sandbox {self._id} is gone"))
            raise
        try:
            async with asyncio.timeout(_REPLY_S):
                for piece in reply:
                    await self._loop.sock_sendall(connection, piece)
                    await asyncio.sleep(0)  # a socket that takes all at once would keep the others waiting
            connection.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_LINGER_S):
                await incoming.drain()
        except (OSError, TimeoutError) as error:
            _log.debug("A client of sandbox %s did not take its answer to the end: %s", self._id, error)

    async def _answer(self, incoming: _Incoming, uid: int | None) -> Iterable[bytes]:
        """Every outcome becomes an answer, in pieces."""
        try:
            self._check_peer(uid)
            if self._served >= MAX_SERVED:
                raise NoCapacity(f"Sandbox {self._id} serves {MAX_SERVED} connections already")
            self._served += 1
            try:
                request = parse_request(await incoming.read_line())
                async with self._use(self._id) as live:
                    return await self._do(live.agent, request)
            finally:
                self._served -= 1
        except ForkdError as error:
            return [render_failure(type(error).__name__, error.message, error.hint or "")]
        except OSError as error:
            return [render_failure(type(error).__name__, str(error))]
        except Exception:
            _log.exception("A request to sandbox %s failed", self._id)
            return [render_failure("InternalError", "The daemon failed; its log says why")]

    def _check_peer(self, uid: int | None) -> None:
        if uid is None or uid not in (0, os.geteuid()):
            raise Unauthorized(
                "This port serves root and the user of the daemon",
                hint="Others use the REST API, with a token",
            )

    async def _do(self, agent: Agent, request: Ping | Exec | Eval) -> Iterable[bytes]:
        if isinstance(request, Ping):
            info = await agent.ping()
            return [render_pong(await agent.numpy_version(), info.pid)]
        if isinstance(request, Exec):
            return render_command(await agent.run(request.args, timeout_s=request.timeout_s), request.timeout_s)
        return [render_evaluation(await agent.eval(request.code, timeout_s=EVAL_S), EVAL_S)]


class _Incoming:
    """What a client sends: one line, bounded in length and time, and what comes behind it, which is not for us."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        self._loop = loop
        self._connection = connection
        self._ended = False

    async def read_line(self) -> bytes:
        received = bytearray()
        try:
            async with asyncio.timeout(REQUEST_S):
                while b"\n" not in received and not self._ended:
                    received += await self._read()
                    if len(received) > MAX_LINE_BYTES:
                        raise InvalidInput(f"A request has at most {MAX_LINE_BYTES} bytes")
        except TimeoutError:
            raise InvalidInput(f"No complete request arrived within {REQUEST_S:g} s") from None
        return bytes(received.partition(b"\n")[0])

    async def drain(self) -> None:
        while not self._ended:
            await self._read()

    async def _read(self) -> bytes:
        data = await self._loop.sock_recv(self._connection, _READ_BYTES)
        self._ended = not data
        return data


def render_command(result: CommandResult, timeout_s: float) -> Iterator[bytes]:
    """`result` is held until the last piece is taken: until then its output counts as kept."""
    if result.timed_out:
        yield render_failure("GuestTimeout", f"The command did not end within {timeout_s:g} s and was killed")
    else:
        yield from render_exec(result.stdout, result.stderr, result.returncode, truncated=result.output_truncated)


def render_evaluation(result: EvalResult, timeout_s: float) -> bytes:
    if result.timed_out:
        lost = "; the interpreter was restarted" if result.interpreter_restarted else ""
        return render_failure("GuestTimeout", f"The code did not end within {timeout_s:g} s{lost}")
    if result.error is not None:
        return render_failure(result.error.type, result.error.message, result.error.traceback)
    return render_eval(result.repr or "None")


def bind_port(port: int) -> socket.socket:
    try:
        return _try_tobind_port(port, shared=False)
    except OverflowError as error:
        raise InvalidInput(f"{port} is not a port") from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise HostLacks(f"Port {port} cannot be taken: {error.strerror}") from error
    try:
        # Perhaps only connections that are over are left there, of a sandbox or a daemon before.
        return _try_tobind_port(port, shared=True)
    except OSError as error:
        raise _taken(port) from error


def _taken(port: int) -> Conflict:
    return Conflict(f"Port {port} is taken", hint="Ask for another, or for none to get any")


def _try_tobind_port(port: int, shared: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shared)
        sock.bind((HOST, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _send_now(connection: socket.socket, reply: bytes) -> None:
    try:
        connection.send(reply)
    except OSError as error:
        _log.debug("A client did not take its answer: %s", error)
