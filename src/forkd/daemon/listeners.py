"""Where we listen: a unix socket that only its owner can open, and TCP, with TLS if there is a certificate."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from forkd.daemon.accept import Acceptor
from forkd.daemon.cap import ConnectionCap
from forkd.daemon.connection import KEEP_ALIVE_S, Connection
from forkd.daemon.settings import Bind
from forkd.errors import Conflict, HostLacks, InvalidInput
from forkd.host.paths import ensure_private

BACKLOG = 2048
_PROBE_S = 2.0
_MAX_SOCKET_BYTES = 107
_STARTED_S = 30.0


class Server(uvicorn.Server):
    """One of several servers in a process that handles signals itself."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, cap: ConnectionCap) -> None:
        super().__init__(config)
        self._tls = tls
        self._cap = cap
        self.listening = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Without asyncio's servers; see accept.py."""
        self.servers = [
            cast(asyncio.base_events.Server, Acceptor(sock, self._make_connection, self._tls, self._cap))
            for sock in sockets or ()
        ]
        self.started = True
        self.listening.set()

    def _make_connection(self) -> Connection:
        made = Connection(self.config, self.server_state, {})
        made.cap = self._cap
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def ended(self) -> None:
        assert self.task is not None
        await asyncio.shield(self.task)

    def break_off(self) -> None:
        """Requests under way are cancelled now."""
        for task in list(self.server_state.tasks):
            task.cancel()


def check_exposure(bind: Bind | None, *, has_token: bool) -> None:
    if bind is not None and not bind.loopback and not has_token:
        raise InvalidInput(
            f"Listening on {bind.host} without a token would give this machine to all who can reach it",
            hint="Make one with: forkd token create NAME, or pass --token-file",
        )


def load_tls(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise InvalidInput(f"Expected a certificate in {cert} and its key in {key}: {error.reason or error}") from error
    except OSError as error:
        raise InvalidInput(f"Cannot read the certificate {cert} or its key {key}: {error.strerror}") from error
    return context


def open_tcp(bind: Bind) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
    # The protocol by name: asyncio sets TCP_NODELAY, worth 40 ms a request, only where it reads it here.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((bind.host, bind.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise Conflict(
                f"{render_address(bind.host, bind.port)} is in use already",
                hint="Stop it, or choose another address with --bind",
            ) from error
        raise HostLacks(f"Cannot listen on {bind.host} port {bind.port}: {error.strerror}") from error
    return sock


@contextlib.contextmanager
def opened_unix(path: Path) -> Iterator[socket.socket]:
    """Private from the first instant; replaces one whose daemon is gone; removed afterwards."""
    if len(os.fsencode(path)) > _MAX_SOCKET_BYTES - 10:
        raise InvalidInput(f"The path {path} is too long for a socket", hint="Choose a shorter one with --socket")
    ensure_private_parent(path)
    _check_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(3)}")
    try:
        try:
            # Before it has a name: on Linux the name inherits it.
            os.fchmod(sock.fileno(), 0o600)
            sock.bind(str(temporary))
            sock.listen(BACKLOG)
            ours = temporary.lstat().st_ino
            temporary.rename(path)
        except OSError as error:
            raise HostLacks(f"Cannot listen on {path}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
        try:
            yield sock
        finally:
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_ino == ours:
                    path.unlink()
    finally:
        sock.close()


def ensure_private_parent(path: Path) -> None:
    """Make the directory, private, when it is missing; an existing one is left as it is."""
    if not path.parent.exists():
        ensure_private(path.parent)


def _check_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidInput(f"{path} exists and is not a socket", hint="Choose another path with --socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            raise HostLacks(f"Cannot connect to the socket {path}: {error.strerror or error}") from error
    raise Conflict(f"Another daemon listens on {path}", hint="Use it, or stop it with: forkd down")


@contextlib.asynccontextmanager
async def served(
    app: ASGIApp, sock: socket.socket, tls: ssl.SSLContext | None, drain_s: float, cap: ConnectionCap
) -> AsyncIterator[Server]:
    """Requests are answered from here on; afterwards those under way are given `drain_s`, then cancelled."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    server = Server(config, tls, cap)
    task = server.task = asyncio.create_task(server.serve([sock]), name="listener")
    try:
        async with asyncio.timeout(_STARTED_S):
            await server.listening.wait()
        yield server
    finally:
        server.should_exit = True
        await task


def render_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
