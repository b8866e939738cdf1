"""forkd: fork warmed virtual machines, copy-on-write.

    from forkd import Sandbox

    with Sandbox.create("python") as sandbox:
        print(sandbox.commands.run("uname -a").stdout)

Names are loaded when first used: the guest agent's process imports this package too, and must not pay for httpx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from forkd.client.async_controller import AsyncController
    from forkd.client.async_sandbox import AsyncSandbox
    from forkd.client.controller import Controller
    from forkd.client.execution import EvalFailed, Execution
    from forkd.client.output import CommandFailed, CommandResult
    from forkd.client.sandbox import Sandbox
    from forkd.client.stream import StreamEvent
    from forkd.client.values import BranchMode
    from forkd.errors import (
        AgentError,
        CommandNotStarted,
        Conflict,
        ForkdError,
        GuestDied,
        GuestTimeout,
        InvalidInput,
        NoCapacity,
        NotFound,
        NotRunning,
        Unauthorized,
        Unreachable,
        Unsupported,
    )
    from forkd.errors import ForkdError as ControllerError

_HOMES = {
    "Sandbox": "forkd.client.sandbox",
    "AsyncSandbox": "forkd.client.async_sandbox",
    "Controller": "forkd.client.controller",
    "AsyncController": "forkd.client.async_controller",
    "BranchMode": "forkd.client.values",
    "CommandFailed": "forkd.client.output",
    "CommandResult": "forkd.client.output",
    "EvalFailed": "forkd.client.execution",
    "Execution": "forkd.client.execution",
    "StreamEvent": "forkd.client.stream",
}
_ERRORS = {
    "AgentError",
    "CommandNotStarted",
    "Conflict",
    "ControllerError",
    "ForkdError",
    "GuestDied",
    "GuestTimeout",
    "InvalidInput",
    "NoCapacity",
    "NotFound",
    "NotRunning",
    "Unauthorized",
    "Unreachable",
    "Unsupported",
}

__all__ = [
    "AgentError",
    "AsyncController",
    "AsyncSandbox",
    "BranchMode",
    "CommandFailed",
    "CommandNotStarted",
    "CommandResult",
    "Conflict",
    "Controller",
    "ControllerError",
    "EvalFailed",
    "Execution",
    "ForkdError",
    "GuestDied",
    "GuestTimeout",
    "InvalidInput",
    "NoCapacity",
    "NotFound",
    "NotRunning",
    "Sandbox",
    "StreamEvent",
    "Unauthorized",
    "Unreachable",
    "Unsupported",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _ERRORS:
        # The name that code written for the forkd SDK on PyPI catches.
        value = getattr(importlib.import_module("forkd.errors"), "ForkdError" if name == "ControllerError" else name)
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
