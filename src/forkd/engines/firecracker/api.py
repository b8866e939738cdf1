"""Firecracker's API: HTTP/1.1 over a unix socket, one call after the other on one connection.

Firecracker is not trusted more than its guest: what it answers is bounded, and every wait for it has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.engines.firecracker.plan import Call
from forkd.engines.machine import connected_socket
from forkd.errors import EngineFailed, GuestTimeout

START_DEADLINE_S = 60.0
MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 64 * 1024

_FIRST_RETRY_S = 0.001
_SLOWEST_RETRY_S = 0.05
_FIRST_VSOCK_RETRY_S = 0.002
_SLOWEST_VSOCK_RETRY_S = 0.1
_CLOSE_DEADLINE_S = 5.0
_LONGEST_ANSWER = 32
# Firecracker gives a guest 2 s to take a connection.
_ANSWER_DEADLINE_S = 5.0
_MAX_FAULT = 500
_STATUS = re.compile(r"HTTP/1\.[01] ([2-5][0-9]{2})(?: |$)")


@dataclass(frozen=True)
class _Head:
    status: int
    length: int


class Api:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def connect(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Wait for the socket to appear: Firecracker makes it a moment after its start."""
        if self._stream is not None:
            return
        try:
            async with asyncio.timeout(deadline_s):
                self._stream = await self._reach()
        except TimeoutError as error:
            raise EngineFailed(f"Firecracker did not open its API within {deadline_s:g} s") from error
        except OSError as error:
            raise EngineFailed(f"Could not connect to Firecracker's API: {error.strerror}") from error

    async def call(self, call: Call) -> dict[str, Any] | None:
        """Firecracker's answer. Raises EngineFailed, which names the call; the connection is then given up."""
        async with self._turn:
            await self.connect()
            try:
                async with asyncio.timeout(call.deadline_s):
                    return await self._exchange(call)
            except TimeoutError as error:
                await self.close()
                raise EngineFailed(f"Firecracker did not answer {call} within {call.deadline_s:g} s") from error
            except _Refused as error:
                raise EngineFailed(f"Firecracker refused {call}: {error}") from None
            except (OSError, EOFError) as error:
                await self.close()
                raise EngineFailed(f"Firecracker hung up during {call}") from error
            except ValueError as error:
                await self.close()
                raise EngineFailed(f"Firecracker's answer to {call} is invalid: {error}") from error
            except BaseException:
                # What is still to come would be taken for the next call's answer.
                await self.close()
                raise

    async def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream[1].transport.abort()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_CLOSE_DEADLINE_S):
                    await stream[1].wait_closed()

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        pause_s = _FIRST_RETRY_S
        while True:
            try:
                sock = connected_socket(self._path)
                break
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _SLOWEST_RETRY_S)
        try:
            return await asyncio.open_connection(sock=sock, limit=MAX_HEAD_BYTES)
        except BaseException:
            sock.close()
            raise

    async def _exchange(self, call: Call) -> dict[str, Any] | None:
        if self._stream is None:
            raise EOFError
        reader, writer = self._stream
        writer.write(render_request(call))
        await writer.drain()
        try:
            head = parse_head(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError as error:
            raise ValueError("its head has no end") from error
        return parse_answer(head.status, await reader.readexactly(head.length))


class _Refused(Exception):
    """With Firecracker's own words."""


def render_request(call: Call) -> bytes:
    body = b"" if call.body is None else json.dumps(call.body).encode()
    lines = [f"{call.method} {call.path} HTTP/1.1", "Host: localhost", "Accept: application/json"]
    if call.body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def parse_head(head: bytes) -> _Head:
    """Raises ValueError."""
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    status = _STATUS.match(first)
    if status is None:
        raise ValueError("it does not start with an HTTP status line")
    fields = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    if any(name == "transfer-encoding" for name, _ in fields):
        raise ValueError("it has no length")
    lengths = [value for name, value in fields if name == "content-length"]
    if len(lengths) > 1 or not all(re.fullmatch("[0-9]{1,9}", value) for value in lengths):
        raise ValueError("its Content-Length is invalid")
    length = int(lengths[0]) if lengths else 0
    if length > MAX_BODY_BYTES:
        raise ValueError(f"it is {length} bytes long")
    return _Head(int(status[1]), length)


def parse_answer(status: int, body: bytes) -> dict[str, Any] | None:
    """Raises ValueError, or _Refused with what Firecracker says about it."""
    answer: object = None
    if body:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = body
    if status >= 300:
        raise _Refused(_describe_fault(status, answer))
    if answer is not None and not isinstance(answer, dict):
        raise ValueError("it is not a JSON object")
    return answer


def _describe_fault(status: int, answer: object) -> str:
    fault = answer.get("fault_message") if isinstance(answer, dict) else None
    if not isinstance(fault, str) or not fault.strip():
        return f"status {status}"
    text = "".join(c if c.isprintable() else " " for c in fault.strip())
    return text if len(text) <= _MAX_FAULT else text[:_MAX_FAULT] + "..."


async def open_stream(path: Path, port: int, deadline_s: float) -> socket.socket:
    """A stream to the agent through vsock: a unix socket where one names a port of the guest first.

    Waits until a process in the guest listens on `port`. Raises GuestTimeout, EngineFailed.
    """
    deadline, pause_s = time.monotonic() + deadline_s, _FIRST_VSOCK_RETRY_S
    while True:
        try:
            return await _try_open(path, port)
        except (OSError, EOFError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise GuestTimeout(f"The guest's agent took no connection within {deadline_s:g} s") from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _SLOWEST_VSOCK_RETRY_S)


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
                    raise EOFError("Firecracker hung up: no process listens in the guest")
                answer += byte
                if len(answer) > _LONGEST_ANSWER:
                    raise EngineFailed(f"Firecracker's vsock answered more than {_LONGEST_ANSWER} bytes")
        if not answer.startswith(b"OK "):
            raise EngineFailed(f"Firecracker's vsock answered {answer.decode('ascii', 'replace')!a}")
    except BaseException:
        sock.close()
        raise
    return sock
