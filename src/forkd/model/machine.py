"""The shape of a virtual machine and what it may use of the host, checked when asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forkd.errors import InvalidInput

# What a kernel needs to boot depends on the image; see docs/reference/limits.md.
MIN_MEMORY_MIB = 32
MAX_MEMORY_MIB = 1024 * 1024
MAX_VCPUS = 64
MAX_CHILDREN = 1000
MAX_MEMORY_LIMIT_MIB = 1 << 30
# The kernel refuses a quota of less than a millisecond in its period of a tenth of a second.
MIN_CPUS = 0.01
MAX_CPUS = 4096.0
MAX_PIDS = 1 << 22
MAX_IO_MIB_S = 1 << 30
# Firecracker's: they make CPUs of different hosts look alike to guests.
CPU_TEMPLATES = ("T2", "T2S", "T2CL", "T2A", "V1N1")


@dataclass(frozen=True)
class MachineSpec:
    memory_mib: int = 512
    vcpus: int = 1
    cpu_template: str | None = None

    def __post_init__(self) -> None:
        if not MIN_MEMORY_MIB <= self.memory_mib <= MAX_MEMORY_MIB:
            raise InvalidInput(
                f"A machine cannot have {self.memory_mib} MiB of memory",
                hint=f"Use {MIN_MEMORY_MIB} to {MAX_MEMORY_MIB} MiB; an image with Python needs 128 or more",
            )
        if not 1 <= self.vcpus <= MAX_VCPUS:
            raise InvalidInput(f"A machine cannot have {self.vcpus} vCPUs", hint=f"Use 1 to {MAX_VCPUS}")
        if self.cpu_template is not None and self.cpu_template not in CPU_TEMPLATES:
            known = ", ".join(CPU_TEMPLATES)
            raise InvalidInput(f"There is no CPU template {self.cpu_template}", hint=f"Use one of {known}, or none")


def parse_count(n: int) -> int:
    """How many children one fork may ask for."""
    if not 1 <= n <= MAX_CHILDREN:
        raise InvalidInput(f"Cannot fork {n} children", hint=f"Use 1 to {MAX_CHILDREN}")
    return n


@dataclass(frozen=True)
class Limits:
    """None: no limit. They hold for the VM and its VMM together. The kernel enforces each, else it is an error."""

    memory_mib: int | None = None
    cpus: float | None = None  # processor time, in cores
    pids: int | None = None  # processes and threads on the host
    io_mib_s: int | None = None  # of each disk, reads and writes each

    def __post_init__(self) -> None:
        _check(self.memory_mib, "memory limit", " MiB", 1, MAX_MEMORY_LIMIT_MIB)
        _check(self.cpus, "CPU limit", " cores", MIN_CPUS, MAX_CPUS)
        _check(self.pids, "limit of processes", "", 1, MAX_PIDS)
        _check(self.io_mib_s, "limit of disk I/O", " MiB/s", 1, MAX_IO_MIB_S)

    def __str__(self) -> str:
        values = (self.memory_mib, self.cpus, self.pids, self.io_mib_s)
        nouns = ("MiB of memory", "cores", "processes", "MiB/s of disk I/O")
        parts = (f"{value} {noun}" for value, noun in zip(values, nouns, strict=True) if value is not None)
        return ", ".join(parts) or "none"


def _check(value: float | None, what: str, unit: str, least: float, most: float) -> None:
    if value is not None and not (math.isfinite(value) and least <= value <= most):
        message = f"The {what} must be between {least:g} and {most:.0f}{unit}, got {value}"
        raise InvalidInput(message, hint=f"Leave out the {what} for none")


NO_LIMITS = Limits()
