"""A server on a real socket that writes down what it is asked and answers by script, or by a function."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Seen:
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pieces:
    """A chunked body; without `whole` the connection breaks before its end."""

    pieces: tuple[bytes, ...]
    whole: bool = True


class Drop:
    """Read the request, then close the connection without a word."""


Step = Reply | Pieces | Drop


class Recorder:
    def __init__(self, answer: Callable[[Seen], Step]) -> None:
        self.answer = answer
        self.seen: list[Seen] = []
        self.connections = 0
        self.url = ""


def recording(*script: Step, port: int = 0) -> AbstractContextManager[Recorder]:
    steps = iter(script)
    return answering(lambda _: next(steps, Reply(500, {"error": "script is over"})), port=port)


@contextmanager
def answering(answer: Callable[[Seen], Step], *, port: int = 0) -> Iterator[Recorder]:
    recorder = Recorder(answer)

    class Handler(_Handler):
        record = recorder

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = False
        recorder.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield recorder
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20
    record: Recorder

    def setup(self) -> None:
        super().setup()
        self.record.connections += 1

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        seen = Seen(self.command, self.path, dict(self.headers.items()), self._read())
        self.record.seen.append(seen)
        step = self.record.answer(seen)
        if isinstance(step, Drop):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif isinstance(step, Pieces):
            self._stream(step)
        else:
            self._reply(step)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _reply(self, step: Reply) -> None:
        body = step.body
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(step.status)
        for name, value in step.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _stream(self, step: Pieces) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in step.pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
        if step.whole:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
