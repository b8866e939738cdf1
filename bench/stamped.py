"""`python -m bench.stamped FILE serve …`: forkd as it is, with stamps on what the daemon itself waits for.

A line of FILE is one wait: for the engine (`fork`) or for the guest's agent (`exec`, `eval`), in milliseconds. What
else a client waits for is the daemon's own. On SIGUSR2 it adds a line with the number of tasks in the loop.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import ParamSpec, TypeVar

from forkd.cli.main import main
from forkd.guest.calls import Agent
from forkd.runtime import spawning
from forkd.runtime.spawn import fork_children

P = ParamSpec("P")
T = TypeVar("T")


class Stamps:
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

    def on_count(self, _number: int, _frame: FrameType | None) -> None:
        self.write("tasks", len(asyncio.all_tasks()))


def install(stamps: Stamps) -> None:
    # Where the daemon looks it up.
    vars(spawning)["fork_children"] = stamps.on("fork", fork_children)
    Agent.run = stamps.on("exec", Agent.run)  # type: ignore[method-assign, assignment]
    Agent.eval = stamps.on("eval", Agent.eval)  # type: ignore[method-assign, assignment]
    signal.signal(signal.SIGUSR2, stamps.on_count)


if __name__ == "__main__":
    install(Stamps(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
