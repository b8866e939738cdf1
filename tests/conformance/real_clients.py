"""The clients of forkd 0.5.3 themselves, each installed in an environment of its own and driven from here."""

import contextlib
import fcntl
import json
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

# What each of them can do.
METHODS = [
    "branch_sandbox",
    "eval_code",
    "exec_command",
    "get_sandbox",
    "kill_sandbox",
    "list_sandboxes",
    "list_snapshots",
    "ping_sandbox",
    "spawn_sandboxes",
]
_TYPESCRIPT_SDK = "@deeplethe/forkd@0.5.3"
_DRIVERS = Path(__file__).parent / "drivers"
_INSTALL_S = 280
_DONE = "installed"


class ClientError(Exception):
    """What a client raised, in its own process."""

    def __init__(self, described: dict[str, Any]) -> None:
        super().__init__(described["message"])
        self.type: str = described["type"]
        self.message: str = described["message"]
        self.status: int | None = described.get("status")
        self.body: Any = described.get("body")
        self.url: str | None = described.get("url")


class Driver:
    """One process of a client: a line with a call goes in, a line with what came of it comes out."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def make(self, **call: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the client's process ended"
        answer = json.loads(line)
        if "error" in answer:
            raise ClientError(answer["error"])
        return answer["result"]


@contextlib.contextmanager
def driven(installed: Path, client: str, env: Mapping[str, str]) -> Iterator[Driver]:
    """`python`, `typescript` or `mcp`, installed below `installed` where it is not yet."""
    command, cwd = _INSTALL[client](installed / client)
    process = subprocess.Popen(
        command, env=env, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Driver(process)
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()


# The same calls for Python and TypeScript, in Python's words.


class PythonController:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        driver.make(path=["Controller"], keep="controller")

    def names(self) -> list[str]:
        found: list[str] = self._driver.make(path=["Controller"], names=True)
        return found

    def call(self, method: str, *args: object, **kwargs: object) -> Any:
        return self._driver.make(path=["controller", method], args=args, kwargs=kwargs)


class TypeScriptController:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        driver.make(path=["Controller"], construct=True, keep="controller")

    def names(self) -> list[str]:
        found: list[str] = self._driver.make(path=["Controller"], names=True)
        return sorted(_snake(name) for name in found if name != "request")  # private in the source, not in JavaScript

    def call(self, method: str, *args: object, **kwargs: object) -> Any:
        # BRANCH takes the names of the wire.
        options = kwargs if method == "branch_sandbox" else {_camel(name): value for name, value in kwargs.items()}
        if method == "spawn_sandboxes":
            options, args = {"snapshotTag": args[0], **options}, ()
        return self._driver.make(path=["controller", _camel(method)], args=[*args, *([options] if options else [])])


Controller = PythonController | TypeScriptController
CONTROLLERS: dict[str, type[Controller]] = {"python": PythonController, "typescript": TypeScriptController}


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda match: match[1].upper(), name)


def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda match: "_" + match[0].lower(), name)


# Installing, once; kept between runs


def _install_python(directory: Path, driver: str, *requirements: str) -> tuple[list[str], None]:
    python = str(directory / "venv/bin/python")

    def install() -> None:
        venv.create(directory / "venv", with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, *requirements], capture_output=True, text=True, timeout=_INSTALL_S)
        assert done.returncode == 0, done.stderr

    _install_once(directory, sys.version + "\n".join(requirements), install)
    return [python, str(_DRIVERS / driver)], None


def _install_typescript(directory: Path) -> tuple[list[str], Path]:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("needs node and npm")

    def install() -> None:
        options = ["--no-audit", "--no-fund", "--ignore-scripts"]
        command = [npm, "install", "--prefix", str(directory), *options, _TYPESCRIPT_SDK]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
        if done.returncode != 0:
            said = re.search(r"code (\w+)", done.stderr)
            why = said.group(1) if said else "it does not say why"
            pytest.skip(f"npm cannot install {_TYPESCRIPT_SDK} here: {why}")

    _install_once(directory, _TYPESCRIPT_SDK, install)
    # As text, so that packages are looked for where node is started, not where the driver lies.
    driver = (_DRIVERS / "typescript_driver.mjs").read_text()
    return [node, "--input-type=module", "--eval", driver], directory


def _install_once(directory: Path, wanted: str, install: Callable[[], None]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = directory / _DONE
        if done.is_file() and done.read_text() == wanted:
            return
        shutil.rmtree(directory)
        directory.mkdir()
        install()
        done.write_text(wanted)


# How to start each, by its name; it is installed where it is not yet.
_INSTALL: dict[str, Callable[[Path], tuple[list[str], Path | None]]] = {
    "python": lambda directory: _install_python(directory, "python_driver.py", "forkd==0.5.3"),
    # It was written for the first mcp and does not start with the second.
    "mcp": lambda directory: _install_python(directory, "mcp_driver.py", "forkd-mcp==0.2.0", "mcp<2"),
    "typescript": _install_typescript,
}
