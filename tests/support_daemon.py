"""A real `forkd serve` in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from forkd.client.controller import Controller
from forkd.host.paths import Home

START_S = 120.0
STOP_S = 60.0


def environment(home: Home, engine: str) -> dict[str, str]:
    """That of a forkd of this home, with nothing of ours that could lead it elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FORKD_")}
    return {**kept, "FORKD_HOME": str(home.root), "FORKD_RUNTIME_DIR": str(home.runtime), "FORKD_ENGINE": engine}


class Served:
    """Started, and perhaps not ready yet."""

    def __init__(
        self,
        home: Home,
        *flags: str,
        engine: str = "fake",
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.home = home
        self._log = home.root / "served.log"
        self._begun_at = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("a") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "forkd.cli.main", "serve", *flags],
                env=environment(home, engine) | dict(env or {}),
                stdout=output,
                stderr=output,
            )

    @property
    def url(self) -> str:
        return f"unix://{self.home.runtime}/forkd.sock"

    @property
    def places(self) -> list[str]:
        """The addresses that it says it listens on, the unix socket first."""
        return re.findall(r"^Listening on (\S+)", self.read_log(), re.MULTILINE)

    def controller(self, timeout: float = 60.0) -> Controller:
        return Controller(self.url, timeout=timeout)

    def read_log(self) -> str:
        """What it has said since it started."""
        with self._log.open("rb") as file:
            file.seek(self._begun_at)
            return file.read().decode("utf-8", "replace")

    def memory_mib(self, key: str) -> float:
        """By the kernel's count: VmRSS is what it has now, VmHWM the most it had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition(f"{key}:")[2].split()[0]) / 1024

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while "Ready: engine" not in self.read_log():
            assert self.process.poll() is None, f"The daemon ended: {self.read_log()}"
            assert time.monotonic() < deadline, f"The daemon did not become ready: {self.read_log()}"
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(STOP_S)

    def stop(self) -> None:
        """As an operator would; it has to end well. Fine when it has ended already."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            assert self.process.wait(STOP_S) in (0, -signal.SIGKILL), self.read_log()
        except subprocess.TimeoutExpired:
            self.kill()
            raise


@contextmanager
def served(
    home: Home,
    *flags: str,
    engine: str = "fake",
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    """Ready; told to stop afterwards. Its sandboxes go on unless `flags` say otherwise."""
    daemon = Served(home, *flags, engine=engine, prefix=prefix, env=env)
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.stop()


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """One for 127.0.0.1, and its key."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*make.split(), *files], check=True, capture_output=True, timeout=60)
    key.chmod(0o600)
    return cert, key
