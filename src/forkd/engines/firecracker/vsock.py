"""Streams to the agent through Firecracker's vsock: a unix socket where one names a port of the guest first."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

from forkd.engines.sockets import connected_socket
from forkd.errors import EngineFailed, GuestTimeout

_LONGEST_ANSWER = 32
_FIRST_RETRY_S = 0.002
_SLOWEST_RETRY_S = 0.1
# Firecracker gives a guest 2 s to take a connection.
_ANSWER_DEADLINE_S = 5.0


async def open_stream(path: Path, port: int, deadline_s: float) -> socket.socket:
    """Until somebody in the guest listens on `port`. Raises GuestTimeout, EngineFailed."""
    deadline, pause_s = time.monotonic() + deadline_s, _FIRST_RETRY_S
    while True:
        try:
            return await _try_open(path, port)
        except (OSError, EOFError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise GuestTimeout(f"The guest's agent took no connection within {deadline_s:g} s") from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _SLOWEST_RETRY_S)


async def _try_open(path: Path, port: int) -> socket.socket:
    sock = connected_socket(path)
    try:
        async with asyncio.timeout(_ANSWER_DEADLINE_S):
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, b"CONNECT %d\n" % port)
            answer = b""
            while not answer.endswith(b"\n"):
                # One by one: what follows the line is the agent's.
                byte = await loop.sock_recv(sock, 1)
                if not byte:
                    raise EOFError("Firecracker hung up: nobody listens in the guest")
                answer += byte
                if len(answer) > _LONGEST_ANSWER:
                    raise EngineFailed("Firecracker's vsock answered what is no answer")
        if not answer.startswith(b"OK "):
            raise EngineFailed(f"Firecracker's vsock answered {answer.decode('ascii', 'replace')!a}")
    except BaseException:
        sock.close()
        raise
    return sock
