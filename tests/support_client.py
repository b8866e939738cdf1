"""A plain HTTP client of a daemon, which sends whatever a test wants."""

import base64
import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NOTHING: Mapping[str, str] = {}
JSON = {"Content-Type": "application/json"}
ANSWER_S = 120.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> tuple[int, str]:
        """The status, and the code that the body says it by."""
        return self.status, self.body["code"]


@dataclass(frozen=True)
class SentEvent:
    kind: str
    data: Any
    id: str | None = None

    @property
    def output(self) -> bytes:
        return base64.b64decode(self.data["data"])


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """`place` is a line the daemon printed: unix:///…, http://… or https://…."""

    def __init__(self, place: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.place = place
        self.token = token
        self._tls = tls

    def connection(self, timeout: float = ANSWER_S) -> http.client.HTTPConnection:
        scheme, _, rest = self.place.partition("://")
        if scheme == "unix":
            return _UnixConnection(rest, timeout)
        if scheme == "https":
            return http.client.HTTPSConnection(rest, timeout=timeout, context=self._tls)
        return http.client.HTTPConnection(rest, timeout=timeout)

    def raw(self, timeout: float = ANSWER_S) -> socket.socket:
        connection = self.connection(timeout)
        connection.connect()
        assert connection.sock is not None
        return connection.sock

    def exchange(self, *data: bytes, half_close: bool = False) -> Answer:
        """Bytes as they are, of which the daemon may not read all; and what it answers."""
        received = b""
        with self.raw() as sock:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for piece in data:
                    sock.sendall(piece)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while more := sock.recv(65536):
                    received += more
        head, _, body = received.partition(b"\r\n\r\n")
        return Answer(int(head.split()[1]), {}, body)

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] = NOTHING, data: Any = None
    ) -> Answer:
        sent = dict(headers)
        if self.token is not None:
            sent.setdefault("Authorization", f"Bearer {self.token}")
        if body is not None:
            data = json.dumps(body)
            sent = JSON | sent
        with contextlib.closing(self.connection()) as connection:
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())  # type: ignore[arg-type]

    def get(self, path: str, **more: Any) -> Answer:
        return self.ask("GET", path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> Answer:
        return self.ask("POST", path, body, **more)

    def delete(self, path: str, **more: Any) -> Answer:
        return self.ask("DELETE", path, **more)

    def stream(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = NOTHING
    ) -> Iterator[SentEvent]:
        data = None if body is None else json.dumps(body)
        with contextlib.closing(self.connection()) as connection:
            connection.request(method, path, data, {**(JSON if body is not None else {}), **headers})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            yield from parse_events(iter(response.readline, b""))


def parse_events(lines: Iterator[bytes]) -> Iterator[SentEvent]:
    fields: dict[str, str] = {}
    for line in lines:
        text = line.decode().rstrip("\n")
        if text:
            name, _, value = text.partition(": ")
            fields[name] = value
        elif fields:
            if "data" in fields:
                yield SentEvent(fields["event"], json.loads(fields["data"]), fields.get("id"))
            fields = {}
