"""The SDK: `Controller` is the REST API route by route, `Sandbox` one virtual machine as an object.

The Async classes are the same with `await`. Names are loaded when first used, so that a command line that needs one
of them does not pay for the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forkd.client.arguments import BranchMode as BranchMode
    from forkd.client.async_controller import AsyncController as AsyncController
    from forkd.client.async_sandbox import AsyncSandbox as AsyncSandbox
    from forkd.client.async_spawn import AsyncSandboxes as AsyncSandboxes
    from forkd.client.controller import Controller as Controller
    from forkd.client.merge_errors import MergeConflicts as MergeConflicts
    from forkd.client.merge_errors import MergeIncomplete as MergeIncomplete
    from forkd.client.results import CommandFailed as CommandFailed
    from forkd.client.results import CommandResult as CommandResult
    from forkd.client.results import EvalFailed as EvalFailed
    from forkd.client.results import Execution as Execution
    from forkd.client.sandbox import Sandbox as Sandbox
    from forkd.client.spawn import Sandboxes as Sandboxes
    from forkd.client.stream import StreamEvent as StreamEvent

_HOMES = {
    "AsyncController": "async_controller",
    "AsyncSandbox": "async_sandbox",
    "AsyncSandboxes": "async_spawn",
    "BranchMode": "arguments",
    "CommandFailed": "results",
    "CommandResult": "results",
    "Controller": "controller",
    "EvalFailed": "results",
    "MergeConflicts": "merge_errors",
    "MergeIncomplete": "merge_errors",
    "Execution": "results",
    "Sandbox": "sandbox",
    "Sandboxes": "spawn",
    "StreamEvent": "stream",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
