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
    from forkd.client import (
        AsyncController,
        AsyncSandbox,
        AsyncSandboxes,
        BranchMode,
        CommandFailed,
        CommandResult,
        Controller,
        EvalFailed,
        Execution,
        Sandbox,
        Sandboxes,
        StreamEvent,
    )
    from forkd.errors import (
        AgentError,
        CommandNotStarted,
        Conflict,
        ForkdError,
        GuestDied,
        GuestTimeout,
        InvalidInput,
        NetworkFailed,
        NoCapacity,
        NotFound,
        NotRunning,
        Unauthorized,
        Unreachable,
        Unsupported,
    )
    from forkd.errors import ForkdError as ControllerError
    from forkd.model.network import Network

__all__ = [
    "AgentError",
    "AsyncController",
    "AsyncSandbox",
    "AsyncSandboxes",
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
    "Network",
    "NetworkFailed",
    "NoCapacity",
    "NotFound",
    "NotRunning",
    "Sandbox",
    "Sandboxes",
    "StreamEvent",
    "Unauthorized",
    "Unreachable",
    "Unsupported",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # ControllerError is the name that code written for the forkd SDK on PyPI catches.
    source = "ForkdError" if name == "ControllerError" else name
    errors = importlib.import_module("forkd.errors")
    elsewhere = "forkd.model.network" if name == "Network" else "forkd.client"
    home = errors if hasattr(errors, source) else importlib.import_module(elsewhere)
    value: object = getattr(home, source)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
