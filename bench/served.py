"""A daemon to measure: `forkd serve` in a process and a home of its own, with the stamps of bench.stamped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.rest import Refused, Rest
from forkd.errors import EngineFailed, ForkdError
from forkd.host.paths import Home
from forkd.runtime import demo
from forkd.wire.endpoint import SOCKET_NAME

TAG = "bench"
IMAGE = "python"
START_S = 60.0
STOP_S = 60.0
STAMP_S = 5.0
_LOOK_S = 0.02
_UNSUPPORTED = 501


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
            raise EngineFailed(f"One {kind} left the stamps {stamps}")
        return stamps[0][1]


@contextlib.contextmanager
def served(engine: str, images: Path, root: Path) -> Iterator[Served]:
    """Stopped afterwards, its sandboxes with it. `root` is an empty directory for its home, on a disk."""
    (root / "images").symlink_to(images, target_is_directory=True)
    with tempfile.TemporaryDirectory(prefix="fkd-") as runtime, tempfile.TemporaryDirectory(prefix="fkd-") as notes:
        stamps, log = Path(notes) / "stamps", Path(notes) / "log"
        stamps.touch()
        home = Home(root, Path(runtime))
        port = find_free_port()
        with log.open("wb") as output:
            command = _render_command(engine, stamps, port)
            process = subprocess.Popen(command, env=_render_env(home), cwd=_checkout(), stdout=output, stderr=output)
        daemon = Served(process.pid, engine, home, port, stamps, log)
        try:
            _wait_until_ready(daemon, process)
            yield daemon
        finally:
            _stop(process)
        if process.returncode != 0:
            raise EngineFailed(f"The daemon ended with {process.returncode}", details=log.read_text()[-2000:])


def make_snapshot(daemon: Served, warm: str) -> None:
    """With its template, where the engine can fork one: made in the background it would be in the way of everything."""
    with daemon.rest() as rest:
        machine = {"memory_mib": demo.MACHINE.memory_mib, "vcpus": demo.MACHINE.vcpus}
        rest.ask("POST", "/v1/snapshots", {"tag": TAG, "image": IMAGE, "warm": warm, "wait": True, **machine})
        try:
            rest.ask("POST", f"/v1/snapshots/{TAG}/warm")
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
    return [sys.executable, "-m", "bench.stamped", str(stamps), "serve", *settings]


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
