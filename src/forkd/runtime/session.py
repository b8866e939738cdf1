"""One run of forkd and the runtime directory it owns. What a killed run left behind is swept by the next one.

    <runtime>/<pid>-<start time>/<machine>/   sockets and console of each VM

The owner is in the directory's name, so there is no instant at which a directory exists and nobody owns it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forkd.host.cgroup import remove_groups
from forkd.host.marked import kill_marked
from forkd.host.memory import start_time_ticks
from forkd.host.paths import ensure_private


@contextmanager
def session(runtime: Path) -> Iterator[Path]:
    """Yield a fresh runtime directory of this process; gone afterwards, whatever happened."""
    ensure_private(runtime)
    sweep(runtime)
    pid = os.getpid()
    directory = runtime / f"{pid}-{start_time_ticks(pid)}"
    directory.mkdir(mode=0o700, exist_ok=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        remove_groups(directory)


def sweep(runtime: Path) -> list[str]:
    """Kill the VMs and remove the directories of runs that are over; returns the names of those runs."""
    swept = []
    for directory in runtime.iterdir():
        owner = _parse_owner(directory.name)
        if owner is None or start_time_ticks(owner[0]) == owner[1]:
            continue
        kill_marked(directory)
        remove_groups(directory)
        shutil.rmtree(directory, ignore_errors=True)
        swept.append(directory.name)
    return swept


def _parse_owner(name: str) -> tuple[int, int] | None:
    """A pid and its start time. Zero and numbers no pid can have are no process."""
    pid, _, started = name.partition("-")
    if not (pid.isdecimal() and started.isdecimal() and len(pid) < 10 and len(started) < 20 and int(pid)):
        return None
    return int(pid), int(started)
