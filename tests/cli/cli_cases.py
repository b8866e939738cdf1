"""forkd as people run it, with a home, a runtime directory and, where wanted, a daemon of its own."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from support_daemon import environment

from forkd.cli.main import main
from forkd.host.paths import Home

DEADLINE_S = 60
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Done = subprocess.CompletedProcess[str]
_BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


class Running(subprocess.Popen[str]):
    """A command that was started and runs on."""

    def line(self) -> str:
        """The next one of its standard output."""
        assert self.stdout is not None
        return self.stdout.readline()

    def until(self, text: str) -> None:
        """Returns when it says this on standard error."""
        assert self.stderr is not None
        for line in self.stderr:
            if text in line:
                return

    def unread(self) -> tuple[int, str]:
        """How it ends when nobody reads its output any more, and what it says then."""
        assert self.stdout is not None and self.stderr is not None
        self.stdout.close()
        with self.stderr:
            return self.wait(DEADLINE_S), self.stderr.read()

    def finish(self, number: int | None = None, times: int = 1, apart_s: float = 0.0) -> str:
        """What it said last, once it has ended; by a signal, if one is given."""
        for _ in range(times if number is not None else 0):
            self.send_signal(number)
            time.sleep(apart_s)
        _, said = self.communicate(timeout=DEADLINE_S)
        assert "Traceback" not in (said or "")
        return said


class Cli:
    """With the fake engine; `real` has the engine of this machine."""

    def __init__(self, home: Home, *, real: bool = False) -> None:
        self.home = home.root
        self.runtime = home.runtime
        self._started: list[Running] = []
        self._deadline_s = 200 if real else DEADLINE_S
        self.env = environment(home, "auto" if real else "fake") | {"FORKD_BIND": "none"}
        self._look = self.__call__ if real else self.ask

    def __call__(self, *words: str, stdin: str | bytes = b"", **env: str) -> Done:
        """In a process of its own."""
        done = subprocess.run(
            self.command(*words),
            env=self.env | env,
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            timeout=self._deadline_s,
        )
        return Done(words, done.returncode, done.stdout.decode(), done.stderr.decode())

    def ask(self, *words: str, **env: str) -> Done:
        """The same in this process, which is faster."""
        out, err = _Text(), _Text()
        with handlers_kept(), pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            for name in [name for name in os.environ if name.startswith("FORKD_")]:
                patch.delenv(name)
            for name, value in (self.env | env).items():
                patch.setenv(name, value)
            try:
                code = main(words)
            except SystemExit as stop:
                code = int(stop.code or 0)
        return Done(words, code, out.text(), err.text())

    def json(self, *words: str) -> Any:
        done = self._look(*words, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def start(self, *words: str, prefix: Sequence[str] = (), stdin: int = subprocess.DEVNULL, **env: str) -> Running:
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = Running([*prefix, *self.command(*words)], env=self.env | env, text=True, **pipes)
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

    def create(self, tag: str, *words: str) -> Done:
        """A snapshot of the small image."""
        return self.ask("snapshot", "create", "--image", "small", "--tag", tag, *words)

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


def without(directory: Path, *modules: str) -> dict[str, str]:
    """The environment of a Python that does not have these packages."""
    (directory / "sitecustomize.py").write_text(_BLOCK.format(blocked=set(modules)))
    return {"PYTHONPATH": str(directory)}


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Signals are handled afterwards as they were before."""
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def ended(cli: Cli) -> Iterator[Cli]:
    """Whatever was started inside is gone afterwards: commands that a failed test left, the daemon, its sandboxes."""
    try:
        yield cli
    finally:
        cli.stop()
        done = cli("down")
        assert done.returncode == 0, done.stderr
        assert [path.name for path in cli.runtime.glob("vms/*")] == []
