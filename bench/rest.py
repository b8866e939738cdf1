"""Requests as plain as they can be, over one connection that is kept: a client adds next to nothing by itself."""

from __future__ import annotations

import http.client
import json
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forkd.errors import EngineFailed

# Forks of a hundred on a slow machine are answered once all are there.
ANSWER_S = 180.0


class Refused(EngineFailed):
    """Answered, with something else than a success."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Rest:
    """`took_ms` of the last request: from before its first byte is sent until the last of the answer is read."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self.took_ms = 0.0

    @classmethod
    def by_socket(cls, path: Path) -> Rest:
        return cls(_UnixConnection(path, ANSWER_S))

    @classmethod
    def by_port(cls, port: int) -> Rest:
        return cls(http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """The parsed answer; anything but a success is an error."""
        sent = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        begun = time.perf_counter()
        self._connection.request(method, path, sent, headers)
        response = self._connection.getresponse()
        received = response.read()
        self.took_ms = (time.perf_counter() - begun) * 1000
        if response.status >= 300:
            what = f"{method} {path} was answered with {response.status}: {received[:500]!r}"
            raise Refused(what, response.status)
        return json.loads(received) if received else None
