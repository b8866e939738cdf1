"""What a daemon, or this process, holds: processes, descriptors, sockets, tasks, rows, files.

After the work it is what it was before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.served import Served, count_tasks
from forkd.host.files import STAMPS
from forkd.host.marked import find_marked
from forkd.host.system import memory_use

# An answer may arrive before the daemon has put everything away that it needed for it.
SETTLE_S = 15.0
_LOOK_S = 0.1
# How threads are called that fork live VMs.
_TRACERS = "fork-"
# Grows to its limit and is cut there; its rows are not leaks.
_BOUNDED_TABLES = frozenset({"events"})
# The audit log and its rotated predecessors, and the write-ahead log of a database that is open.
_COMING_AND_GOING = re.compile(r"home/(audit\.log(\.\d+)?|registry\.db-(wal|shm))")


@dataclass(frozen=True)
class Inventory:
    processes: frozenset[int]
    descriptors: Mapping[str, int]  # by what they are
    listeners: int
    tasks: int
    rows: Mapping[str, int]  # by table
    files: frozenset[str]
    threads: int = 0  # that trace


@dataclass(frozen=True)
class Use:
    """What a process uses at one moment."""

    resident_mib: float
    descriptors: int
    threads: int


def take_inventory(daemon: Served) -> Inventory:
    descriptors = _describe_descriptors(daemon.pid)
    return Inventory(
        processes=frozenset(_descendants(daemon.pid)) | {one.pid for one in find_marked(daemon.home.runtime).values()},
        descriptors=Counter(kind for kind, _ in descriptors),
        listeners=len({name for _, name in descriptors} & _listening_sockets()),
        tasks=count_tasks(daemon),
        rows=_count_rows(daemon.home.registry),
        files=_list_files("home", daemon.home.root) | _list_files("run", daemon.home.runtime),
    )


def take_own_inventory(directory: Path, others: Iterable[int] = ()) -> Inventory:
    """Of this process, whose VMs live in `directory`. `others` are processes whose descriptors count too."""
    alive = [pid for pid in (os.getpid(), *others) if _is_there(pid)]
    descriptors = [kind for pid in alive for kind, _ in _describe_descriptors(pid)]
    return Inventory(
        processes=frozenset(_descendants(os.getpid())) | {one.pid for one in find_marked(directory).values()},
        descriptors=Counter(descriptors),
        listeners=0,
        tasks=len(asyncio.all_tasks()),
        rows={},
        files=_list_files("run", directory),
        threads=sum(thread.name.startswith(_TRACERS) for thread in threading.enumerate()),
    )


def take_use(pid: int) -> Use:
    threads = re.search(r"^Threads:\s+(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert threads is not None
    return Use(memory_use(pid).resident_bytes / 2**20, len(list(Path(f"/proc/{pid}/fd").iterdir())), int(threads[1]))


async def settle(before: Inventory, take: Callable[[], Inventory]) -> list[str]:
    """What there is more than `before`, once it no longer gets less."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        left = find_leaks(before, take())
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(_LOOK_S)


def find_leaks(before: Inventory, after: Inventory) -> list[str]:
    """Each thing that is there and was not, in words. Pure."""
    leaks = [f"process {pid}" for pid in sorted(after.processes - before.processes)]
    for kind, count in sorted(after.descriptors.items()):
        leaks += [f"descriptor of {kind}"] * (count - before.descriptors.get(kind, 0))
    leaks += ["listening socket"] * (after.listeners - before.listeners)
    leaks += ["task"] * (after.tasks - before.tasks)
    leaks += ["thread"] * (after.threads - before.threads)
    for table, count in sorted(after.rows.items()):
        if table not in _BOUNDED_TABLES:
            leaks += [f"row of {table}"] * (count - before.rows.get(table, 0))
    names = sorted(after.files - before.files)
    return leaks + [f"file {name}" for name in names if _COMING_AND_GOING.fullmatch(name) is None]


def _descendants(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += [int(text) for text in (task / "children").read_text().split()]
    return [*children, *(deeper for child in children if _is_there(child) for deeper in _descendants(child))]


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}/task").exists()


def _describe_descriptors(pid: int) -> list[tuple[str, str]]:
    """The kind and the name of each: `socket` and `socket:[123]`."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = str(entry.readlink())
        except FileNotFoundError:
            continue
        kind = name if name.startswith(("/", "anon_inode:")) else name.partition(":")[0]
        found.append((kind, name))
    return found


def _listening_sockets() -> set[str]:
    """Of this machine, over TCP, as descriptors are named."""
    names = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":  # TCP_LISTEN
            names.add(f"socket:[{fields[9]}]")
    return names


def _count_rows(registry: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(f"file:{registry}?mode=ro", uri=True)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in tables
            if not name.startswith("sqlite_")
        }


def _list_files(label: str, root: Path) -> frozenset[str]:
    """Paths below `root`, directories and sockets too; what links point to is not ours."""
    found = set()
    for directory, directories, names in os.walk(root):
        place = Path(label) / Path(directory).relative_to(root)
        # What was verified is remembered beside it, once its files are old enough to be told from changed ones.
        found |= {str(place / name) for name in (*directories, *names) if name != STAMPS}
    return frozenset(found)
