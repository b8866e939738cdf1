"""A real `forkd serve` in a process of its own, with an engine, a snapshot called `warm`, and perhaps a token."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support_daemon import served

from forkd.host.marked import find_marked
from forkd.host.paths import Home

TAG = "warm"
ANSWER_S = 120.0
# What every sandbox can be asked about its past.
WARM = "past = {'answer': 42}"
WARM_VM = WARM + "\nimport numpy"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Daemon:
    port: int
    home: Path
    runtime: Path
    engine: str
    image: str
    token: str | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client_env(self) -> dict[str, str]:
        """The environment of a client: nothing of ours but where the daemon is, and its token."""
        env = clean_environment() | {"FORKD_URL": self.url}
        return env | ({"FORKD_TOKEN": self.token} if self.token is not None else {})

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Answer:
        """One plain request, as no SDK makes it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        sent = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        if body is not None:
            sent["Content-Type"] = "application/json"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), sent | headers)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def make_snapshot(self, tag: str) -> None:
        warm = WARM if self.engine == "fake" else WARM_VM
        request = {"tag": tag, "image": self.image, "memory_mib": 256, "warm": warm, "wait": True}
        made = self.ask("POST", "/v1/snapshots", request)
        assert made.status == 201, made.body

    def live(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.ask("GET", "/v1/sandboxes").json
        return listed


def clean_environment() -> dict[str, str]:
    ours = ("FORKD_", "PYTHON")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def find_free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def running_daemon(home: Path, engine: str, image: str, token: str | None) -> Iterator[Daemon]:
    """Stopped at the end, which has to leave nothing behind but its snapshot, for the next one with this home."""
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as runtime:
        daemon = Daemon(find_free_port(), home, Path(runtime) / "run", engine, image, token)
        with served(Home(home, daemon.runtime), *_render_flags(daemon), engine=engine):
            if daemon.ask("GET", f"/v1/snapshots/{TAG}").status == 404:
                daemon.make_snapshot(TAG)
            # Now, so that no test finds a template that was not there before.
            assert daemon.ask("POST", f"/v1/snapshots/{TAG}/warm").status in (200, 501)
            yield daemon
        assert find_marked(daemon.runtime) == {}
        assert list((daemon.runtime / "vms").iterdir()) == []


def _render_flags(daemon: Daemon) -> list[str]:
    # forkd's MCP server always asks for a memory limit, and has to work where there is none.
    flags = ["--bind", f"127.0.0.1:{daemon.port}", "--on-stop", "kill", "--unenforced-limits", "drop"]
    if daemon.token is None:
        return flags
    path = daemon.home / "token"
    path.write_text(daemon.token + "\n")
    path.chmod(0o600)
    return [*flags, "--token-file", str(path)]
