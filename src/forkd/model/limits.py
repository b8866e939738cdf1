"""What one sandbox may use of the host, checked when it is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forkd.errors import InvalidInput

MAX_MEMORY_LIMIT_MIB = 1 << 30
# The kernel takes no quota below a millisecond in its period of a tenth of a second.
MIN_CPUS = 0.01
MAX_CPUS = 4096.0
MAX_PIDS = 1 << 22
MAX_IO_MIB_S = 1 << 30


@dataclass(frozen=True)
class Limits:
    """None: no limit. All of the VM counts, its VMM included, and each is the kernel's to enforce, or an error."""

    memory_mib: int | None = None
    cpus: float | None = None  # processor time, in cores
    pids: int | None = None  # processes and threads on the host
    io_mib_s: int | None = None  # of each disk, reads and writes each

    def __post_init__(self) -> None:
        _check(self.memory_mib, "MiB is no memory limit", 1, MAX_MEMORY_LIMIT_MIB)
        _check(self.cpus, "cores is no CPU limit", MIN_CPUS, MAX_CPUS)
        _check(self.pids, "is no limit of processes", 1, MAX_PIDS)
        _check(self.io_mib_s, "MiB/s is no limit of disk I/O", 1, MAX_IO_MIB_S)

    def __str__(self) -> str:
        values = (self.memory_mib, self.cpus, self.pids, self.io_mib_s)
        nouns = ("MiB of memory", "cores", "processes", "MiB/s of disk I/O")
        parts = (f"{value} {noun}" for value, noun in zip(values, nouns, strict=True) if value is not None)
        return ", ".join(parts) or "none"


def _check(value: float | None, complaint: str, least: float, most: float) -> None:
    if value is not None and not (math.isfinite(value) and least <= value <= most):
        raise InvalidInput(f"{value} {complaint}", hint=f"Use {least:g} to {most:.0f}, or none")


NO_LIMITS = Limits()
