"""The SDK as people import it: light, typed, and the same with and without await."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import forkd
from forkd.client import async_branching, async_files, async_processes, async_spawn, branching, files, processes, spawn
from forkd.errors import ForkdError

PAIRS = [
    (forkd.Controller, forkd.AsyncController),
    (forkd.Sandbox, forkd.AsyncSandbox),
    (files.Files, async_files.AsyncFiles),
    (processes.Commands, async_processes.AsyncCommands),
    (processes.Pty, async_processes.AsyncPty),
    (processes.CommandHandle, async_processes.AsyncCommandHandle),
    (processes.PtyHandle, async_processes.AsyncPtyHandle),
    (spawn.Sandboxes, async_spawn.AsyncSandboxes),
    (branching.Trial, async_branching.AsyncTrial),
]


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind) if name == "__init__" or not name.startswith("_")}


@pytest.mark.parametrize(("plain", "awaited"), PAIRS, ids=lambda kind: kind.__name__)
def test_both_have_the_same_methods_with_the_same_parameters(plain: type, awaited: type) -> None:
    ours, theirs = public(plain), public(awaited)
    assert ours.keys() == theirs.keys()
    for name, method in ours.items():
        if not callable(method):
            assert type(method) is type(theirs[name])
            continue
        here, there = (inspect.signature(found).parameters.values() for found in (method, theirs[name]))
        assert [(p.name, p.kind, p.default) for p in here] == [(p.name, p.kind, p.default) for p in there], name


@pytest.mark.parametrize(("plain", "awaited"), PAIRS, ids=lambda kind: kind.__name__)
def test_what_asks_the_daemon_is_awaited(plain: type, awaited: type) -> None:
    for name, method in public(awaited).items():
        if isinstance(method, FunctionType) and name != "__init__":
            streams = "Generator" in str(inspect.signature(getattr(plain, name)).return_annotation)
            assert inspect.iscoroutinefunction(method) is not streams, name


def test_importing_costs_no_http_client() -> None:
    for names in ("", "Sandbox", "Controller, Sandbox"):
        code = f"from forkd import {names or '__version__'}"
        code += "\nimport sys; sys.exit('httpx' in sys.modules or 'asyncio' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0, names


def test_every_name_is_there_and_no_other() -> None:
    for name in forkd.__all__:
        assert getattr(forkd, name) is not None
    assert set(dir(forkd)) >= {
        "Sandbox",
        "AsyncSandbox",
        "Controller",
        "AsyncController",
        "BranchMode",
        "CommandResult",
    }
    assert not hasattr(forkd, "on_fork")
    assert forkd.ControllerError is ForkdError


def test_type_checkers_see_the_names_that_are_loaded_late() -> None:
    tree = ast.parse(Path(forkd.__file__).read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [alias for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {alias.asname or alias.name for alias in imports} == set(forkd.__all__) - {"__version__"}
    assert (Path(forkd.__file__).parent / "py.typed").exists()


def test_a_controller_takes_what_the_forkd_sdk_takes_in_that_order() -> None:
    orders = {
        "__init__": ["base_url", "token", "timeout"],
        "spawn_sandboxes": [
            "snapshot_tag",
            "n",
            "per_child_netns",
            "memory_limit_mib",
            "prewarm",
            "live_fork",
            "hugepages",
        ],
        "branch_sandbox": ["sandbox_id", "tag", "diff", "measure_diff", "mode", "wait"],
        "exec_command": ["sandbox_id", "args", "timeout_secs"],
    }
    for name, expected in orders.items():
        parameters = inspect.signature(getattr(forkd.Controller, name)).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
        assert positional == expected
