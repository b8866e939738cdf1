"""How many VMs this machine can take, decided before one is started. Pure, but for `look`."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import NoCapacity
from forkd.host.system import CHILD_MIB, available_mib

# Never handed out: the host and its page cache (which holds the shared memory of all children) live here.
RESERVE_MIB = 512
DISK_RESERVE_MIB = 64
# Starts that run at once per core: one on the CPU, one waiting for its turn hides the gaps between their phases.
STARTS_PER_CPU = 2


@dataclass(frozen=True)
class Capacity:
    available_mib: int
    cpus: int


def look() -> Capacity:
    return Capacity(available_mib(), len(os.sched_getaffinity(0)))


def disk_mib(path: Path) -> int:
    return shutil.disk_usage(path).free // 2**20


def admit_children(n: int, capacity: Capacity, child_mib: int = CHILD_MIB) -> int:
    """How many of `n` children may start at the same time; raises NoCapacity when they do not fit at all."""
    room = max(0, capacity.available_mib - RESERVE_MIB) // child_mib
    if n > room:
        raise NoCapacity(
            f"{n} children need about {n * child_mib} MiB, and {capacity.available_mib} MiB are available "
            f"({RESERVE_MIB} MiB of them stay reserved)",
            hint=f"Fork at most {room} now, or free some memory",
        )
    return min(n, starts_at_once(capacity))


def starts_at_once(capacity: Capacity) -> int:
    return max(1, capacity.cpus * STARTS_PER_CPU)


def admit_boot(memory_mib: int, capacity: Capacity, disk_mib: int) -> None:
    """A booting VM may touch all its memory, and all of it is a file: a full disk would kill it with SIGBUS."""
    if memory_mib + RESERVE_MIB > capacity.available_mib:
        raise NoCapacity(
            f"A VM of {memory_mib} MiB does not fit: {capacity.available_mib} MiB are available, "
            f"{RESERVE_MIB} MiB of them stay reserved",
            hint="Use a smaller --memory or free some memory",
        )
    if memory_mib + DISK_RESERVE_MIB > disk_mib:
        raise NoCapacity(
            f"A VM of {memory_mib} MiB needs as much space on disk, and {disk_mib} MiB are left",
            hint="Free some space or set FORKD_HOME to another disk",
        )
