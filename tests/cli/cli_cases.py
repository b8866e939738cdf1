"""forkd as people run it, with a home, a runtime directory and, where wanted, a daemon of its own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from forkd.cli.main import main

DEADLINE_S = 60
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Done = subprocess.CompletedProcess[str]


class Cli:
    def __init__(self, home: Path, runtime: Path) -> None:
        self.home = home
        self.runtime = runtime
        self._started: list[subprocess.Popen[str]] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FORKD_")}
        self.env = {
            **kept,
            "FORKD_HOME": str(home),
            "FORKD_RUNTIME_DIR": str(runtime),
            "FORKD_ENGINE": "fake",
            "FORKD_BIND": "none",
        }

    def __call__(self, *words: str, stdin: str | bytes = b"", **env: str) -> Done:
        """In a process of its own."""
        done = subprocess.run(
            self.command(*words),
            env=self.env | env,
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            timeout=DEADLINE_S,
        )
        return Done(words, done.returncode, done.stdout.decode(), done.stderr.decode())

    def ask(self, *words: str, **env: str) -> Done:
        """The same in this process, which is faster."""
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        out, err = _Text(), _Text()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name in [name for name in os.environ if name.startswith("FORKD_")]:
                patch.delenv(name)
            for name, value in (self.env | env).items():
                patch.setenv(name, value)
            try:
                code = main(words)
            except SystemExit as stop:
                code = int(stop.code or 0)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return Done(words, code, out.text(), err.text())

    def json(self, *words: str) -> Any:
        done = self.ask(*words, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        process = subprocess.Popen(self.command(*words), env=self.env, text=True, **pipes)
        self._started.append(process)
        return process

    def stop(self) -> None:
        """End what a failed test left running."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._started.clear()

    def fork(self, *words: str) -> str:
        """The id of a new sandbox."""
        [info] = self.json("fork", "warm", *words)
        return str(info["id"])

    def ids(self) -> list[str]:
        return [info["id"] for info in self.json("ls")]

    def tags(self) -> list[str]:
        return [info["tag"] for info in self.json("snapshot", "ls")]

    def pid(self) -> int | None:
        """Of the daemon, if one runs."""
        done = self.ask("status", "--json")
        return int(json.loads(done.stdout)["pid"]) if done.returncode == 0 else None

    @property
    def snapshots(self) -> Path:
        return self.home / "snapshots"

    @staticmethod
    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "forkd.cli.main", *words]


class _Text(io.TextIOWrapper):
    """Standard output that is kept, with the `buffer` that commands write bytes to."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="surrogateescape", newline="")

    def text(self) -> str:
        self.flush()
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode("utf-8", "replace")


def check(done: Done, code: int, *said: str) -> None:
    """An error as people see it: a sentence and a hint on standard error, nothing else."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    assert "\nhint: " in done.stderr
    for each in said:
        assert each in done.stderr


def check_last(done: Done, code: int, said: str) -> None:
    """The same after progress was shown."""
    *_, sentence, hint = done.stderr.splitlines()
    check(Done(done.args, done.returncode, done.stdout, f"{sentence}\n{hint}"), code, said)


def eventually(true: Callable[[], object], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def serving(cli: Cli) -> Iterator[None]:
    """A daemon in the foreground of somebody else's terminal. Its sandboxes end with it."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(cli.command("serve", "--on-stop", "kill"), env=cli.env, **quiet)
    try:
        eventually(lambda: cli.ask("status").returncode == 0)
        yield
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@contextmanager
def ended(cli: Cli) -> Iterator[Cli]:
    """Whatever daemon was started inside is gone afterwards, and so are its sandboxes."""
    try:
        yield cli
    finally:
        done = cli("down")
        assert done.returncode == 0, done.stderr
        assert [path.name for path in cli.runtime.glob("vms/*")] == []
