"""What keeps a process in: read from the kernel, so that what is said is what is in force."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NAMESPACES = ("user", "mnt", "ipc", "uts", "net", "pid")
# Without one of its own it sees no other process: there is no /proc in its root. See docs/explanation/cells.md.
_WANTED = ("mnt", "ipc", "uts", "net")
_CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_FILTERED = "2"


@dataclass(frozen=True)
class Cell:
    """`namespaces`: those that are not ours. `lacks`: what a whole cell has and this one does not."""

    user: int
    own_user: bool  # not ours, and in no other living VM
    namespaces: tuple[str, ...]
    filters: int  # of seccomp, that all have to allow a call
    capabilities: int  # all its sets together
    no_new_privileges: bool
    cgroup: str | None
    memory_file: str  # "read-only", "writable" or "none"
    lacks: tuple[str, ...] = ()


def read_cell(pid: int, *, cgroup: str | None, filters: int) -> Cell | None:
    """None: it has ended. As root, all of it can be seen; of a process of our own user too.

    `filters`: how many of seccomp it has to be under.
    """
    try:
        status = parse_status(Path(f"/proc/{pid}/status").read_text(errors="replace"))
        namespaces = tuple(name for name in NAMESPACES if _has_own(pid, name))
        memory = _read_memory_file(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return render_cell(status, namespaces, cgroup, memory, our_user=os.geteuid(), filters=filters)


def render_cell(
    status: Mapping[str, str],
    namespaces: tuple[str, ...],
    cgroup: str | None,
    memory_file: str,
    *,
    our_user: int,
    filters: int,
) -> Cell:
    """Pure."""
    user = int(status["Uid"].split()[0])
    capabilities = 0
    for name in _CAPABILITY_SETS:
        capabilities |= int(status[name], 16)
    cell = Cell(
        user=user,
        own_user=user != our_user,
        namespaces=namespaces,
        filters=int(status.get("Seccomp_filters", "0")) if status.get("Seccomp") == _FILTERED else 0,
        capabilities=capabilities,
        no_new_privileges=status.get("NoNewPrivs") == "1",
        cgroup=cgroup,
        memory_file=memory_file,
    )
    return Cell(**{**vars(cell), "lacks": find_lacks(cell, filters)})


def find_lacks(cell: Cell, filters: int) -> tuple[str, ...]:
    """Pure."""
    lacks = [f"{name} namespace" for name in _WANTED if name not in cell.namespaces]
    if not cell.own_user:
        lacks.append("user id" if "user" in cell.namespaces else "user id or user namespace")
    if cell.filters < filters:
        lacks.append("seccomp allow-list")
    if cell.capabilities:
        lacks.append("empty capabilities")
    if not cell.no_new_privileges:
        lacks.append("no_new_privs")
    if cell.cgroup is None:
        lacks.append("cgroup")
    if cell.memory_file == "writable":
        lacks.append("read-only memory file")
    return tuple(lacks)


def parse_status(text: str) -> dict[str, str]:
    parted = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in parted}


def _has_own(pid: int, name: str) -> bool:
    return Path(f"/proc/{pid}/ns/{name}").readlink() != Path(f"/proc/self/ns/{name}").readlink()


def _read_memory_file(pid: int) -> str:
    """By the regular files it has open for reading and writing: a VMM has no other one."""
    found = "none"
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG(entry.stat().st_mode):
                info = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
                mode = int(info.partition("flags:")[2].split()[0], 8) & os.O_ACCMODE
                if mode == os.O_RDWR:
                    return "writable"
                found = "read-only" if mode == os.O_RDONLY else found
    return found
