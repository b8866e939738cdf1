"""A daemon to measure: `forkd serve` in a process and a home of its own, and requests to it as plain as they can be.

`python -m bench.served FILE serve ...` is forkd as it is, with stamps on what the daemon itself waits for; what else a
client waits for is the daemon's own. On SIGUSR2 it adds a line with the number of tasks in the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, Self, TypeVar

from forkd.cli.main import main
from forkd.errors import EngineFailed, ForkdError
from forkd.guest.agent import Agent
from forkd.host.paths import Home
from forkd.model.machine import MachineSpec
from forkd.runtime import demo, spawn
from forkd.runtime.branches import Branches
from forkd.runtime.fork import fork_children
from forkd.runtime.origin import Branch
from forkd.wire.endpoint import SOCKET_NAME

TAG = "bench"
IMAGE = "python"
START_S = 60.0
STOP_S = 60.0
STAMP_S = 5.0
_LOOK_S = 0.02
_UNSUPPORTED = 501
_PIECE_BYTES = 1 << 20
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

    def __exit__(self, *_: object) -> None:
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

    def measure(self, path: str) -> tuple[int, int]:
        """How many bytes are sent, and of how many that are made; they are read as they come, and not kept."""
        begun, size = time.perf_counter(), 0
        self._connection.request("GET", path)
        response = self._connection.getresponse()
        if response.status >= 300:
            raise Refused(f"GET {path} was answered with {response.status}", response.status)
        while piece := response.read(_PIECE_BYTES):
            size += len(piece)
        self.took_ms = (time.perf_counter() - begun) * 1000
        return size, int(response.headers["X-Forkd-Unpacked-Bytes"])


@dataclass(frozen=True)
class Served:
    """One that answers. `stamps` is the file its stamps go to, `log` what it says."""

    pid: int
    engine: str
    home: Home
    port: int
    stamps: Path
    log: Path

    @property
    def socket(self) -> Path:
        return self.home.runtime / SOCKET_NAME

    def rest(self) -> Rest:
        return Rest.by_socket(self.socket)


class StampReader:
    """The stamps since it was last asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size

    def take(self) -> list[tuple[str, float]]:
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines = file.read()
        self._read += len(lines)
        stamps = [json.loads(line) for line in lines.splitlines()]
        return [(stamp["kind"], stamp["value"]) for stamp in stamps]

    def take_one(self, kind: str) -> float:
        """Of the one request since: more or fewer would mean that something else was measured."""
        stamps = self.take()
        if [found for found, _ in stamps] != [kind]:
            raise EngineFailed(f"Expected one stamp of {kind}, found {stamps}")
        return stamps[0][1]


@dataclass(frozen=True)
class Place:
    """A home for daemons, one after the other, and a directory for what they note."""

    home: Home
    notes: Path


@contextlib.contextmanager
def placed(images: Path, root: Path) -> Iterator[Place]:
    """`root` is an empty directory for the home, on a disk."""
    (root / "images").symlink_to(images, target_is_directory=True)
    with tempfile.TemporaryDirectory(prefix="fkd-") as runtime, tempfile.TemporaryDirectory(prefix="fkd-") as notes:
        yield Place(Home(root, Path(runtime)), Path(notes))


@contextlib.contextmanager
def running(engine: str, place: Place) -> Iterator[Served]:
    """Stopped afterwards, its sandboxes with it."""
    stamps, log, port = place.notes / "stamps", place.notes / "log", find_free_port()
    stamps.touch()
    with log.open("wb") as output:
        command, env = _render_command(engine, stamps, port), _render_env(place.home)
        process = subprocess.Popen(command, env=env, cwd=_checkout(), stdout=output, stderr=output)
    daemon = Served(process.pid, engine, place.home, port, stamps, log)
    try:
        _wait_until_ready(daemon, process)
        yield daemon
    finally:
        _stop(process)
    if process.returncode != 0:
        raise EngineFailed(f"The daemon ended with {process.returncode}", details=log.read_text()[-2000:])


@contextlib.contextmanager
def served(engine: str, images: Path, root: Path) -> Iterator[Served]:
    """One in a home of its own."""
    with placed(images, root) as place, running(engine, place) as daemon:
        yield daemon


def make_snapshot(daemon: Served, warm: str, machine: MachineSpec = demo.MACHINE) -> None:
    """With its template, where the engine can fork one: made in the background it would be in the way of everything."""
    with daemon.rest() as rest:
        size = {"memory_mib": machine.memory_mib, "vcpus": machine.vcpus}
        rest.ask("POST", "/v1/snapshots", {"tag": TAG, "image": IMAGE, "warm": warm, "wait": True, **size})
        warm_template(rest, TAG)


def warm_template(rest: Rest, tag: str) -> None:
    """Where the engine can fork one."""
    try:
        rest.ask("POST", f"/v1/snapshots/{tag}/warm")
    except Refused as error:
        if error.status != _UNSUPPORTED:
            raise


def count_tasks(daemon: Served) -> int:
    reader = StampReader(daemon.stamps)
    os.kill(daemon.pid, signal.SIGUSR2)
    deadline = time.monotonic() + STAMP_S
    while time.monotonic() < deadline:
        for kind, value in reader.take():
            if kind == "tasks":
                return int(value)
        time.sleep(_LOOK_S)
    raise EngineFailed(f"The daemon did not count its tasks within {STAMP_S:g} s")


def find_free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _render_command(engine: str, stamps: Path, port: int) -> list[str]:
    settings = ["--engine", engine, "--bind", f"127.0.0.1:{port}", "--on-stop", "kill"]
    return [sys.executable, "-m", "bench.served", str(stamps), "serve", *settings]


def _render_env(home: Home) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORKD_")}
    return kept | {"FORKD_HOME": str(home.root), "FORKD_RUNTIME_DIR": str(home.runtime)}


def _checkout() -> Path:
    return Path(__file__).resolve().parent.parent


def _wait_until_ready(daemon: Served, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineFailed(f"The daemon ended with {process.returncode}", details=daemon.log.read_text()[-2000:])
        with contextlib.suppress(OSError, ForkdError), daemon.rest() as rest:
            rest.ask("GET", "/readyz")
            return
        time.sleep(_LOOK_S)
    raise EngineFailed(f"The daemon was not ready within {START_S:g} s", details=daemon.log.read_text()[-2000:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


P = ParamSpec("P")
T = TypeVar("T")


class Stamps:
    """A line of the file is a time in milliseconds: of the engine (`fork`), the agent (`exec`, `eval`), pauses."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, value: float) -> None:
        os.write(self._fd, json.dumps({"kind": kind, "value": value}).encode() + b"\n")

    def on(self, kind: str, call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        @functools.wraps(call)
        async def stamped(*args: P.args, **kwargs: P.kwargs) -> T:
            begun = time.perf_counter()
            result = await call(*args, **kwargs)
            # After the reading of the clock: the writing counts as the daemon's.
            self.write(kind, (time.perf_counter() - begun) * 1000)
            return result

        return stamped

    def on_branch(self, call: Callable[P, Awaitable[Branch]]) -> Callable[P, Awaitable[Branch]]:
        """How long the source of each branch stood still, which the daemon tells in whole milliseconds."""

        @functools.wraps(call)
        async def stamped(*args: P.args, **kwargs: P.kwargs) -> Branch:
            branch = await call(*args, **kwargs)
            self.write("pause", branch.pause_s * 1000)
            return branch

        return stamped

    def on_count(self, _number: int, _frame: FrameType | None) -> None:
        self.write("tasks", len(asyncio.all_tasks()))


def install(stamps: Stamps) -> None:
    # Where the daemon looks it up.
    vars(spawn)["fork_children"] = stamps.on("fork", fork_children)
    Agent.run = stamps.on("exec", Agent.run)  # type: ignore[method-assign, assignment]
    Branches.branch = stamps.on_branch(Branches.branch)  # type: ignore[method-assign, assignment]
    Agent.eval = stamps.on("eval", Agent.eval)  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGUSR2, stamps.on_count)


if __name__ == "__main__":
    install(Stamps(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
