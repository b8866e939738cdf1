"""Waiting for an event, with a deadline; and processes by what /proc says of them."""

import asyncio
import ctypes
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from forkd.host.system import start_time_ticks

T = TypeVar("T")

DEADLINE_S = 30.0
_PR_SET_NO_NEW_PRIVS = 38
_prctl = ctypes.CDLL(None).prctl


def renounce_privileges() -> None:
    """As every process of a VM has before it becomes its program: the preexec_fn of one that is to pass for such."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def wait_until(
    condition: Callable[[], T],
    what: str = "it did not come about",
    every_s: float = 0.005,
    within_s: float = DEADLINE_S,
) -> T:
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(every_s)
    return value


async def until(condition: Callable[[], T]) -> T:
    async with asyncio.timeout(DEADLINE_S):
        while not (value := condition()):
            await asyncio.sleep(0.01)
    return value


def has_ended(pid: int) -> bool:
    """Perhaps nobody has waited for it yet."""
    return start_time_ticks(pid) is None


def is_reaped(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def find_processes(environ: str = "", command: str = "") -> list[int]:
    """Those that have these texts in their environment and in their command."""
    wanted = {name: text.encode() for name, text in (("environ", environ), ("cmdline", command)) if text}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if all(text in (entry / name).read_bytes() for name, text in wanted.items()):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A child of ours that does nothing, and is gone at the end."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
