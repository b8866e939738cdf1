"""A real daemon process over the fake engine, and a client that sends what it is told to."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.host.paths import Home

START_S = 30.0
STOP_S = 25.0
NOTHING: Mapping[str, str] = {}
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.content)


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
        self._token = token
        self._tls = tls

    def connection(self, timeout: float = 20.0) -> http.client.HTTPConnection:
        scheme, _, rest = self.place.partition("://")
        if scheme == "unix":
            return _UnixConnection(rest, timeout)
        if scheme == "https":
            return http.client.HTTPSConnection(rest, timeout=timeout, context=self._tls)
        return http.client.HTTPConnection(rest, timeout=timeout)

    def raw(self, timeout: float = 20.0) -> socket.socket:
        connection = self.connection(timeout)
        connection.connect()
        assert connection.sock is not None
        return connection.sock

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] = NOTHING, data: Any = None
    ) -> Answer:
        sent = dict(headers)
        if self._token is not None:
            sent.setdefault("Authorization", f"Bearer {self._token}")
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


class DaemonProcess:
    def __init__(self, home: Home, *flags: str, env: Mapping[str, str] = NOTHING) -> None:
        self.home = home
        variables = {name: value for name, value in os.environ.items() if not name.startswith("FORKD_")}
        variables |= {"FORKD_HOME": str(home.root), "FORKD_RUNTIME_DIR": str(home.runtime), "FORKD_ENGINE": "fake"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forkd.cli.main", "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            stdin=subprocess.DEVNULL,
            text=True,
            env=variables | dict(env),
        )

    def places(self, count: int) -> list[str]:
        """What it says it listens on; fails when it ends instead."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(count)]
        assert all(line.startswith("Listening on ") for line in lines), self.errors()
        return [line.removeprefix("Listening on ").strip() for line in lines]

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(STOP_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


@contextlib.contextmanager
def running(home: Home, *flags: str, env: Mapping[str, str] = NOTHING) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(home, *flags, env=env)
    try:
        yield daemon
    finally:
        daemon.close()


@contextlib.contextmanager
def fresh_home() -> Iterator[Home]:
    """Short, as sockets live in it; no VM may be left in it."""
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as path:
        home = Home(Path(path) / "home", Path(path) / "run")
        yield home
        if home.vms.is_dir():
            assert list(home.vms.iterdir()) == []


def is_alive(pid: int) -> bool:
    """One that has ended and that nobody has asked about since is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(true: Any, what: str, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
